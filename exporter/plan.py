"""Everything that was chosen for one export, in one frozen value; it is stored with the backend as it is.

Where the choices come from (flags, environment, file) is left to exporter.cli. The texts of the longer ones are read
here, as nothing else knows their form.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from contract.canonical import INT_MAX
from contract.errors import UsageError, suggest
from contract.tokens import KEPT, Kept, SentRule
from contract.training import HOLDS, MASKED, RELEASED, AugmentRule, Holds, OptimiserRule, Precision, PrototypeRule

ModelArg = int | float | bool | str | None | list["ModelArg"] | dict[str, "ModelArg"]

QUANTIZERS = ("default", "searched", "paper")
TUNES = ("noise-aware", "paper", "none")
OPTIMISERS = ("sgd", "adamw")
GRADIENTS = ("float32", "float16", "int8")
ACTIVATIONS = ("float32", "float16", "int8")  # int8: of a masked model's features only
PEFTS = ("all", "head", "bias", "prompt", "lora")  # what of a whole model devices train
BACKBONE = "backbone."  # beginning of the names that EEFT freezes; nothing of them ever travels
_CUTS_CURE = "write for example --cuts 1-10, or --cuts 2,6,10"
_AUGMENT_CURE = "write for example --augment crop=4,flip,brightness=0.2"


@dataclass(frozen=True)
class Limits:
    """Bounds of an export's cost and of its figures."""

    calibration_images: int = 32  # SA's own number
    statistics_images: int = 512
    evaluation_images: int = 500
    compared_images: int = 8  # for the signal-to-noise ratio at the cut
    synthetic_images: int = 10
    searched_images: int = 16  # that a search for scales must do better on
    batch: int = 4  # more a run is slower per image: intermediates leave the cache
    golden_images: int = 4
    int8_share: float = 0.97
    int8_snr_db: float = 20.0
    int8_top1_loss: float = 0.02  # against float32, on held-out public images
    noisy_top1_share: float = 0.25  # of float32's top-1 that must be left under the planned noise


@dataclass(frozen=True)
class ModuleChoices:
    """Of EEFT: k skips into a block, gamma of the complexity term, where the logits start (algorithms.md 2.1), and the
    weight of the skips' norms at the start.

    The paper starts at alpha -3 and skips 1, where the model is noise that has to be learnt anew; here it starts as
    what it is, which is 18 to 25 points better in ten rounds (docs/results.md).
    """

    skips: int = 3
    complexity: float = 0.3
    start_alpha: float = 3.0
    start_skips: float = 0.0
    start_beta: float = 2.0

    def __post_init__(self) -> None:
        _require(self.skips >= 1, f"skips must be 1 or more, found {self.skips}")
        _require(0 <= self.complexity <= 1e6, f"complexity must be 0 or more, found {self.complexity}")
        _require(abs(self.start_alpha) <= 20, f"start-alpha must lie in -20..20, found {self.start_alpha}")
        _require(0 <= self.start_skips <= 1, f"start-skips must lie in 0..1, found {self.start_skips}")


