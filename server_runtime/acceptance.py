"""Whether features of a device make sense, before anything of them is stored.

Types, shapes within one message and sizes were checked by the codec; their order by the session.
"""

from __future__ import annotations

from dataclasses import dataclass

from contract.errors import RemoteProtocolError
from contract.messages import Features
from contract.tokens import TokenLayout


@dataclass(frozen=True)
class Expected:
    """What features of a run look like."""

    layout: TokenLayout
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


def _require(field: str, holds: bool, expected: str, found: object) -> None:
    if not holds:
        raise RemoteProtocolError(
            f"features.{field}: expected {expected}, found {found}",
            "install the package of this server's backend on the device and update its software",
        )
