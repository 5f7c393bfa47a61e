"""Whether features of a device make sense, before anything of them is stored.

Types, shapes within one message and sizes were checked by the codec; their order by the session.
"""

from __future__ import annotations

from dataclasses import dataclass

from contract.errors import RemoteProtocolError
from contract.messages import Activations, Features
from contract.tokens import TokenLayout

LABELLED = ("raw-label", "permuted-label")  # modes in which training data come with class numbers


_CURE = "install the package of this server's backend on the device and update its software"


@dataclass(frozen=True)
class Expected:
    """What features or activations of a run look like; a package without a frontend has no token layout."""

    layout: TokenLayout | None
    label_mode: str
    samples: int = 1 << 20  # most samples of one answer


def is_stale(features: Features, run: str) -> bool:
    """Whether the batch answers a question of an earlier run, which a device may still hold in its spool: it is
    acknowledged and dropped, because its noise may be another."""
    return features.split == "train" and not features.ask.startswith(run + ".")


def check_features(features: Features, expected: Expected, class_count: int, purpose: str) -> None:
    """Accept features that fit the cut, the label mode and the purpose of the session.

    Raises:
        RemoteProtocolError: naming the field.
    """
    layout, split = expected.layout, features.split
    if layout is None:
        raise RemoteProtocolError("features: expected none, as this run trains client parts", _CURE)
    own_split = "infer" if purpose == "infer" else "train"
    _require("split", split == own_split, f"{own_split}, as the session is to {purpose}", split)
    found = features.codes.shape[1:]
    _require("codes", found == (layout.count, layout.dim), f"{layout.count} tokens of {layout.dim}", found)
    _require("total", features.total <= expected.samples, f"at most {expected.samples} samples", features.total)
    if features.sources is not None:
        shape = features.sources.shape[1:]
        _require("sources", shape == (layout.patches,), f"{layout.patches} patches", shape)
        highest = int(features.sources.max())
        _require("sources", highest < features.total, f"samples below {features.total}", highest)
    wanted = split == "train" and expected.label_mode == "permuted-label"
    given = features.labels is not None
    _require("labels", given == wanted, "permuted labels" if wanted else f"none in {expected.label_mode} mode", given)
    if features.labels is not None:
        highest = int(features.labels.max())
        _require("labels", highest < class_count, f"classes below {class_count}", highest)


def check_activations(activations: Activations, expected: Expected, class_count: int, purpose: str) -> None:
    """Accept activations that fit the label mode and the purpose; how wide they are is known where they are used.

    Raises:
        RemoteProtocolError: naming the field.
    """
    split = activations.split
    if expected.layout is not None:
        raise RemoteProtocolError("activations: expected none, as this run collects features", _CURE)
    own_split = "infer" if purpose == "infer" else "train"
    _require("split", split == own_split, f"{own_split}, as the session is to {purpose}", split, "activations")
    wanted, labels = split == "train" and expected.label_mode in LABELLED, activations.labels
    what = "class numbers" if wanted else f"none in {expected.label_mode} mode"
    _require("labels", (labels is not None) == wanted, what, labels is not None, "activations")
    if labels is not None:
        highest = int(labels.max())
        _require("labels", highest < class_count, f"classes below {class_count}", highest, "activations")


def _require(field: str, holds: bool, expected: str, found: object, message: str = "features") -> None:
    if not holds:
        raise RemoteProtocolError(f"{message}.{field}: expected {expected}, found {found}", _CURE)