@dataclass(frozen=True)
class TrainingChoices:
    """What was chosen about training on devices; `cuts` is empty for the family's default cut.

    `freeze` holds beginnings of parameter names; `recompute` lets backward compute the activations again.
    """

    strategy: str
    cuts: tuple[int, ...]
    release_whole_model: bool
    classes: int | None
    optimiser: OptimiserRule
    augment: AugmentRule
    gradient: Precision
    activations: str  # float32 or float16
    freeze: tuple[str, ...]
    recompute: bool
    keep_patches: float | None = None  # share of an image's patches that goes through the part in training
    modules: ModuleChoices | None = None  # where these are trained around the frozen model
    peft: str = "all"
    prototypes: PrototypeRule | None = None  # of the strategy of that name

    def __post_init__(self) -> None:
        rule, augment, holds = self.optimiser, self.augment, holds_of(self.strategy)
        _require(holds != "frontend", f"{self.strategy} trains nothing on devices")
        _require(self.classes is None or self.classes >= 2, f"classes must be 2 or more, found {self.classes}")
        _require(self.gradient in GRADIENTS, f"gradient must be one of {', '.join(GRADIENTS)}, found {self.gradient!r}")
        known = self.activations in ACTIVATIONS
        _require(known, f"activations must be one of {', '.join(ACTIVATIONS)}, found {self.activations!r}")
        _require(0 <= rule.momentum < 1, f"momentum must be 0 or more and less than 1, found {rule.momentum}")
        _require(0 <= rule.weight_decay <= 1, f"weight-decay must lie in 0..1, found {rule.weight_decay}")
        _require(augment.crop_padding >= 0, f"crop must be 0 pixels or more, found {augment.crop_padding}")
        _require(
            0 <= augment.brightness < 1, f"brightness must be 0 or more and less than 1, found {augment.brightness}"
        )
        with_head = self.prototypes is not None
        _require(with_head == (self.strategy == "prototypes"), f"{self.strategy} has its own kind of part")
        if self.prototypes is not None:
            _require(self.prototypes.dimension >= 1, f"projection must be 1 or more, found {self.prototypes.dimension}")
            _require(
                self.prototypes.count_step >= 1, f"count-step must be 1 or more, found {self.prototypes.count_step}"
            )
            _require(self.keep_patches is None, "keep-patches and prototypes do not go together")
        share = self.keep_patches
        _require(share is None or 0 < share <= 1, f"keep-patches must be more than 0 and at most 1, found {share}")
        masked = self.strategy in MASKED
        if self.activations == "int8" and not masked:
            raise UsageError(
                f"--activations int8 belongs to {', '.join(MASKED)}, and the package is for {self.strategy}",
                "choose float32 or float16",
            )
        averaged = self.strategy == "fed_avg" and self.peft == "all"
        if holds == "whole" and not masked and not averaged and share is not None:
            raise UsageError("--keep-patches is for parts, and the whole model was asked for", "leave it out")
        _require(self.peft in PEFTS, f"peft must be one of {', '.join(PEFTS)}, found {self.peft!r}")
        if self.peft != "all" and self.strategy != "fed_avg":
            raise UsageError(f"--peft {self.peft} was given, but it belongs to fed_avg", "leave it out")
        self._check_release(holds)

    @property
    def whole_model(self) -> bool:
        """Do devices get every layer?"""
        return holds_of(self.strategy) in RELEASED

    def _check_release(self, holds: Holds) -> None:
        if holds in RELEASED and not self.release_whole_model:
            raise UsageError(
                f"{self.strategy} needs the whole model on devices: the package would give every layer away",
                "add --release-whole-model if the model's owner agrees; other strategies keep a part on the server",
            )
        if holds not in RELEASED and self.release_whole_model:
            raise UsageError(
                f"--release-whole-model was given, but {self.strategy} needs the first layers only",
                "leave it out; it belongs to " + ", ".join(name for name in HOLDS if HOLDS[name] in RELEASED),
            )
        if holds == "whole" and self.classes is None:
            raise UsageError(
                f"{self.strategy} trains the head on devices, and --classes does not say for how many classes",
                "add --classes N, the number of classes of the site",
            )
        if self.strategy in MASKED and len(self.cuts) > 1:
            raise UsageError(
                f"{self.strategy} has one local module, and --cuts names {len(self.cuts)} cuts",
                "give one, as in --split 2",
            )
        if holds in RELEASED and self.cuts and self.strategy not in MASKED:
            raise UsageError(
                f"{self.strategy} has no cut: devices hold the whole model", "leave out --split and --cuts"
            )
        if holds != "whole" and self.classes is not None:
            raise UsageError(
                f"--classes was given, but with {self.strategy} the head is made where the training runs",
                "leave it out; a site's number of classes is known when its devices join",
            )
        _require((self.modules is not None) == (holds == "modules"), "modules belong to eeft, and to it only")
        settled = holds != "modules" or self.freeze in ((), (BACKBONE,))
        _require(settled, f"with {self.strategy} the modules alone are trained, found freeze {','.join(self.freeze)}")


