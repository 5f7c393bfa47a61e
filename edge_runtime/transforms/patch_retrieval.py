"""Patch retrieval on the device: each image's nearest other image, position by position, from clean features on disk.

The law is contract.tokens.retrieval_sources; here it reads a file of features without keeping it in memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from contract.tokens import Kept, TokenLayout, kept_patches, retrieval_sources


def retrieve(
    path: Path, count: int, layout: TokenLayout, on_progress: Callable[[int], object], kept: Kept = "all"
) -> NDArray[np.uint16]:
    """Sources (n, K) of the sent patches of the clean features (n, T, d) float16 in `path`.

    Memory grows with n * d, not with n * T * d.

    Raises: DataError when there are more images than a source index can name.
    """
    with path.open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)  # closed with the last array that looks at it
    features = np.frombuffer(mapped, np.float16).reshape(count, layout.count, layout.dim)

    def after_position(step: int) -> None:
        # A position touches every page of the file: let them go, or they would count as this process's memory.
        mapped.madvise(mmap.MADV_DONTNEED)
        on_progress(step)

    return retrieval_sources(features[:, layout.prefix :], after_position, kept_patches(layout.grid, kept))
