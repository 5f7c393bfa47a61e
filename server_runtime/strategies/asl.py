"""ASL, a baseline of P3SL (arXiv 2403.05158): parallel split learning in which every device chooses its split anew for
each round, for the least delay under a long-term budget of energy (algorithms.md section 7).

The rule is the device's (`edge_runtime.choose_split.choose_by_delay`): energy and time stay there. Without a noise of
its own (--sigma) it sends what it computes, as published.
"""

from __future__ import annotations

from ..split_model import Shipped
from ..split_rounds import LABEL_MODES
from . import Settings
from .parallel_split import ParallelSplit

__all__ = ["LABEL_MODES", "build"]


def build(shipped: Shipped, settings: Settings) -> ParallelSplit:
    """A strategy for one site."""
    return ParallelSplit(shipped, settings, "asl")