@dataclass(frozen=True)
class ExportPlan:
    """One export. Paths are texts, so that the plan can be stored; None stands for what was not given.

    `training` is None for a frontend, which devices run and do not train.
    """

    model: str
    model_args: tuple[tuple[str, ModelArg], ...]
    split: int | None  # None: two thirds of the depth
    int8: bool
    calibration: str | None
    weights: str | None
    pretrained: bool
    tune: str
    opset: int
    alpha: float
    kappa: float
    kappa_max: float
    name: str | None
    version: int | None  # None: one more than the package that is replaced
    seed: int
    limit_tuning: int
    signing_key: str | None
    force: bool
    output: str
    training: TrainingChoices | None = None
    quantizer: str = "default"
    sent_patches: Kept = "all"  # which patch tokens devices send
    prefix_noise: float = 1.0  # share of the patches' noise that prefix tokens get
    masked: bool = False  # the frontend takes the patches to run as a second input
    no_hilbert: bool = False  # leave the Hilbert transforms out of the public set (SA's ablation "w/o HT")
    tuning_subsets: int = 3  # M; 0: the sent frontend alone
    preview: bool = False  # put decoders for the owner's preview into the package
    preview_steps: int = 1500
    preview_minutes: float = 15.0
    played_sites: int | None = None  # None: by the size of the backend
    tensorrt: bool = False  # build the file's TensorRT plans here, as a check

    def __post_init__(self) -> None:
        known = ", ".join(QUANTIZERS)
        _require(self.quantizer in QUANTIZERS, f"quantizer must be one of {known}, found {self.quantizer!r}")
        _require(self.tune in TUNES, f"tune must be one of {', '.join(TUNES)}, found {self.tune!r}")
        if self.tune == "paper" and not self.int8:
            raise UsageError("--tune paper mixes quantized frontends, and this one stays float32", "add --int8")
        _require(not (self.weights and self.pretrained), "expected --weights or --pretrained, found both")
        _require(self.opset >= 17, f"opset must be 17 or more (LayerNormalization), found {self.opset}")
        _require(0.0 <= self.alpha <= 1.0, f"alpha must lie in 0..1, found {self.alpha}")
        _require(self.kappa_max >= 0.0, f"kappa-max must be 0 or more, found {self.kappa_max:g}")
        _require(
            0.0 <= self.kappa <= self.kappa_max,
            f"kappa must lie in 0..kappa-max ({self.kappa_max:g}), found {self.kappa:g}",
        )
        known = ", ".join(KEPT)
        _require(self.sent_patches in KEPT, f"sent-patches must be one of {known}, found {self.sent_patches!r}")
        _require(0.0 <= self.prefix_noise <= 1.0, f"prefix-noise must lie in 0..1, found {self.prefix_noise}")
        _require(self.version is None or self.version >= 1, f"version must be 1 or more, found {self.version}")
        _require(self.limit_tuning >= 1, f"limit-tuning must be 1 or more, found {self.limit_tuning}")
        _require(self.tuning_subsets >= 0, f"tuning-subsets must be 0 or more, found {self.tuning_subsets}")
        _require(0 <= self.seed <= INT_MAX, f"seed must be 0 or more, of at most 63 bits, found {self.seed}")
        sites = self.played_sites
        _require(sites is None or sites >= 1, f"played-sites must be 1 or more, found {sites}")
        if self.training is not None and self.int8:
            raise UsageError(
                f"--int8 is for frontends; {self.training.strategy} trains its part in float32", "leave out --int8"
            )
        _require(self.int8 or self.quantizer == "default", "quantizer was given, but not --int8")
        if self.training is not None and self.masked:
            raise UsageError(
                f"--masked is for frontends; {self.training.strategy} masks with --keep-patches", "leave out --masked"
            )

        self._check_preview()

    def _check_preview(self) -> None:
        if self.preview and self.training is not None:
            raise UsageError(
                f"--preview is for frontends; parts for {self.training.strategy} send without noise",
                "leave it out; leakage-profile measures what such parts show",
            )
        if self.preview and self.calibration is None:
            raise UsageError("--preview trains an attacker on public images", "add --calibration DIR")
        _require(self.preview_steps >= 1, f"preview-steps must be 1 or more, found {self.preview_steps}")
        _require(self.preview_minutes > 0, f"preview-minutes must be more than 0, found {self.preview_minutes}")

    @property
    def sent(self) -> SentRule:
        """As the manifest says it."""
        return SentRule(self.sent_patches, self.prefix_noise)

    def document(self) -> dict[str, object]:
        """The plan as it is stored with the backend, from which a server builds the model again."""
        document = {**asdict(self), "model_args": dict(self.model_args)}
        if self.training is None:
            del document["training"]
        return document


