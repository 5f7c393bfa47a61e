"""What this device agrees to: the signed manifest and its own config, held against the server's welcome and asks.

Pure. The server can ask for work; it can never ask for less protection than is agreed here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from contract.errors import ConfigError, RefusedError
from contract.manifest import Manifest
from contract.messages import Ask, Welcome
from contract.training import TrainingPlan
from edge_runtime.config import LocalConfig

# What a server may ask for in each mode. In permuted-label mode a score_batch would give the labels away.
ASKS_OF_MODE = {
    "permuted-label": frozenset({"collect_features"}),
    "logit-gradient": frozenset({"collect_features", "score_batch"}),
    "client-head": frozenset({"collect_features", "head_step"}),
}
# The same where the package has parts to be trained; a local round needs a part that holds its own loss.
_PART_ASKS = frozenset({"load_part", "forward", "settle", "upload_part"}) | frozenset(
    {"choose_split", "take_turn", "noisy_forward", "sleep"}
)
PART_ASKS_OF_MODE = {
    "raw-label": _PART_ASKS,
    "permuted-label": _PART_ASKS,
    "logit-gradient": _PART_ASKS | {"batch_loss"},
    "client-head": _PART_ASKS | {"batch_loss"},
}
PROTOTYPE_ASKS = frozenset({"attend", "set_prototypes", "give_prototypes"})
WHOLE_MODEL_ASKS = frozenset({"load_part", "local_round"})
ROUND_ASKS = {  # of the strategies whose devices keep what they have from round to round
    "eft_vit": frozenset({"masked_round", "load_global"}),
    "fed_bfpt": frozenset({"block_round", "load_part"}),
}


@dataclass(frozen=True)
class Terms:
    """This device's side of the agreement; digests and hashes in hex."""

    package_digest: str
    class_count: int
    class_list_hash: str
    label_mode: str
    kappa_floor: float
    kappa_max: float
    alpha: float
    asks: frozenset[str]  # what a server may ask for


def device_terms(
    config: LocalConfig,
    manifest: Manifest,
    package_digest: bytes,
    class_count: int,
    class_list_hash: bytes,
    training: TrainingPlan | None = None,
) -> Terms:
    """The device's own settings, or the signed manifest's where it has none.

    Raises: ConfigError when the config asks for what the package's owner ruled out.
    """
    if config.label_mode not in manifest.label_modes:
        raise misfit(
            "label mode",
            f"{config.label_mode} (this device's config)",
            f"{', '.join(manifest.label_modes)} (the package)",
            "set label_mode to one that the package allows",
        )
    kappa_floor, alpha = protection(config.kappa_floor, config.alpha, manifest)
    if training is not None and config.alpha:  # whoever asks for protection must not believe that it is there
        raise misfit(
            "weight noise",
            f"alpha {config.alpha} (this device's config)",
            "none (the package has parts that are trained here)",
            "leave alpha out, knowing what parts show: see docs/threat_model.md",
        )
    if training is None:
        asks = ASKS_OF_MODE[config.label_mode]
    elif training.whole_model:
        asks = ROUND_ASKS.get(training.strategy, WHOLE_MODEL_ASKS)
    else:
        asks = PART_ASKS_OF_MODE[config.label_mode]
        asks |= frozenset() if training.prototypes is None else PROTOTYPE_ASKS
    if training is not None and training.class_count not in (None, class_count):
        raise misfit(
            "number of classes",
            str(class_count),
            f"{training.class_count} (the package's own head)",
            "export the package for this number of classes, or give --classes the list it was made for",
        )
    return Terms(
        package_digest.hex(), class_count, class_list_hash.hex(), config.label_mode, kappa_floor,
        manifest.transforms.kappa_max, alpha, asks,
    )  # fmt: skip


