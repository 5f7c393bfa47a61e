"""Which settings of server-run mean something to some strategies only, and to which. Pure.

A setting that would change nothing was meant to change something, so it is refused wherever it comes from. One that is
not named here is of every strategy.
"""

from __future__ import annotations

from collections.abc import Mapping

from contract.errors import ConfigError
from contract.training import CHOOSING, HOLDS, MASKED, RELEASED, Holds


def _holding(*holds: Holds) -> frozenset[str]:
    return frozenset(name for name, each in HOLDS.items() if each in holds)


_ROUNDS_OF_ANY = frozenset({"fed_avg", "fed_bfpt", "eft_vit"})  # which can ask any share of the devices
NOISY = frozenset({"p3sl", "asl", "ares", "sequential_split", "parallel_split"})  # which know noise at the cut
_TRAINED_ON_DEVICES = _holding("parts", *RELEASED)
STRATEGIES_OF: Mapping[str, frozenset[str]] = {
    "kappa": _holding("frontend"),
    **dict.fromkeys(("augmentations", "replaced"), frozenset({"split_adaptation"})),
    **dict.fromkeys(("batch", "learning_rate", "schedule", "warmup"), _TRAINED_ON_DEVICES),
    "outlier": _TRAINED_ON_DEVICES,
    "average": frozenset({"fed_avg", "fed_avg_own_heads", "fed_bfpt", "parallel_split", "split_fed"}),
    "cuts": _holding("parts") - {*CHOOSING},  # with those devices choose their splits
    "local_epochs": _holding(*RELEASED),
    "quorum": (_holding(*RELEASED) - {*MASKED, "fed_bfpt"}) | {"prototypes"},  # the others wait for all devices
    "fraction": _ROUNDS_OF_ANY,
    **dict.fromkeys(
        ("server_epochs", "server_rate", "sampling", "medians", "store_mb", "store_rounds"), frozenset({"eft_vit"})
    ),
    **dict.fromkeys(("threshold", "alone"), frozenset({"eeft"})),
    **dict.fromkeys(
        ("prototype_strength", "prototype_shift", "prototype_renewal", "server_copies"), frozenset({"prototypes"})
    ),
    **dict.fromkeys(("sigma", "fsim_threshold"), NOISY),
    **dict.fromkeys(
        (
            "aggregate_every",
            "average_by",
            "average_into",
            "norms",
            "sleep_least_s",
            "reference_accuracy",
            "accuracy_loss",
            "public",
        ),
        frozenset({"p3sl"}),
    ),
}
_OF_THE_SERVER = frozenset({"public"})  # in a file or the environment: a fact about the server, for whatever it runs


def check_given(strategy: str, origins: Mapping[str, str]) -> None:
    """`origins` says where each setting comes from, "default" for those that nobody chose.

    Raises: ConfigError for a chosen one that means nothing to this strategy.
    """
    for name, origin in origins.items():
        owners = STRATEGIES_OF.get(name)
        if origin == "default" or (name in _OF_THE_SERVER and not origin.startswith("--")):
            continue
        if owners is not None and strategy not in owners:
            where = "" if origin.startswith("--") else f" ({origin})"
            raise ConfigError(
                f"--{name.replace('_', '-')} was given{where}, but means nothing to {strategy}",
                f"leave it out; it belongs to {', '.join(sorted(owners))}",
            )
