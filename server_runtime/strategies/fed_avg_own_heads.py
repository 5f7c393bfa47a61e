"""FedAvg of the whole model but its head, which stays each device's own (EEFT's second baseline).

algorithms.md 2.2. W <- sum_i n_i W_i / sum_i n_i over the devices that answered, n_i their images.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..aggregation import average
from ..own_heads import LABEL_MODES, Answered, OwnHeads, Released
from . import Metric, Settings

__all__ = ["LABEL_MODES", "build"]


def combine(rounds: OwnHeads, answered: Answered) -> Mapping[str, Metric]:
    """The average, for everybody."""
    n = [rounds.members[device].samples for device in answered.parts]
    w = average(rounds.released.initial, list(answered.parts.values()), n, rounds.settings.average)
    for member in rounds.members.values():
        member.part = w
    return {}


def build(released: Released, settings: Settings) -> OwnHeads:
    """A strategy for one site."""
    return OwnHeads(released, settings, combine)
