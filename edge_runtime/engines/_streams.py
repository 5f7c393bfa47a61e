"""What engines share: one image a run, one run a thread, and which patches of it.

int8 kernels lose a fifth per image at batch 8, and barriers inside a layer cost a quarter (int8.md 2). One shape for
ever also keeps the memory flat. The runs are left to each engine.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from contract.errors import EngineError

Images = NDArray[np.float32]
Keep = NDArray[np.int64]
RunOne = Callable[[dict[str, NDArray[np.generic]]], NDArray[np.float32]]

IMAGES, KEEP = "images", "keep"  # names of a frontend's inputs
PATCHES = "patches"  # key of the file's own metadata: how many patches an image has, where `keep` is an input


class Streams:
    """`threads` single-threaded runs side by side, on weights that they share."""

    def __init__(self, run_one: RunOne, threads: int, patches: int | None) -> None:
        """`patches` is N of a frontend that takes `keep`, None for one that does not."""
        self._run_one, self._patches = run_one, patches
        self._pool = ThreadPoolExecutor(threads, "engine") if threads > 1 else None

    def run(self, images: Images, keep: Keep | None) -> NDArray[np.float32]:
        """Tokens (B, T, d), each image a run of its own. Raises: EngineError."""
        feeds = single_feeds(images, keep, self._patches)
        rows = self._pool.map(self._run_one, feeds) if self._pool else map(self._run_one, feeds)
        return np.concatenate(list(rows))


def single_feeds(images: Images, keep: Keep | None, patches: int | None) -> list[dict[str, NDArray[np.generic]]]:
    """The inputs of one run for each image; without `keep` a frontend that takes it gets every patch.

    Raises: EngineError when `keep` does not fit the frontend or the images.
    """
    feeds: list[dict[str, NDArray[np.generic]]] = [{IMAGES: images[row : row + 1]} for row in range(len(images))]
    chosen = checked_keep(images, keep, patches)
    if chosen is not None:
        for row, feed in enumerate(feeds):
            feed[KEEP] = np.ascontiguousarray(chosen[row : row + 1], np.int64)
    return feeds


def checked_keep(images: Images, keep: Keep | None, patches: int | None) -> Keep | None:
    """The patches (B, K) that a frontend gets: all of them where none are named, None where it takes no choice.

    Raises: EngineError when `keep` does not fit the frontend or the images.
    """
    if patches is None:
        if keep is not None:
            raise EngineError("this frontend runs every patch of an image", "export it with --masked")
        return None
    chosen = np.broadcast_to(np.arange(patches), (len(images), patches)) if keep is None else keep
    if chosen.ndim != 2 or len(chosen) != len(images) or chosen.shape[1] == 0 or not within(chosen, patches):
        raise EngineError(
            f"keep should be {len(images)} rows of patch numbers from 0 to {patches - 1}, found {chosen.shape}",
            "report this: the patches are chosen by this program",
        )
    return chosen


def within(keep: Keep, patches: int) -> bool:
    """Is every number that of a patch? A runtime would take one of another image, or count from the end."""
    return bool(keep.size == 0 or (keep.min() >= 0 and keep.max() < patches))


def trial_feed(shape: list[int], patches: int | None) -> dict[str, NDArray[np.generic]]:
    """One black image (1, 3, h, w) with all its patches, for the run that tells which kernels there are."""
    return single_feeds(np.zeros((1, *shape[1:]), np.float32), None, patches)[0]


def patches_of(metadata: object) -> int | None:
    """N from the file's metadata. Raises: EngineError when it is no number of patches."""
    if metadata is None:
        return None
    text = str(metadata)
    if not text.isascii() or not text.isdigit() or not 1 <= len(text) <= 6 or int(text) < 1:
        raise EngineError(f"the frontend says that an image has {text[:20]!r} patches", "export the package again")
    return int(text)
