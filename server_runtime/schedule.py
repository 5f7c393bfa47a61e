"""The learning rate of a step: constant or cosine, after a linear warm-up. Time is counted in epochs.

When steps happen is left to the strategies; how a rate moves the weights to `split_model` and the devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SCHEDULES = ("constant", "cosine")


@dataclass(frozen=True)
class Schedule:
    """The highest rate, what follows the warm-up, and how many epochs each lasts; warmup is at most epochs."""

    kind: str
    rate: float
    warmup: int
    epochs: int

    def at(self, first: float, length: float) -> float:
        """The rate of a step that lasts from `first` to `first + length`, in epochs since the start.

        Warm-up rises in proportion to what is done by the step's end, so that no step has a rate of 0; the cosine falls
        with what is done before it, so that neither has the last one.
        """
        if first < self.warmup:
            return self.rate * min(1.0, (first + length) / self.warmup)
        if self.kind == "constant":
            return self.rate
        done = (first - self.warmup) / max(self.epochs - self.warmup, length)
        return self.rate * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
