"""One export of client parts that devices train, from plan to published package: the order of the steps.

The graphs are exporter.training_graph's, the gate they pass exporter.training_check's, the folders exporter.package's.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from contract.console import progress, say
from contract.errors import ExportError, UsageError, suggest
from contract.images import ImageRule, normalise
from contract.manifest import digest, to_bytes
from contract.signature import key_id, sign
from contract.training import (
    CHOOSING,
    FORMAT,
    MASKED,
    PARAMETERS_NAME,
    SPLITS_MOST,
    TRAINING_NAME,
    PrototypeRule,
    TrainingCut,
    TrainingPlan,
)
from contract.training import to_bytes as training_to_bytes
from exporter.build import Report, Surroundings
from exporter.checkpoint import create_model, image_rule
from exporter.macs import count_macs
from exporter.models import Facts, family_of
from exporter.models._masked import masked_whole
from exporter.models._peft import add_peft, is_trained
from exporter.package import (
    next_version,
    previous_manifest,
    publish,
    staging,
    tensor_bytes,
    write_document,
    write_file,
    write_manifest,
    write_package,
    write_tensors,
)
from exporter.plan import BACKBONE, ExportPlan, Limits, ModuleChoices, TrainingChoices, holds_of
from exporter.prototypes import attach, width_of, with_scale
from exporter.public_set import draw_synthetic, open_folder
from exporter.records import export_document, training_manifest_of
from exporter.skip_modules import SkipNetwork
from exporter.split import usual_cut
from exporter.training_check import TrainingFigures, TrainingRule, check_training_graphs
from exporter.training_graph import Loss, TrainingGraphs, make_training_graphs

MODEL_NAME = "model.safetensors"
LOCAL_BLOCKS, KEPT_SHARE = 2, 0.25  # of EFTViT (algorithms.md 4.1), where the command does not say
_CHECKED_PIXELS = 32 * 64 * 64  # the gate's batch: 32 images of 64 pixels a side, fewer where they are larger
_CHECKED_IMAGES = (8, 32)


@dataclass(frozen=True)
class Part:
    """The first `index` of `depth` layers as a module whose tensors have the whole model's names."""

    module: nn.Module
    index: int
    depth: int
    layer: str
    loss: Loss
    trained: tuple[str, ...] | None = None  # None: all that --freeze leaves

    @property
    def file_names(self) -> tuple[str, str, str]:
        """Of the forward, backward and evaluation graph."""
        return (f"cut{self.index}.forward.onnx", f"cut{self.index}.backward.onnx", f"cut{self.index}.evaluate.onnx")


@dataclass(frozen=True)
class Kept:
    """How many of an image's patches go through a part in training."""

    count: int
    patches: int


@dataclass(frozen=True)
class FinishedPart:
    """A part's line in training.json, its files, and what the gate measured."""

    cut: TrainingCut
    files: dict[str, bytes]
    checked: TrainingFigures


