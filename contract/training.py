"""What a device must know to train a client part: `training.json`, a file of the package that its manifest lists.

A *client part* is the first layers of a model, up to a cut; it comes as ONNX graphs that take every parameter as an
input (forward, backward, evaluate), one set per cut, and one file with the parameters of all cuts. Running the graphs
is left to `edge_runtime.trainer`, writing them to `exporter.training_graph`.

    forward   x (B, 3, h, w) [, targets (B, C)] and tensors -> z (B, *output_shape) [, loss ()], new:<buffer>, saved:<i>
    backward  what it needs of these and grad_z (none where the loss is in the graph) -> grad:<trainable>
    evaluate  x and tensors -> z, on the running statistics
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from contract.canonical import CanonicalError, decode_fields, encode, from_json, to_json
from contract.errors import ManifestError
from contract.manifest import LIMITS, Manifest

FORMAT: Literal["cutlayer-training/1"] = "cutlayer-training/1"
TRAINING_NAME = "training.json"
PARAMETERS_NAME = "parameters.safetensors"

Precision = Literal["float32", "float16", "int8"]
Holds = Literal["frontend", "parts", "whole", "body", "modules"]
Loss = Literal["none", "cross-entropy", "own-head"]

# What a package must hold for each strategy: an INT8 frontend; trainable client parts, one for each cut; or the whole
# model, which the owner then releases to devices: with its head, without one (each device has its own), or frozen with
# light modules around it that are trained instead.
HOLDS: Mapping[str, Holds] = {
    "split_adaptation": "frontend",
    "linear_probe": "frontend",
    "sequential_split": "parts",
    "parallel_split": "parts",
    "split_fed": "parts",
    "p3sl": "parts",
    "asl": "parts",
    "ares": "parts",
    "prototypes": "parts",
    "centralised": "parts",
    "fed_avg": "whole",
    "fed_bfpt": "whole",
    "eft_vit": "whole",
    "fine_tuning": "body",
    "fed_avg_own_heads": "body",
    "selective_masking": "body",
    "fed_mtl": "body",
    "eeft": "modules",
}
RELEASED: tuple[Holds, ...] = ("whole", "body", "modules")
OWN_HEADS: tuple[Holds, ...] = ("body", "modules")  # devices need not have the same classes
CHOOSING = ("p3sl", "asl", "ares")  # whose devices choose their splits: their packages hold many
SPLITS_MOST = 10  # s_max of P3SL, where nobody says which
MASKED = ("eft_vit",)  # whose packages also hold the first layers as a part, and leave out patches in training
_OPTIONAL = ("prototypes",)
_CURE = "get the package again from its publisher; if it fails again, export it anew with this version of Cutlayer"


@dataclass(frozen=True)
class TrainingCut:
    """One client part: the first `index` of the model's `depth` layers, the last of them named `layer`.

    `trainable`, `frozen` and `buffers` are names in the parameter file; `saved` counts the activations that forward
    hands to backward; `macs` of one image's forward pass.

    `kept` of an image's `patches` go through the part in training, then forward takes `keep` (B, kept) and the output
    has the shape `output_shape`; evaluation sees them all, and gives `evaluated_shape` (where the loss is in the graph,
    both are the class count). None and None: no masking.

    `loss` "own-head": z (B, f) are features for the device's own head, which gives grad_z; a loss that forward returns
    as well is added to the head's, and its gradient is in the graph. Only `trainable` and `buffers` travel.
    """

    index: int
    depth: int
    layer: str
    forward: str
    backward: str
    evaluate: str
    output_shape: tuple[int, ...]
    evaluated_shape: tuple[int, ...]
    kept: int | None
    patches: int | None
    trainable: tuple[str, ...]
    frozen: tuple[str, ...]
    buffers: tuple[str, ...]
    saved: int
    macs: int
    loss: Loss

    @property
    def tensors(self) -> tuple[str, ...]:
        """All names, the trainable ones first."""
        return (*self.trainable, *self.frozen, *self.buffers)

    @property
    def output_size(self) -> int:
        """Values of one image at the cut, in training."""
        return math.prod(self.output_shape)

    @property
    def evaluated_size(self) -> int:
        """The same in evaluation."""
        return math.prod(self.evaluated_shape)


@dataclass(frozen=True)
class OptimiserRule:
    """How a step moves the parameters, on the device and on the server alike; the learning rate comes with each step.

    sgd uses momentum and weight_decay (added to the gradient), adamw the betas, epsilon and weight_decay (decoupled).
    """

    kind: Literal["sgd", "adamw"] = "sgd"
    momentum: float = 0.9
    weight_decay: float = 5e-4
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-8


@dataclass(frozen=True)
class AugmentRule:
    """How a training picture is varied: cropped after padding by so many pixels, mirrored, and its brightness scaled
    by a factor from 1 - brightness to 1 + brightness."""

    crop_padding: int = 0
    flip: bool = False
    brightness: float = 0.0


PROJECTION = ("projection_weight", "projection_bias")  # names of the projection head among a part's tensors


@dataclass(frozen=True)
class PrototypeRule:
    """What a part with a projection head is trained with beside the gradient at the cut (algorithms.md section 5).

    `normalise`: the part ends in g(h) = scale * h / |h|. The head maps what leaves the part, averaged over places, to
    unit vectors of `dimension` values; `distance` is between these and class prototypes. A device tells how many of its
    images a prototype is of, rounded up to a multiple of `count_step`.

    Forward takes anchors (B, dimension), each image's class prototype, and gives embedding (B, dimension) and distance
    (B,); backward takes pull (B,), the weight of each distance in the loss.
    """

    dimension: int = 128
    distance: Literal["cosine", "l2"] = "cosine"
    normalise: bool = True
    scale: float = 1.0
    count_step: int = 1


@dataclass(frozen=True)
class TrainingPlan:
    """Everything signed about training on devices.

    `whole_model`: the package holds all layers, which the owner has agreed to release. `gradient` and `activations`
    say how the tensors at the cut travel; for the strategies in `MASKED`, `gradient` says it of what the server has
    changed in the layers behind the cut.
    """

    format: Literal["cutlayer-training/1"]
    strategy: str
    whole_model: bool
    class_count: int | None
    cuts: tuple[TrainingCut, ...]
    optimiser: OptimiserRule
    augment: AugmentRule
    gradient: Precision
    activations: Precision
    prototypes: PrototypeRule | None = None  # left out of the file where there is none

    def cut(self, index: int) -> TrainingCut | None:
        """The client part of that many layers, None where the package has no such part."""
        return next((cut for cut in self.cuts if cut.index == index), None)


def to_bytes(plan: TrainingPlan) -> bytes:
    """Canonical bytes of training.json.

    Raises: ManifestError if the plan contradicts itself.
    """
    _check(plan)
    try:
        return to_json(encode(plan, () if plan.prototypes else _OPTIONAL))
    except CanonicalError as error:
        raise ManifestError(f"training.json: {error}", "correct the plan before it is published") from error


def from_bytes(data: bytes, manifest: Manifest) -> TrainingPlan:
    """The plan in bytes whose digest the verified manifest lists, held against that manifest.

    Raises: ManifestError if the bytes break a rule, or name a file that the package does not have.
    """
    try:
        found = from_json(data, LIMITS.size_bytes)
        omit = _OPTIONAL if isinstance(found, dict) and not found.keys() & set(_OPTIONAL) else ()
        plan = TrainingPlan(**decode_fields(TrainingPlan, found, omit=omit))
    except CanonicalError as error:
        raise ManifestError(f"training.json: {error}", _CURE) from error
    if to_bytes(plan) != data:
        raise _broken("text", "canonical JSON (sorted keys, no spaces)", "the same values in another form")
    listed = {file.name for file in manifest.files}
    for cut in plan.cuts:
        for name in (cut.forward, cut.backward, cut.evaluate, PARAMETERS_NAME):
            if name not in listed:
                raise _broken(f"cut {cut.index}", f"the listed file {name}", "no such file")
    return plan


def _check(plan: TrainingPlan) -> None:
    _require(len(plan.cuts) > 0, "cuts", "one or more", "none")
    _require(plan.class_count is None or plan.class_count >= 1, "class_count", "null, or 1 or more", plan.class_count)
    _require(len({cut.index for cut in plan.cuts}) == len(plan.cuts), "cuts", "each index once", "one twice")
    for cut in plan.cuts:
        where = f"cut {cut.index}"
        _require(1 <= cut.index <= cut.depth, where, f"1 to depth ({cut.depth})", cut.index)
        _require(len(set(cut.tensors)) == len(cut.tensors), where, "every tensor once", "one twice")
        _require(len(cut.trainable) > 0, f"{where}.trainable", "one tensor or more", "none")
        for name, shape in (("output_shape", cut.output_shape), ("evaluated_shape", cut.evaluated_shape)):
            _require(min(shape, default=0) >= 1, f"{where}.{name}", "sizes of 1 or more", shape)
        _check_masking(where, cut)
        _require(cut.saved >= 0 and cut.macs >= 0, where, "counts of 0 or more", (cut.saved, cut.macs))
        needs_classes = cut.loss == "cross-entropy"
        fits = not needs_classes or cut.output_shape == (plan.class_count,)
        _require(fits, f"{where}.output_shape", "the class count, as the loss is in the graph", cut.output_shape)
        features = cut.loss != "own-head" or len(cut.output_shape) == 1
        _require(features, f"{where}.output_shape", "one size, as a head takes features", cut.output_shape)
        whole = plan.whole_model or cut.index < cut.depth
        _require(whole, where, f"less than the whole model ({cut.depth}), which is not released", cut.index)
    coded = plan.activations != "int8" or plan.strategy in MASKED
    _require(coded, "activations", f"int8 for {', '.join(MASKED)} only", plan.strategy)
    if plan.prototypes is not None:
        _check_prototypes(plan, plan.prototypes)
    rule, augment = plan.optimiser, plan.augment
    _require(0 <= rule.momentum < 1, "optimiser.momentum", "0 to less than 1", rule.momentum)
    _require(0 <= rule.weight_decay < math.inf, "optimiser.weight_decay", "0 or more", rule.weight_decay)
    _require(0 <= rule.beta_1 < 1 and 0 <= rule.beta_2 < 1, "optimiser.beta", "0 to less than 1", rule)
    _require(0 < rule.epsilon < 1, "optimiser.epsilon", "more than 0, less than 1", rule.epsilon)
    _require(augment.crop_padding >= 0, "augment.crop_padding", "0 or more", augment.crop_padding)
    _require(0 <= augment.brightness < 1, "augment.brightness", "0 to less than 1", augment.brightness)


def _check_prototypes(plan: TrainingPlan, rule: PrototypeRule) -> None:
    one = len(plan.cuts) == 1 and plan.cuts[0].loss == "none" and set(PROJECTION) <= set(plan.cuts[0].trainable)
    _require(one, "prototypes", "one part with a projection head, as devices share it", f"{len(plan.cuts)} cuts")
    _require(rule.dimension >= 1, "prototypes.dimension", "1 or more", rule.dimension)
    _require(0 < rule.scale < math.inf, "prototypes.scale", "more than 0", rule.scale)
    _require(rule.count_step >= 1, "prototypes.count_step", "1 or more", rule.count_step)


def _check_masking(where: str, cut: TrainingCut) -> None:
    if cut.kept is None or cut.patches is None:
        same = cut.kept is cut.patches and cut.output_shape == cut.evaluated_shape
        _require(same, f"{where}.kept", "kept and patches, or neither and one shape", (cut.kept, cut.patches))
        return
    _require(1 <= cut.kept <= cut.patches, f"{where}.kept", f"1 to {cut.patches} patches", cut.kept)
    if cut.loss != "none":
        same = cut.output_shape == cut.evaluated_shape
        _require(same, f"{where}.output_shape", "the class count, masked or not", cut.output_shape)
        return
    tokens, *rest = cut.evaluated_shape
    left = (tokens - cut.patches + cut.kept, *rest)
    _require(cut.output_shape == left, f"{where}.output_shape", f"{left}, with the kept patches", cut.output_shape)


def _require(holds: bool, where: str, expected: str, found: object) -> None:
    if not holds:
        raise _broken(where, expected, str(found)[:100])


def _broken(where: str, expected: str, found: str) -> ManifestError:
    return ManifestError(f"training.json: {where}: expected {expected}, found {found}", _CURE)
