"""Training pictures at the model's size, kept in memory up to a budget and decoded again beyond it.

What is done to them in an epoch is `contract.augment`'s part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_runtime.data import Sample


@dataclass(frozen=True)
class CacheLimits:
    """How much memory pictures may take."""

    size_bytes: int = 256 << 20


class PictureCache:
    """The first pictures asked for stay, and none is ever put out for another.

    An epoch asks for every sample once: a cache that kept the latest would have lost each before it is asked for again.
    """

    def __init__(self, decode: Callable[[Sample], NDArray[np.uint8]], limits: CacheLimits | None = None) -> None:
        """`decode` gives a sample's picture (h, w, 3) at the model's size."""
        self._decode = decode
        self._left_bytes = (limits or CacheLimits()).size_bytes
        self._kept: dict[bytes, NDArray[np.uint8]] = {}

    def pictures(self, samples: Sequence[Sample]) -> NDArray[np.uint8]:
        """Pictures (B, h, w, 3), a copy. Raises: what `decode` raises."""
        return np.stack([self._picture(sample) for sample in samples])

    def _picture(self, sample: Sample) -> NDArray[np.uint8]:
        kept = self._kept.get(sample.sample_id)
        if kept is not None:
            return kept
        picture = self._decode(sample)
        if picture.nbytes <= self._left_bytes:
            self._left_bytes -= picture.nbytes
            self._kept[sample.sample_id] = picture
        return picture