def export_training(plan: ExportPlan, surroundings: Surroundings) -> Report:
    """Make, check and publish a package of client parts and its backend; `plan.training` says which.

    Raises UsageError, ExportError and GateError; then nothing is left at the target but what was there.
    """
    started_s = time.monotonic()
    chosen, output = _choices(plan), Path(plan.output)
    version = next_version(previous_manifest(output), plan.version, output)
    model = create_model(plan)
    family_name, family = family_of(model)
    facts = family.facts(model)
    rule = image_rule(model, facts.input_shape)
    head = head_name(model)
    if holds_of(chosen.strategy) == "modules":
        assert chosen.modules is not None
        chosen = replace(chosen, freeze=(BACKBONE,))
        parts = [Part(_modules(model, chosen.modules, plan.seed), facts.depth, facts.depth, "skips", "own-head")]
    elif holds_of(chosen.strategy) == "body":
        model.reset_classifier(0)
        parts = [Part(model, facts.depth, facts.depth, facts.layers[-1], "own-head")]
    elif chosen.strategy in MASKED:
        k = check_cuts(chosen.cuts or (LOCAL_BLOCKS,), facts.depth)[0]
        chosen = replace(chosen, cuts=(k,), keep_patches=chosen.keep_patches or KEPT_SHARE)
        parts = _masked(_whole(model, facts.depth, head, chosen.classes, plan.seed), k, facts.layers[k - 1])
    elif chosen.peft != "all":
        parts = [_tuned(_whole(model, facts.depth, head, chosen.classes, plan.seed), chosen.peft, plan.seed)]
    elif chosen.whole_model:
        part = _whole(model, facts.depth, head, chosen.classes, plan.seed)
        parts = [part if chosen.keep_patches is None else replace(part, module=masked_whole(model))]
    else:
        cuts = check_cuts(chosen.cuts or usual_cuts(chosen.strategy, facts), facts.depth)
        parts = [Part(family.cut(model, k)[0], k, facts.depth, facts.layers[k - 1], "none") for k in cuts]
        chosen = replace(chosen, cuts=cuts)
    if chosen.augment.crop_padding >= min(facts.input_shape[1:]):
        raise UsageError(
            f"--augment crop={chosen.augment.crop_padding} can push a picture of {facts.input_shape[1]}x"
            f"{facts.input_shape[2]} out of view",
            "choose a few pixels, such as crop=4",
        )
    plan = replace(plan, training=chosen, version=version, name=plan.name or _name(plan.model, chosen))
    _check_freeze(chosen.freeze, parts)
    macs = [count_macs(part.module, facts.input_shape) for part in parts]
    state = (parts[0].module if holds_of(chosen.strategy) == "modules" else model).state_dict()
    if chosen.prototypes is not None:
        fitted = fit_prototypes(chosen.prototypes, parts, plan, rule)
        chosen = replace(chosen, prototypes=fitted)
        plan = replace(plan, training=chosen)
        state = {**state, **parts[0].module.state_dict()}
    finished = _finish(parts, macs, facts.input_shape, chosen, _kept(facts, chosen.keep_patches))
    training = training_to_bytes(training_plan(chosen, tuple(each.cut for each in finished)))
    tensors = {name: state[name].float() for name in sorted(_names(finished))}
    parameters = tensor_bytes(tensors)
    contents = {TRAINING_NAME: training, PARAMETERS_NAME: parameters}
    for each in finished:
        contents.update(each.files)
    with staging(output) as staged:
        files = write_package(staged.package, contents)
        own_key = surroundings.signer()
        signer = key_id(own_key.public_key())
        manifest = to_bytes(training_manifest_of(plan, family_name, rule, files, signer, surroundings.now))
        package_digest = digest(manifest).hex()
        write_manifest(staged, manifest, sign(own_key, manifest))
        write_file(staged.backend / TRAINING_NAME, training)
        kept = state if finished[0].cut.loss == "own-head" else without_head(state, head)
        write_tensors(staged.backend / MODEL_NAME, kept)
        sizes = {name: 4 * value.numel() for name, value in tensors.items()}
        figures = figures_of(finished, chosen, sizes, time.monotonic() - started_s)
        write_document(staged.backend / "export.json", export_document(plan, figures, package_digest))
        publish(staged, output)
    size_bytes = sum(map(len, contents.values()))
    return Report(str(output), plan.name, version, package_digest, signer, size_bytes, figures)


def _choices(plan: ExportPlan) -> TrainingChoices:
    """Raises UsageError for what a frontend would need and a part has no use for."""
    assert plan.training is not None  # exporter.cli and tests choose this function by it
    if plan.opset != 20:
        raise UsageError(f"training graphs need opset 20, found {plan.opset}", "leave out --opset")
    if plan.calibration is not None and not (plan.training.prototypes and plan.training.prototypes.normalise):
        say("warning: --calibration is not used: parts are trained in float32, and nothing is measured on images")
    return plan.training