def protection(kappa_floor: float | None, alpha: float | None, manifest: Manifest) -> tuple[float, float]:
    """The least feature noise, as kappa of the patches, and the weight noise: the device's own, else the package's.

    Raises: ConfigError when the package's owner ruled that out.
    """
    rules = manifest.transforms
    floor = rules.kappa if kappa_floor is None else _floor_of_patches(kappa_floor, manifest)
    if floor > rules.kappa_max:
        raise misfit(
            "kappa",
            f"at least {floor} (this device's floor)",
            f"at most {rules.kappa_max} (the package's ceiling)",
            "lower kappa_floor, or ask for a package that is trained for more noise",
        )
    package_alpha = rules.alpha if rules.weight_noise else 0.0
    return floor, package_alpha if alpha is None else alpha


def _floor_of_patches(floor: float, manifest: Manifest) -> float:
    """The kappa at which even tokens that get a share of the noise are at a device's own floor.

    Raises: ConfigError when they get none.
    """
    share = min((cut.sent.prefix_share for cut in manifest.cuts if cut.tokens.prefix), default=1.0)
    if share == 0.0 and floor > 0.0:
        raise misfit(
            "noise of prefix tokens",
            f"at least {floor} (this device's floor)",
            "none (the package)",
            "install a package that was exported with --prefix-noise above 0",
        )
    return floor / share if share else floor


def check_welcome(welcome: Welcome, terms: Terms) -> None:
    """Raises: RefusedError naming both values of the first term that does not fit."""
    if welcome.package_digest != terms.package_digest:
        raise refusal(
            "package digest",
            terms.package_digest[:16],
            welcome.package_digest[:16],
            "install the package that this server's backend belongs to",
        )
    if welcome.label_mode != terms.label_mode:
        raise refusal(
            "label mode",
            terms.label_mode,
            welcome.label_mode,
            "set label_mode here, or change the server's, knowing what each mode shows",
        )
    if welcome.class_count != terms.class_count:
        raise refusal(
            "number of classes",
            str(terms.class_count),
            str(welcome.class_count),
            "give all devices of the site the same --classes",
        )
    if welcome.class_list_hash not in (None, terms.class_list_hash):
        raise refusal(
            "class list hash", terms.class_list_hash[:16], str(welcome.class_list_hash)[:16],
            "give all devices of the site the same --site-secret file and the same --classes",
        )  # fmt: skip
    check_kappa(welcome.kappa, terms)


def check_kappa(kappa: float, terms: Terms) -> None:
    """Raises: RefusedError when the noise is below this device's floor or above what the package was trained for."""
    if not (kappa >= terms.kappa_floor or math.isclose(kappa, terms.kappa_floor)):  # NaN is refused as well
        raise refusal(
            "kappa",
            f"at least {terms.kappa_floor} (this device's floor)",
            str(kappa),
            "raise the server's kappa, or lower kappa_floor here knowing what that shows",
        )
    if kappa > terms.kappa_max and not math.isclose(kappa, terms.kappa_max):
        raise refusal(
            "kappa",
            f"at most {terms.kappa_max} (the package's ceiling)",
            str(kappa),
            "lower the server's kappa, or export a package that is trained for more noise",
        )


def check_ask(ask: Ask, terms: Terms) -> None:
    """Raises: RefusedError when the label mode does not allow the ask, or it wants less noise than agreed."""
    if ask.kind not in terms.asks:
        raise refusal(
            f"ask {ask.ask}",
            f"{', '.join(sorted(terms.asks))} (label mode {terms.label_mode})",
            ask.kind,
            "set the label mode that the server's strategy needs, knowing what it shows",
        )
    if ask.kind == "collect_features":
        check_kappa(float(ask.parameters["kappa"]), terms)


def refusal(term: str, ours: str, theirs: str, cure: str) -> RefusedError:
    """This device says no, with both values."""
    return RefusedError(f"this device refuses the server's terms: {term}: here {ours}, there {theirs}", cure, "terms")


def misfit(term: str, ours: str, theirs: str, cure: str) -> ConfigError:
    """The device's own settings and its package cannot go together, with both values; no server has a part in it."""
    return ConfigError(f"the package does not fit this device's settings: {term}: here {ours}, there {theirs}", cure)
