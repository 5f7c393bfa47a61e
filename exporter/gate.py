"""A leakage-gated export: make each candidate, let leakage-profile attack it, and publish the one that was chosen.

What is tried is exporter.gate_plan's, what is chosen exporter.gate_choice's, how it is shown exporter.gate_report's. A
candidate is a whole signed package in scratch space, and the attacks see what devices would send of it; the one that
wins is exported once more, for its own strength, and must come out as the package that was measured.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from contract.canonical import CanonicalError
from contract.child import run_child
from contract.console import say
from contract.errors import ExportError, GateError, UsageError
from contract.image_folder import scan
from contract.leakage import LEAKAGE_NAME, strongest
from contract.leakage import from_bytes as table_from_bytes
from contract.manifest import MANIFEST_NAME, Manifest
from contract.manifest import from_bytes as manifest_from_bytes
from contract.tokens import TokenLayout
from exporter.build import Gated, Report, Surroundings, export
from exporter.few_shot import FewShotSettings
from exporter.gate_choice import Energy, Point, choose, judge
from exporter.gate_energy import energy_of, how_to_know_joules, load_profile, read_energy
from exporter.gate_plan import GatePlan, candidates
from exporter.gate_report import GATE_NAME, Outcome, Skipped, to_document
from exporter.gate_work import Done, workplace
from exporter.list_splits import list_splits
from exporter.package import next_version, previous_manifest, replace_document
from exporter.parity import gate_top1
from exporter.plan import ExportPlan, Limits
from exporter.runtime import open_session, run_tokens
from exporter.tune import TuneSettings

_TIMED_RUNS = 20
_TIMED_S = 2.0  # at most, for each candidate


@dataclass(frozen=True)
class Bench:
    """What every candidate is exported with."""

    gate: GatePlan
    surroundings: Surroundings
    limits: Limits
    tuning: TuneSettings


def sweep(plan: ExportPlan, bench: Bench, few_shot: FewShotSettings) -> tuple[Outcome, Report | None]:
    """Measure every candidate, and publish the chosen one with its table; no report, and nothing written, where none is
    within the limits.

    Raises: UsageError, DataError, ExportError; ConfigError for an energy table or profile that cannot be used.
    """
    if plan.calibration is None:
        raise UsageError(
            "what leaks, and what noise costs in accuracy, is measured on public images, and none were given",
            "add --calibration DIR, one folder per class",
        )
    output = Path(plan.output)
    next_version(previous_manifest(output), plan.version, output)  # a wrong target is found before the work
    _check_attacks(plan, bench.gate)
    splits = list_splits(plan.model, dict(plan.model_args)).splits
    layouts = [TokenLayout(each.prefix, each.grid, each.output_shape[1]) for each in splits]
    planned = candidates(plan, bench.gate, layouts)
    energies = _energies(plan, bench.gate, planned, layouts)
    public = scan(Path(plan.calibration), None).digest()
    started_s, made = time.monotonic(), 0
    with workplace(output, plan, bench.gate, energies, public) as work:
        found: list[Done] = []
        for number, candidate in enumerate(planned):
            done = work.read(number)
            if done is None:
                _say_begin(candidate, number, len(planned), time.monotonic() - started_s, made)
                done = _measure(candidate, bench, work.folder(number), energies[number])
                made += 1
                work.keep(number, done)
            found.append(done)
        outcome = _outcome(bench, planned, found, round(time.monotonic() - started_s, 1))
        report = None
        if outcome.chosen is not None:
            table = next(each.table for each in found if outcome.chosen in each.points)
            report = _export_chosen(plan, bench, few_shot, outcome, table)
    return outcome, report


def _outcome(bench: Bench, planned: Sequence[ExportPlan], found: Sequence[Done], total_s: float) -> Outcome:
    gate, points = bench.gate, [point for each in found for point in each.points]
    judged = judge(points, gate.limits, gate.max_energy_j)
    skipped = [Skipped(_name(plan), each.refused) for plan, each in zip(planned, found, strict=True) if each.refused]
    baselines = next((each.baselines for each in found if each.baselines is not None), None)
    return Outcome(
        gate.limits, gate.max_energy_j, gate.attacks, gate.steps, judged, choose(judged), tuple(skipped), baselines,
        bench.surroundings.threads, total_s,
    )  # fmt: skip


def _export_chosen(plan: ExportPlan, bench: Bench, few_shot: FewShotSettings, outcome: Outcome, table: str) -> Report:
    """The package once more, for its own strength, with its table; the outcome goes into the backend and beside."""
    chosen, output = outcome.chosen, Path(plan.output)
    say(f"chosen: {chosen.name}; exporting it")
    document = to_document(outcome)
    gated = Gated((chosen.kappa,), table.encode(), {GATE_NAME: document})
    wanted = replace(
        plan, split=chosen.split, int8=chosen.precision == "int8", sent_patches=chosen.sent, kappa=chosen.kappa
    )
    report = export(wanted, bench.surroundings, bench.limits, bench.tuning, few_shot, gated)
    replace_document(output.with_name(f"{output.name}.{GATE_NAME}"), document)
    return report


def _energies(
    plan: ExportPlan, gate: GatePlan, planned: Sequence[ExportPlan], layouts: Sequence[TokenLayout]
) -> list[Energy]:
    """Of each candidate. Raises: UsageError when a limit of joules is asked for and all are unknown."""
    table = None if gate.energy_table is None else read_energy(Path(gate.energy_table), plan.model)
    profile = None if gate.profile is None else load_profile(gate.profile)
    energies = [energy_of(each.split, _precision(each), layouts[each.split - 1], table, profile) for each in planned]
    if gate.max_energy_j is not None and all(each.joules is None for each in energies):
        raise UsageError(
            f"--max-energy {gate.max_energy_j:g} was given, and the energy of every candidate is unknown: "
            f"{energies[0].source}",
            how_to_know_joules(),
        )
    return energies


def _measure(plan: ExportPlan, bench: Bench, folder: Path, energy: Energy) -> Done:
    """Export one candidate and have it attacked. Raises: as `sweep`."""
    front, gate = folder / "front", bench.gate
    alone = replace(plan, output=str(front), version=None)
    try:
        report = export(alone, bench.surroundings, bench.limits, bench.tuning, None, Gated(gate.strengths))
    except GateError as error:
        say(f"{_name(plan)}: left out, {error.cause}")
        return Done((), "", None, error.cause)
    top1 = {each["kappa"]: each["top1"] for each in report.figures["top1_at"]}
    if any(top1.get(kappa) is None for kappa in gate.strengths):
        raise UsageError(
            "accuracy is unknown: without tuning only the model's own head can answer, and it does not fit the public "
            "set's classes, or too few images are held out",
            "leave out --tune none, and give more images with --calibration",
        )
    ms = _time_ms(front / "front.onnx", (3, *_image_size(front)), bench.surroundings.threads)
    table = _attack(front, plan, gate, folder / LEAKAGE_NAME)
    try:
        found = table_from_bytes(table)
    except CanonicalError as error:
        raise ExportError(f"leakage-profile wrote no table: {error}", "report this with the flags given") from error
    manifest = _manifest(front)
    rows = {row.strength: row for row in found.rows if row.protected}
    bare = next((strongest(row) for row in found.rows if not row.protected), None)
    points = [
        Point(
            plan.split, _precision(plan), plan.sent_patches, kappa, top1[kappa], strongest(rows[kappa]), bare,
            energy, manifest.sent_bytes(manifest.cuts[0]), ms, _refusal(plan, report, top1[kappa], bench.limits),
        )
        for kappa in gate.strengths
    ]  # fmt: skip
    return Done(tuple(points), table.decode(), found.baselines)


def _refusal(plan: ExportPlan, report: Report, top1: float, limits: Limits) -> str | None:
    """Why the export itself would refuse this strength; None where it would not."""
    if plan.force or not plan.int8:
        return None
    try:
        gate_top1(report.figures["top1"]["float32"], None, top1, report.figures["evaluation_images"], limits, False)
    except GateError as error:
        return error.cause
    return None


def _attack(front: Path, plan: ExportPlan, gate: GatePlan, output: Path) -> bytes:
    """The table of one candidate. Raises: ExportError."""
    words = ["--package", str(front), "--public", str(plan.calibration), "-o", str(output)]
    code = _leakage_profile(plan, gate, words)
    if code:
        raise ExportError(
            f"leakage-profile ended with exit code {code}, see above", "do as it says there; nothing was written"
        )
    return output.read_bytes()


def _check_attacks(plan: ExportPlan, gate: GatePlan) -> None:
    """Find out before the first export what leakage-profile thinks of its flags. Raises: UsageError."""
    code = _leakage_profile(plan, gate, ["--check"])
    if code:
        raise UsageError(f"leakage-profile ends with exit code {code}, see above", "do as it says there")


def _leakage_profile(plan: ExportPlan, gate: GatePlan, more: Sequence[str]) -> int:
    """Run it as a command: of the server's rooms the exporter knows only their commands. The exit code."""
    words = ["--noise", ",".join(map(repr, gate.strengths)), "--seed", str(plan.seed)]
    words += [word for name in gate.attacks for word in ("--attack", name)]
    for flag, value in (("--steps", gate.steps), ("--images", gate.images)):
        words += [] if value is None else [flag, str(value)]
    return run_child("server_runtime.leakage.cli", [*words, *more], stdout=subprocess.DEVNULL)