def usual_cuts(strategy: str, facts: Facts) -> tuple[int, ...]:
    """Where nobody says which: the family's own, or the first ten where devices choose."""
    if strategy not in CHOOSING:
        return (usual_cut(facts),)
    return tuple(range(1, min(SPLITS_MOST, facts.depth - 1) + 1))


def check_cuts(cuts: Sequence[int], depth: int) -> tuple[int, ...]:
    """Raises UsageError for a cut that leaves nothing to the server."""
    deepest = max(cuts)
    if deepest >= depth:
        raise UsageError(
            f"cut {deepest} leaves nothing to the server: this model has {depth} layers that can be cut behind",
            f"choose cuts from 1 to {depth - 1}; the whole model needs --for fed_avg --release-whole-model",
        )
    return tuple(cuts)


def fit_prototypes(rule: PrototypeRule, parts: Sequence[Part], plan: ExportPlan, image: ImageRule) -> PrototypeRule:
    """Give the one part its projection head, drawn by the plan's seed; the rule with the scale of g.

    The scale is taken on the first images of --calibration, on drawn pictures where there are none.
    Raises UsageError for several parts, which could not share a head.
    """
    if len(parts) > 1:
        raise UsageError(
            f"--cuts names {len(parts)} cuts, and prototypes of several are in no common space", "name one cut"
        )
    module, limits = parts[0].module, Limits()
    if plan.calibration is not None:
        public = open_folder(Path(plan.calibration), image)
    else:
        public = draw_synthetic(limits.calibration_images, image, np.random.default_rng(plan.seed))
        if rule.normalise:
            say("warning: no --calibration: the scale of the values at the cut is taken on drawn pictures")
    chosen = np.random.default_rng(plan.seed).permutation(len(public))[: limits.calibration_images]
    images = torch.from_numpy(normalise(public.pixels(chosen.tolist()), image))
    fitted = with_scale(rule, module, images) if rule.normalise else rule
    with torch.no_grad():
        shape = tuple(module.eval()(images[:1]).shape[1:])
    with torch.random.fork_rng():
        torch.manual_seed(plan.seed)
        attach(module, fitted, width_of(shape))
    return fitted


def head_name(model: nn.Module) -> str:
    """Module path of the model's one classifier, such as fc or head. Raises ExportError when it is not one layer."""
    name = getattr(model, "pretrained_cfg", {}).get("classifier")
    if not isinstance(name, str):
        raise ExportError(
            f"{type(model).__name__} has no single classifier to replace, found {name}", "choose another model"
        )
    return name


def without_head(state: Mapping[str, Tensor], head: str) -> dict[str, Tensor]:
    """The model's state without its classifier: a site's own head takes its place."""
    return {name: value for name, value in state.items() if not name.startswith(f"{head}.")}


def _whole(model: nn.Module, depth: int, head: str, classes: int | None, seed: int) -> Part:
    """The model itself with a fresh linear head for `classes`, under its own classifier's name."""
    torch.manual_seed(seed)
    model.reset_classifier(classes)
    if not isinstance(model.get_submodule(head), nn.Linear):
        raise ExportError(
            f"the classifier {head} of {type(model).__name__} is no linear layer, found {model.get_submodule(head)}",
            "choose another model",
        )
    return Part(model, depth, depth, head, "cross-entropy")


def _modules(model: nn.Module, choices: ModuleChoices, seed: int) -> SkipNetwork:
    torch.manual_seed(seed)
    network = SkipNetwork(model, choices).eval()
    own, whole = sum(map(sum, network.skip_sizes)), sum(network.block_sizes)
    if own > whole / 2:
        say(
            f"warning: the modules have {own / 1e6:.1f} M parameters, the blocks themselves {whole / 1e6:.1f} M: "
            "--skips 1 makes them smaller, fed_avg_own_heads does without them"
        )
    return network


