"""One export from plan to published package: the order of the steps, and what is written where.

Each step is a file of its own; flags and messages about them are left to exporter.cli.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from contract.console import say
from contract.errors import UsageError
from contract.images import ImageRule
from contract.leakage import LEAKAGE_NAME, of_package
from contract.manifest import digest, to_bytes
from contract.signature import PrivateKey, key_id, sign
from contract.tokens import TokenLayout
from exporter.backend_tuning import Bench, PreparedBackend, prepare_tuned, prepare_untuned
from exporter.checkpoint import create_model, image_rule, own_head
from exporter.few_shot import FewShotSettings
from exporter.frontend_file import Halves, make_frontend_file
from exporter.masked_frontend import masked_frontend
from exporter.models import Facts, family_of
from exporter.package import (
    GOLDEN_NAME,
    ONNX_NAME,
    next_version,
    previous_manifest,
    publish,
    staging,
    write_document,
    write_manifest,
    write_package,
    write_tensors,
)
from exporter.parity import gate_top1
from exporter.plan import ExportPlan, Limits
from exporter.preview import with_preview
from exporter.public_set import PublicSet, divide, draw_synthetic, open_folder
from exporter.records import figures_of, golden_of, manifest_of, write_backend
from exporter.split import check_cut, split_tokens, usual_cut
from exporter.statistics import check_sent
from exporter.tensorrt_check import check_plans
from exporter.tune import TuneSettings
from exporter.tuning_frontends import make_tuning_frontends


@dataclass(frozen=True)
class Surroundings:
    """What an export takes from the machine it runs on."""

    signer: Callable[[], PrivateKey]  # called once all checks are passed; a key that is new is made then
    now: Callable[[], datetime]
    threads: int
    device: str  # torch's, for tuning


@dataclass(frozen=True)
class Gated:
    """What a leakage-gated export adds: strengths of noise at which top-1 is measured as well; the leakage table that
    the package must have and carry, and what the backend's folder says of the choice."""

    strengths: tuple[float, ...] = ()
    table: bytes | None = None
    documents: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


UNGATED = Gated()


@dataclass(frozen=True)
class Report:
    """What was published."""

    output: str
    name: str
    version: int
    package_digest: str
    signer: str
    size_bytes: int
    figures: dict[str, object]


def export(
    plan: ExportPlan, surroundings: Surroundings, limits: Limits, tuning: TuneSettings,
    few_shot: FewShotSettings | None, gated: Gated = UNGATED,
) -> Report:  # fmt: skip
    """Make, check and publish the package and its backend.

    Raises UsageError, DataError, ExportError and GateError, PackageError for a table of another package; then nothing
    is left at the target but what was there.
    """
    output = Path(plan.output)
    previous = previous_manifest(output)
    version = next_version(previous, plan.version, output)
    model = create_model(plan)
    family_name, family = family_of(model)
    facts = family.facts(model)
    k = _cut(plan.split, facts)
    plan = replace(plan, split=k, version=version, name=plan.name or _name(plan.model, k))
    rule = image_rule(model, facts.input_shape)
    rng = np.random.default_rng(plan.seed)
    public = _public_set(plan, rule, limits, rng)
    parts = divide(len(public), limits, plan.limit_tuning, rng)
    frontend, backend, layout = split_tokens(model, k)
    facts = replace(facts, layout=layout)
    check_sent(layout, plan.sent_patches)
    if gated is UNGATED or gated.table is not None:  # a candidate of a sweep is not what devices get
        _warn_of_noise(plan, layout)
    head = own_head(model)
    runs = masked_frontend(frontend) if plan.masked else frontend
    halves = Halves(model, runs, backend, head, facts, family.fold_sites(frontend))
    with staging(output) as staged:
        write_tensors(staged.backend / "backend_original.safetensors", backend.state_dict())
        write_tensors(staged.backend / "frontend.safetensors", frontend.state_dict())
        started_s = time.monotonic()
        extra = make_tuning_frontends(
            halves, plan, public, parts, limits, surroundings.threads, staged.scratch, tuning.subsets, rng
        )
        file = make_frontend_file(halves, plan, public, parts, limits, surroundings.threads, staged.scratch)
        frontend_s = time.monotonic() - started_s
        del model, frontend, runs, halves  # the frontend's weights are in the file now
        bench = Bench(
            plan, file, facts, public, parts, limits, surroundings.threads, staged.scratch, surroundings.device,
            tuning, few_shot, extra, gated.strengths,
        )  # fmt: skip
        prepared = _prepare(bench, backend, head, rng)
        bench = _gated(bench, prepared)
        table = {} if gated.table is None else {LEAKAGE_NAME: gated.table}
        files = write_package(staged.package, {ONNX_NAME: file.data, GOLDEN_NAME: golden_of(bench), **table})
        patches = facts.layout.patches
        plans = check_plans(staged.package / ONNX_NAME, patches, staged.scratch) if plan.tensorrt else []
        own_key = surroundings.signer()
        signer = key_id(own_key.public_key())
        described = manifest_of(bench, prepared, family_name, files, signer, surroundings.now)
        if gated.table is not None:
            of_package(gated.table, described)
        if plan.preview:
            described = with_preview(described, plan, staged, surroundings.threads)
        figures = figures_of(bench, prepared, described.preview, frontend_s, time.monotonic() - started_s)
        figures["tensorrt"] = plans
        manifest = to_bytes(described)
        package_digest = digest(manifest).hex()
        write_manifest(staged, manifest, sign(own_key, manifest))
        write_backend(staged.backend, bench, prepared, figures, package_digest)
        for name, document in gated.documents.items():
            write_document(staged.backend / name, document)
        publish(staged, output)
    return Report(str(output), plan.name, version, package_digest, signer, len(file.data), figures)


