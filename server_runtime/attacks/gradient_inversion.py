"""Images from the gradient of a model's parameters, as a federated client sends it after one step.

The smaller the batch, the more of it is read; labels that are unknown are read off the classifier's bias. Updates of
several local steps are `weight_delta`'s.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from . import Effort, Finds, Known, Seen
from ._matching import Search, find_images, planned_steps

FINDS: Finds = "images"
NEEDS = frozenset({"trained", "update"})
__all__ = ["FINDS", "NEEDS", "build", "planned_steps"]


class GradientInversion:
    """The attack: takes the update as one plain step, whatever made it."""

    def __init__(self, effort: Effort) -> None:
        self._effort = effort

    def fit(self, known: Known) -> None:
        self._known = known

    def reconstruct(self, seen: Seen) -> Tensor:
        if seen.update is None:
            raise ValueError("gradient_inversion needs an update")
        one_step = replace(seen.update, steps=1, momentum=0.0)
        return find_images(self._known, one_step, self._effort, Search())


def build(effort: Effort) -> GradientInversion:
    """The attack."""
    return GradientInversion(effort)
