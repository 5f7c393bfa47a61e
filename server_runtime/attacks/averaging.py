"""Averaging over everything a device ever uploaded of an image, then the ridge for what noise is left.

With noise drawn anew each time, c copies leave a c-th of its variance. With keyed noise all copies are one, which the
attack finds out by comparing them; it then has nothing more than the ridge.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import Effort, Finds, Known, Pairs, Seen
from ._release import Release
from .ridge import RidgeAttack

FINDS: Finds = "images"
NEEDS = frozenset({"uploads"})


class AveragedRelease(Release):
    """What the mean of `copies` independent uploads is like."""

    def __init__(self, release: Release, copies: int) -> None:
        super().__init__(release.law, release.strength, release.public, 1.0 / copies)
        self._copies = copies

    def send(self, tokens: Tensor, generator: torch.Generator, noise: Tensor | None = None) -> Tensor:
        """The mean (n, S, d) of what the server decodes of so many uploads."""
        total = super().send(tokens, generator)
        for _ in range(self._copies - 1):
            total = total + super().send(tokens, generator)
        return total / self._copies


class Averaging:
    """The attack; `copies` is how many independent uploads it found."""

    def __init__(self, effort: Effort) -> None:
        self._effort = effort

    def fit(self, known: Known) -> None:
        self._known = known

    def reconstruct(self, seen: Seen) -> Tensor:
        distinct: list[Tensor] = []
        for upload in seen.uploads:
            if not any(torch.equal(upload.received, other) for other in distinct):
                distinct.append(upload.received)
        self.copies = len(distinct)
        known = self._known
        release = AveragedRelease(known.release, self.copies)
        attack = RidgeAttack(self._effort)
        attack.fit(Known(Pairs(known.learn.images, known.learn.tokens[:1]), known.held, release))
        return attack.decode(torch.stack(distinct).mean(dim=0)).clamp(0, 1)


def planned_steps(asked: int | None, images: int) -> int:
    """None."""
    return 0


def build(effort: Effort) -> Averaging:
    """The attack; it has no steps to take."""
    return Averaging(effort)