def _masked(whole: Part, k: int, layer: str) -> list[Part]:
    """EFTViT's two: the local module, whose features leave the device, and the whole model, in which the layers behind
    it are frozen and the gradient crosses them."""
    model, (local, _) = whole.module, family_of(whole.module)[1].cut(whole.module, k)
    own = {name for name, _ in local.named_parameters()}
    trained = tuple(n for n, _ in model.named_parameters() if n in own or n.startswith(f"{whole.layer}."))
    return [Part(local, k, whole.depth, layer, "none"), replace(whole, module=masked_whole(model), trained=trained)]


def _tuned(whole: Part, peft: str, seed: int) -> Part:
    """The whole model with the few parameters that are trained; the others stay as they are."""
    torch.manual_seed(seed)
    add_peft(whole.module, peft)
    names = (name for name, _ in whole.module.named_parameters())
    return replace(whole, trained=tuple(name for name in names if is_trained(name, peft, whole.layer)))


def _name(model: str, chosen: TrainingChoices) -> str:
    """Model, strategy and cuts: packages that differ in these do not get in each other's way on a device."""
    cuts = (
        "whole"
        if chosen.whole_model and not chosen.cuts
        else "-".join(map(str, dict.fromkeys((chosen.cuts[0], chosen.cuts[-1]))))
    )
    tuned = "" if chosen.peft == "all" else f"-{chosen.peft}"
    return re.sub(r"[^A-Za-z0-9._-]", "-", f"{model}-{chosen.strategy}-{cuts}{tuned}")


def _check_freeze(freeze: Sequence[str], parts: Sequence[Part]) -> None:
    """Raises UsageError for a beginning that no parameter has, and for a part that would be frozen whole."""
    known = {name for part in parts for name, _ in part.module.named_parameters()}
    for beginning in freeze:
        if not beginning:
            raise UsageError("--freeze has an empty name, which every name begins with", "leave it out")
        if not any(name.startswith(beginning) for name in known):
            modules = {name.rpartition(".")[0] or name for name in known}
            raise UsageError(
                f"--freeze {beginning!r} is the beginning of no parameter on the device{suggest(beginning, modules)}",
                f"write for example --freeze {min(modules)}.",
            )
    for part in parts:
        if not _trained(part, freeze):
            raise UsageError(
                f"--freeze {','.join(freeze)} leaves nothing to train at cut {part.index}",
                "freeze less, or leave out this cut",
            )


def trained_names(module: nn.Module, freeze: Sequence[str]) -> tuple[str, ...]:
    """Names of the parameters that are trained."""
    return tuple(name for name, _ in module.named_parameters() if not name.startswith(tuple(freeze)))


def _trained(part: Part, freeze: Sequence[str]) -> tuple[str, ...]:
    left = trained_names(part.module, freeze)
    return left if part.trained is None else tuple(name for name in left if name in part.trained)


def set_modes(module: nn.Module, trained: Sequence[str]) -> None:
    """Train mode, but for norms of the batch that are frozen whole: their running statistics stay as they are."""
    module.train()
    for path, each in module.named_modules():
        own = {f"{path}.{name}" for name, _ in each.named_parameters(recurse=False)}
        if isinstance(each, nn.modules.batchnorm._BatchNorm) and own.isdisjoint(trained):
            each.eval()


def _kept(facts: Facts, share: float | None) -> Kept | None:
    """Raises UsageError for a model that has no patches."""
    if share is None:
        return None
    if facts.layout is None:
        raise UsageError("--keep-patches needs a model with patches, and this one has none", "leave it out")
    return Kept(max(1, round(share * facts.layout.patches)), facts.layout.patches)


def _finish(
    parts: Sequence[Part], macs: Sequence[int], input_shape: tuple[int, int, int], chosen: TrainingChoices,
    kept: Kept | None,
) -> list[FinishedPart]:  # fmt: skip
    finished = []
    with progress(total=len(parts), description="Tracing and checking parts", unit="parts") as bar:
        for part, each in zip(parts, macs, strict=True):
            finished.append(_finish_part(part, each, input_shape, chosen, kept))
            bar.update(1)
    return finished