def _cut(wanted: int | None, facts: Facts) -> int:
    usual, depth = usual_cut(facts), facts.depth
    k = usual if wanted is None else wanted
    check_cut(k, depth)
    if 2 * k <= depth and k < usual:
        say(
            f"warning: --split {k} leaves {depth - k} of {depth} layers on the server; tokens that early still hold "
            f"much of the picture (usual for this model: {usual})"
        )
    return k


def _warn_of_noise(plan: ExportPlan, layout: TokenLayout) -> None:
    """Say which tokens devices would send as they are."""
    of_prefix = plan.sent_patches == "none" and plan.prefix_noise == 0
    if plan.kappa == 0 or of_prefix:
        flag = "--kappa 0" if plan.kappa == 0 else "--prefix-noise 0"
        rest = "" if plan.alpha == 0 else ", and weight noise alone is no protection"
        say(f"warning: devices send every token without feature noise ({flag}): nothing hides the images{rest}")
    elif layout.prefix and plan.prefix_noise == 0:
        say("warning: devices send the class token without feature noise (--prefix-noise 0)")


def _name(model: str, k: int) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", f"{model}-{k}")


def _public_set(plan: ExportPlan, rule: ImageRule, limits: Limits, rng: np.random.Generator) -> PublicSet:
    if plan.calibration is not None:
        public = open_folder(Path(plan.calibration), rule, not plan.no_hilbert)
        say(f"public set: {len(public)} images, {len(public.folder.classes)} classes")
        if plan.tune != "none" and (public.labels is None or len(public.folder.classes) < 2):
            raise UsageError(
                f"tuning the backend needs labelled images, found no two class folders in {plan.calibration}",
                "sort the images into one folder per class, or use --tune none",
            )
        return public
    if plan.weights is not None or plan.pretrained:
        raise UsageError(
            "a trained model's scales and noise must fit real images, and no folder of public images was given",
            "add --calibration DIR",
        )
    if plan.tune != "none":
        raise UsageError("tuning the backend needs labelled public images", "add --calibration DIR, or use --tune none")
    say(f"warning: no --calibration: measuring on {limits.synthetic_images} synthetic pictures, good for trials only")
    return replace(draw_synthetic(limits.synthetic_images, rule, rng), hilbert=not plan.no_hilbert)


def _prepare(
    bench: Bench, backend: nn.Module, head: tuple[Tensor, Tensor] | None, rng: np.random.Generator
) -> PreparedBackend:
    if bench.plan.tune == "none":
        return prepare_untuned(bench, backend, head, rng)
    return prepare_tuned(bench, copy.deepcopy(backend), head, rng)


def _gated(bench: Bench, prepared: PreparedBackend) -> Bench:
    """The same bench, marked as forced where too many answers were lost. Raises GateError unless that is accepted."""
    top1 = prepared.accuracies
    if bench.file.figures is None:
        return bench
    forced = gate_top1(top1.float32, top1.int8, top1.tuned_noisy, len(bench.parts.evaluation), bench.limits,
                       bench.plan.force)  # fmt: skip
    return replace(bench, file=replace(bench.file, forced=bench.file.forced or forced))