def holds_of(strategy: str) -> Holds:
    """What a package for this strategy holds. Raises UsageError for a strategy that does not exist."""
    if strategy not in HOLDS:
        raise UsageError(f"there is no strategy {strategy!r}{suggest(strategy, HOLDS)}", "correct --for")
    return HOLDS[strategy]


def read_cuts(text: str) -> tuple[int, ...]:
    """Cuts in ascending order from `3`, `2,6,10`, `1-10`, or a mixture. Raises UsageError."""
    cuts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?", part, re.ASCII)
        if found is None:
            raise UsageError(f"--cuts should be numbers and ranges, found {part.strip()!r} in {text!r}", _CUTS_CURE)
        first, last = int(found[1]), int(found[2] or found[1])
        if first > last:
            raise UsageError(f"--cuts has a range that ends before it starts: {part.strip()}", _CUTS_CURE)
        cuts.extend(range(first, last + 1))
    if min(cuts) < 1:
        raise UsageError("--cuts names cut 0, which leaves nothing to a device: the first layer is 1", _CUTS_CURE)
    twice = next((cut for cut in cuts if cuts.count(cut) > 1), None)
    if twice is not None:
        raise UsageError(f"--cuts names cut {twice} more than once", "name each cut once")
    return tuple(sorted(cuts))


def read_augment(text: str) -> AugmentRule:
    """The rule in `crop=4,flip,brightness=0.2`, any of them left out, or `none`. Raises UsageError."""
    if text.strip() == "none":
        return AugmentRule()
    values: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (each.strip() for each in part.partition("="))
        if key not in ("crop", "flip", "brightness"):
            raise UsageError(
                f"--augment has an unknown part {key!r}{suggest(key, ('crop', 'flip', 'brightness'))}", _AUGMENT_CURE
            )
        if key in values or bool(equals) == (key == "flip"):
            raise UsageError(f"--augment {part.strip()} is not as expected in {text!r}", _AUGMENT_CURE)
        values[key] = value
    try:
        return AugmentRule(int(values.get("crop", 0)), "flip" in values, float(values.get("brightness", 0.0)))
    except ValueError as error:
        raise UsageError(f"--augment has a part that is no number: {text!r}", _AUGMENT_CURE) from error


def optimiser_rule(kind: str, momentum: float | None, weight_decay: float | None) -> OptimiserRule:
    """The rule with its defaults: momentum 0.9 and decay 5e-4 with sgd, decay 0.01 with adamw. Raises UsageError."""
    if kind == "sgd":
        return OptimiserRule("sgd", *(default if given is None else given for given, default in
                                      ((momentum, 0.9), (weight_decay, 5e-4))))  # fmt: skip
    if kind == "adamw":
        if momentum is not None:
            raise UsageError("--momentum was given, but adamw has none", "leave it out, or use --optimiser sgd")
        return OptimiserRule("adamw", 0.0, 0.01 if weight_decay is None else weight_decay)
    raise UsageError(f"optimiser must be one of {', '.join(OPTIMISERS)}, found {kind!r}", "see export-frontend --help")


def _require(holds: bool, cause: str) -> None:
    if not holds:
        raise UsageError(cause, "see export-frontend --help")
