"""EFTViT's balanced set: how many features of each class leave the device, and of which images (algorithms.md 4.1).

Pure. Every class that is present gets exactly m features: of a large class m images are chosen, of a small one the
images are passed through again until there are m. Or every image is sent once: the median leaves most
images of an uneven device out, and what comes again brings nothing under a mask that never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Chosen:
    """One feature to make: the place of an image, and how often it was chosen before."""

    place: int
    turn: int


def target_count(labels: NDArray[np.int64], threshold: float) -> int:
    """m: `threshold` times the median of the classes that are present, rounded down, at least 1; 0: the largest."""
    counts = np.bincount(labels)
    present = counts[counts > 0]
    if not len(present):
        return 0
    if threshold == 0.0:
        return int(present.max())
    return max(1, int(threshold * float(np.median(present)) + 1e-9))


def balanced(
    labels: NDArray[np.int64], count: int, order: Callable[[Sequence[int]], Sequence[int]]
) -> tuple[Chosen, ...]:
    """Exactly `count` features of every class that is present, class by class; `order` shuffles the places of a class.

    A place comes again only after all others of its class have come as often.
    """
    chosen: list[Chosen] = []
    for each in np.unique(labels):
        places = list(order([int(place) for place in np.flatnonzero(labels == each)]))
        chosen += [Chosen(places[number % len(places)], number // len(places)) for number in range(count)]
    return tuple(chosen)


def every_image(labels: NDArray[np.int64]) -> tuple[Chosen, ...]:
    """One feature of each."""
    return tuple(Chosen(place, 0) for place in range(len(labels)))
