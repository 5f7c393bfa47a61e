"""Labels from what a device sends back in training: a cross-entropy gradient is negative at the label and nowhere else.

Exact, whatever the model: d loss / d logits is softmax - onehot, times a positive number. `from_loss` does the same
from a sample's loss and the logits, which the server made itself; `groups` is what remains where the head stays on the
device: which samples belong together, not which class they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import Effort, Finds, Known, Seen

FINDS: Finds = "labels"
NEEDS = frozenset({"logit_gradients"})
_ROUNDS = 50


class LabelInference:
    """The attack: nothing to learn."""

    def fit(self, known: Known) -> None:
        """Nothing."""

    def reconstruct(self, seen: Seen) -> Tensor:
        """Class numbers (n,)."""
        if seen.logit_gradients is None:
            raise ValueError("label_inference needs gradients at the logits")
        return seen.logit_gradients.argmin(dim=1)


def planned_steps(asked: int | None, images: int) -> int:
    """None."""
    return 0


def build(effort: Effort) -> LabelInference:
    """The attack; it has no steps to take."""
    return LabelInference()


def from_loss(logits: Tensor, losses: Tensor) -> Tensor:
    """Class numbers (n,) of logits (n, C) from each sample's cross-entropy (n,)."""
    return (-logits.log_softmax(dim=1) - losses[:, None]).abs().argmin(dim=1)


def groups(gradients: Tensor, classes: int, seed: int = 0) -> Tensor:
    """Group numbers (n,) of gradients at the features (n, f): a sample's points away from its own class's weights.

    Spherical k-means from a few starts; which class a group is stays open.
    """
    unit = torch.nn.functional.normalize(gradients.float(), dim=1)
    generator = torch.Generator(unit.device).manual_seed(seed)
    best, best_fit = torch.zeros(len(unit), dtype=torch.int64, device=unit.device), -float("inf")
    for _ in range(10):
        centres = unit[_spread(unit, classes, generator)]
        for _ in range(_ROUNDS):
            found = (unit @ centres.T).argmax(dim=1)
            sums = torch.zeros_like(centres).index_add(0, found, unit)
            centres = torch.nn.functional.normalize(sums, dim=1)
        fit = float((unit @ centres.T).max(dim=1).values.sum())
        if fit > best_fit:
            best, best_fit = found, fit
    return best


def _spread(unit: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Rows of unit vectors that are far from each other, the first drawn by chance."""
    rows = [int(torch.randint(len(unit), (1,), generator=generator, device=unit.device))]
    while len(rows) < count:
        rows.append(int((unit @ unit[rows].T).max(dim=1).values.argmin()))
    return torch.tensor(rows, device=unit.device)
