"""Fine-tuning: every device trains the whole model for itself, and nothing is averaged (EEFT's first baseline).

algorithms.md section 2.3. The server keeps each device's model between rounds, so that a device may be replaced; a
device alone would not need it, and the bytes of its rounds are no cost of the method.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..own_heads import LABEL_MODES, Answered, OwnHeads, Released
from . import Metric, Settings

__all__ = ["LABEL_MODES", "build"]


def combine(rounds: OwnHeads, answered: Answered) -> Mapping[str, Metric]:
    """W_i <- W_i."""
    for device, part in answered.parts.items():
        rounds.members[device].part = part
    return {}


def build(released: Released, settings: Settings) -> OwnHeads:
    """A strategy for one site."""
    return OwnHeads(released, settings, combine)