def _finish_part(
    part: Part, macs: int, input_shape: tuple[int, int, int], chosen: TrainingChoices, kept: Kept | None
) -> FinishedPart:
    trained = _trained(part, chosen.freeze)
    classes = None if part.loss == "none" else chosen.classes
    set_modes(part.module, trained)
    graphs = make_training_graphs(
        part.module, input_shape, trainable=trained, loss=part.loss, recompute=chosen.recompute,
        kept_tokens=kept is not None, class_count=classes, prototypes=chosen.prototypes,
    )  # fmt: skip
    fewest, most = _CHECKED_IMAGES
    gate = TrainingRule(batch=max(fewest, min(most, _CHECKED_PIXELS // math.prod(input_shape[1:]))))
    checked = check_training_graphs(
        part.module, graphs, input_shape, rule=gate, class_count=classes,
        kept=kept.count if kept else None, patches=kept.patches if kept else None,
    )  # fmt: skip
    cut = _cut(part, graphs, macs, kept)
    files = dict(zip(part.file_names, (graphs.forward, graphs.backward, graphs.evaluate), strict=True))
    return FinishedPart(cut, files, checked)


def _cut(part: Part, graphs: TrainingGraphs, macs: int, kept: Kept | None) -> TrainingCut:
    forward, backward, evaluate = part.file_names
    seen = graphs.evaluated_shape
    tokens = kept and part.loss == "none"
    shape = (seen[0] - kept.patches + kept.count, *seen[1:]) if kept and tokens else graphs.output_shape
    still = (name for name in graphs.buffers if name not in graphs.moved)  # of norms that are frozen: they never travel
    return TrainingCut(
        index=part.index, depth=part.depth, layer=part.layer, forward=forward, backward=backward, evaluate=evaluate,
        output_shape=shape, evaluated_shape=seen, kept=kept.count if kept else None,
        patches=kept.patches if kept else None,
        trainable=graphs.trainable, frozen=(*graphs.frozen, *still), buffers=graphs.moved,
        saved=graphs.saved, macs=macs, loss=part.loss,
    )  # fmt: skip


def training_plan(chosen: TrainingChoices, cuts: tuple[TrainingCut, ...]) -> TrainingPlan:
    """What training.json says."""
    return TrainingPlan(
        format=FORMAT, strategy=chosen.strategy, whole_model=chosen.whole_model, class_count=chosen.classes, cuts=cuts,
        optimiser=chosen.optimiser, augment=chosen.augment, gradient=chosen.gradient, activations=chosen.activations,
        prototypes=chosen.prototypes,
    )  # fmt: skip


def _names(finished: Sequence[FinishedPart]) -> set[str]:
    return {name for each in finished for name in each.cut.tensors}


def figures_of(
    finished: Sequence[FinishedPart], chosen: TrainingChoices, sizes: Mapping[str, int], total_s: float
) -> dict[str, object]:
    """Every figure of the export, for export.json and the command's own report; `sizes` in bytes by tensor."""
    return {
        "strategy": chosen.strategy,
        "whole_model": chosen.whole_model,
        "cuts": [_figures_of_part(each, sizes, chosen) for each in finished],
        "parameter_bytes": sum(sizes.values()),
        "total_s": round(total_s, 1),
    }


def _figures_of_part(part: FinishedPart, sizes: Mapping[str, int], chosen: TrainingChoices) -> dict[str, object]:
    cut = part.cut
    return {
        "index": cut.index,
        "depth": cut.depth,
        "layer": cut.layer,
        "output_shape": list(cut.output_shape),
        "cut_bytes": cut.output_size * {"float32": 4, "float16": 2, "int8": 1}[chosen.activations],
        "parameter_bytes": sum(sizes[name] for name in cut.tensors),
        "macs": cut.macs,
        "graph_bytes": sum(map(len, part.files.values())),
        "checked": asdict(part.checked),
    }
