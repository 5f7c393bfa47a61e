from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_runtime.data import Sample
from edge_runtime.picture_cache import CacheLimits, PictureCache

SAMPLES = [Sample(Path(f"{number}.png"), f"{number}.png", bytes([number]) * 16, b"", 0) for number in range(4)]
PICTURE_BYTES = 4 * 5 * 3


def cache_of(size_bytes: int) -> tuple[PictureCache, list[str]]:
    decoded: list[str] = []

    def decode(sample: Sample) -> np.ndarray:
        decoded.append(sample.relative)
        return np.full((4, 5, 3), sample.sample_id[0], np.uint8)

    return PictureCache(decode, CacheLimits(size_bytes)), decoded


@pytest.mark.parametrize(("pictures", "again"), [(0, 4), (1, 3), (2.5, 2), (4, 0), (9, 0)])
def test_what_fits_is_decoded_once_and_the_rest_each_epoch(pictures: float, again: int) -> None:
    cache, decoded = cache_of(int(pictures * PICTURE_BYTES))
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        found = np.concatenate([cache.pictures([SAMPLES[place]]) for place in order])
        assert found[:, 0, 0, 0].tolist() == order and found.dtype == np.uint8
    assert len(decoded) == 4 + again


def test_a_batch_may_be_changed_without_harm() -> None:
    cache, _ = cache_of(1 << 20)
    cache.pictures(SAMPLES)[...] = 77
    assert cache.pictures(SAMPLES)[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
