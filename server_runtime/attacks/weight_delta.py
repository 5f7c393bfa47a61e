"""Images from what local training did to the weights that a device uploads: FedAvg, EEFT's modules, P3SL's parts.

The device's local steps are repeated in full, with its momentum and weight decay, until images are found that would
have moved the weights as they moved. Stronger than `gradient_inversion` where there was more than one step.
"""

from __future__ import annotations

from torch import Tensor

from . import Effort, Finds, Known, Seen
from ._matching import Search, find_images, planned_steps

FINDS: Finds = "images"
NEEDS = frozenset({"trained", "update"})
__all__ = ["FINDS", "NEEDS", "build", "planned_steps"]


class WeightDelta:
    """The attack."""

    def __init__(self, effort: Effort) -> None:
        self._effort = effort

    def fit(self, known: Known) -> None:
        self._known = known

    def reconstruct(self, seen: Seen) -> Tensor:
        if seen.update is None:
            raise ValueError("weight_delta needs an update")
        return find_images(self._known, seen.update, self._effort, Search())


def build(effort: Effort) -> WeightDelta:
    """The attack."""
    return WeightDelta(effort)