def _time_ms(onnx: Path, shape: tuple[int, int, int], threads: int) -> float:
    """Median milliseconds of one image on this machine."""
    session, images = open_session(str(onnx), threads), np.zeros((1, *shape), np.float32)
    run_tokens(session, images)
    times_s: list[float] = []
    while len(times_s) < _TIMED_RUNS and sum(times_s) < _TIMED_S:
        started_s = time.perf_counter()
        run_tokens(session, images)
        times_s.append(time.perf_counter() - started_s)
    return round(1e3 * statistics.median(times_s), 3)


def _manifest(front: Path) -> Manifest:
    return manifest_from_bytes((front / MANIFEST_NAME).read_bytes())


def _image_size(front: Path) -> tuple[int, int]:
    image = _manifest(front).image
    return image.height, image.width


def _precision(plan: ExportPlan) -> str:
    return "int8" if plan.int8 else "float32"


def _name(plan: ExportPlan) -> str:
    return f"split {plan.split}, {_precision(plan)}, {plan.sent_patches} patches"


def _say_begin(plan: ExportPlan, number: int, total: int, elapsed_s: float, made: int) -> None:
    left = f", about {elapsed_s / made * (total - number) / 60:.0f} min left" if made else ""
    say(f"candidate {number + 1} of {total}: {_name(plan)}{left}")
