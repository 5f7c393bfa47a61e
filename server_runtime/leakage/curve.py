"""From a few measured strengths of noise to a whole curve, and from curves to the least noise that is enough: pure.

Leakage cannot rise with noise, so what measurement errors make rise is levelled (isotonic regression); between measured
strengths it is interpolated. What is measured, and how, is left to `profiler`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

GRID = 0.05
CONFIDENCE = 0.95
ALLOWED_ABOVE_CHANCE = 0.02


def non_increasing(values: Sequence[float]) -> list[float]:
    """The nearest non-increasing sequence in the mean square (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []  # mean and count
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] < mean:
            before, others = pools.pop()
            mean, count = (before * others + mean * count) / (others + count), others + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def fine_grid(strengths: Sequence[float]) -> list[float]:
    """0.05 apart from the first to the last of ascending strengths, which are themselves multiples or are added."""
    first, last = strengths[0], strengths[-1]
    count = math.floor(round((last - first) / GRID, 9))
    points = {round(first + GRID * step, 10) for step in range(count + 1)}
    return sorted(points | {round(strength, 10) for strength in strengths})


def interpolate(strengths: Sequence[float], values: Sequence[float], at: float) -> float:
    """Linear between ascending strengths, constant beyond them."""
    if at <= strengths[0]:
        return values[0]
    if at >= strengths[-1]:
        return values[-1]
    place = bisect_right(strengths, at)
    left, right = strengths[place - 1], strengths[place]
    share = (at - left) / (right - left)
    return (1.0 - share) * values[place - 1] + share * values[place]


def upper_bound(right: int, total: int, confidence: float = CONFIDENCE) -> float:
    """The largest true accuracy that `right` of `total` leave possible (Clopper and Pearson, one-sided)."""
    if total < 1:
        raise ValueError("a bound needs at least one image")
    if right >= total:
        return 1.0
    low, high = right / total, 1.0
    for _ in range(60):
        middle = (low + high) / 2.0
        if _at_most(right, total, middle) > 1.0 - confidence:
            low = middle
        else:
            high = middle
    return high


def _at_most(right: int, total: int, accuracy: float) -> float:
    """Probability of at most `right` of `total` at that accuracy."""
    if accuracy <= 0.0:
        return 1.0
    if accuracy >= 1.0:
        return float(right >= total)
    yes, no = math.log(accuracy), math.log1p(-accuracy)
    terms = [
        math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1) + k * yes + (total - k) * no
        for k in range(right + 1)
    ]
    top = max(terms)
    return math.exp(top) * math.fsum(math.exp(term - top) for term in terms)


@dataclass(frozen=True)
class Judged:
    """One measured point: how like the pictures are, and of how many the classifier still told the class."""

    fsim: float
    right: int
    total: int


def find_threshold(points: Sequence[Judged], classes: int) -> tuple[float | None, str]:
    """T_FSIM: the largest measured FSIM at and below which a classifier does no better than chance, and why that one.

    Chance means: the upper 95 % bound of its accuracy is at most 1 / classes + 2 points. None with the reason where
    that holds nowhere.
    """
    allowed = 1.0 / classes + ALLOWED_ABOVE_CHANCE
    found: float | None = None
    for point in sorted(points, key=lambda point: point.fsim):
        if upper_bound(point.right, point.total) > allowed:
            break
        found = point.fsim
    if found is not None:
        return found, f"the classifier's upper 95 % bound is at most {allowed:.3f} there and below"
    lowest = min((upper_bound(point.right, point.total) for point in points), default=1.0)
    reason = f"the classifier may be right about {lowest:.3f} of the pictures and more, where {allowed:.3f} is allowed"
    most = max((point.total for point in points), default=1)
    if upper_bound(most // classes, most) > allowed:
        reason += f"; {most} images are too few to tell {1 / classes:.3f} from that, attack more"
    return None, reason


def least_strength(strengths: Sequence[float], fsim: Sequence[float], threshold: float) -> float | None:
    """T_sigma: the least strength on the fine grid whose FSIM is at most the threshold; None where none is."""
    for strength, value in zip(strengths, fsim, strict=True):
        if value <= threshold + 1e-12:
            return strength
    return None
