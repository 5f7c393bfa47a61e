"""The same image released at two noise scales: what the second release tells beyond the first.

Were both made of one draw, (b1 z2 - b2 z1) / (b1 - b2) would be the image's clean tokens; that is why the scale is
part of the key. Of two independent draws the best is their mean weighted by 1 / variance. Which of the two it faces,
the attack reads off the releases: the variance of z1 - z2 is that of |b1 - b2| or of both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import Effort, Finds, Known, Pairs, Seen, Upload
from ._release import Release
from .ridge import RidgeAttack

FINDS: Finds = "images"
NEEDS = frozenset({"uploads"})


class TwoReleases(Release):
    """What the combination of both releases is like, when the draws are one or two."""

    def __init__(self, first: Release, second: Release, one_draw: bool) -> None:
        one, two = _variance(first), _variance(second)
        share = 0.0 if one_draw else float((two / (one + two).clamp_min(1e-30)).mean())
        super().__init__(first.law, first.strength, first.public, share)
        self._pair, self._one_draw = (first, second), one_draw

    def send(self, tokens: Tensor, generator: torch.Generator, noise: Tensor | None = None) -> Tensor:
        """The combination (n, S, d) of both uploads."""
        first, second = self._pair
        unit = first.draw(len(tokens), generator)
        other = unit if self._one_draw else second.draw(len(tokens), generator)
        return self.combine(first.send(tokens, generator, unit), second.send(tokens, generator, other))

    def combine(self, one: Tensor, two: Tensor) -> Tensor:
        """(n, S, d) out of what was received at either scale."""
        first, second = (release.scales for release in self._pair)
        if self._one_draw:
            apart = first - second
            safe = torch.where(apart == 0, torch.ones_like(apart), apart)
            return torch.where(apart == 0, one, (first * two - second * one) / safe)
        weight = _variance(self._pair[1]) / (_variance(self._pair[0]) + _variance(self._pair[1])).clamp_min(1e-30)
        return weight * one + (1.0 - weight) * two


def _variance(release: Release) -> Tensor:
    """Of what the wire adds, per place and channel (S, d): Laplace noise and rounding."""
    rounding = 0.0 if release.steps is None else release.steps.square() / 12.0
    return 2.0 * release.scales.square() + rounding


class TwoScales:
    """The attack; `one_draw` is what it concluded."""

    def __init__(self, effort: Effort) -> None:
        self._effort = effort

    def fit(self, known: Known) -> None:
        self._known = known

    def reconstruct(self, seen: Seen) -> Tensor:
        known = self._known
        one, two = seen.uploads[-2:]
        first, second = (known.release.at(upload.strength) for upload in (one, two))
        self.one_draw = _is_one_draw(one, two, first, second)
        release = TwoReleases(first, second, self.one_draw)
        attack = RidgeAttack(self._effort)
        attack.fit(Known(Pairs(known.learn.images, known.learn.tokens[:1]), known.held, release))
        return attack.decode(release.combine(one.received, two.received)).clamp(0, 1)


def _is_one_draw(one: Upload, two: Upload, first: Release, second: Release) -> bool:
    spread = (one.received - two.received).square().mean(dim=0)
    together, apart = _variance(first) + _variance(second), 2.0 * (first.scales - second.scales).square()
    return bool((spread < (together + apart) / 2.0).double().mean() > 0.5)


def planned_steps(asked: int | None, images: int) -> int:
    """None."""
    return 0


def build(effort: Effort) -> TwoScales:
    """The attack; it has no steps to take."""
    return TwoScales(effort)
