"""The server's own images: read, divided into parts, and handed out in batches exactly as a device would prepare them.

What the parts are used for is left to exporter.build.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from contract.errors import DataError
from contract.image_folder import Folder, scan
from contract.images import ImageRule, load_pixels, normalise, resize
from exporter.plan import Limits

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class PublicSet:
    """Images of a folder, or drawn ones where there is no folder; pictures are loaded when asked for."""

    rule: ImageRule
    folder: Folder | None
    drawn: Pixels | None  # (n, h, w, 3)
    hilbert: bool = True  # whether the Hilbert transforms of its images belong to it (SA's D_u)

    def __len__(self) -> int:
        return len(self.folder.images) if self.folder is not None else len(self.drawn)

    @property
    def labels(self) -> NDArray[np.int64] | None:
        """Class numbers (n,), or None where the set has no class folders."""
        if self.folder is None or not self.folder.classes:
            return None
        return np.array([image.class_index for image in self.folder.images], np.int64)

    def pixels(self, indices: Sequence[int]) -> Pixels:
        """(B, h, w, 3) uint8. Raises DataError that names an unreadable file."""
        if self.folder is None:
            return self.drawn[list(indices)]
        images = [self.folder.images[index] for index in indices]
        return np.stack(
            [resize(load_pixels(each.path, each.relative, self.rule.max_pixels), self.rule) for each in images]
        )

    def batches(self, indices: Sequence[int], size: int) -> Iterator[NDArray[np.float32]]:
        """Normalised images (B, 3, h, w), B <= size, one batch in memory at a time."""
        for start in range(0, len(indices), size):
            yield normalise(self.pixels(indices[start : start + size]), self.rule)

    def digest(self) -> str:
        """SHA-256 in hex over the files' names and sizes, to tell later whether the set is still the same."""
        if self.folder is not None:
            return self.folder.digest()
        return hashlib.sha256(np.ascontiguousarray(self.drawn).data).hexdigest()


def open_folder(root: Path, rule: ImageRule, hilbert: bool = True) -> PublicSet:
    """Raises DataError when the folder is missing or holds no image."""
    return PublicSet(rule, scan(root, None), None, hilbert)


def draw_synthetic(count: int, rule: ImageRule, rng: np.random.Generator) -> PublicSet:
    """Random pictures to stand in for a missing folder: coarse noise in several sizes, scaled up and added."""
    pictures = np.zeros((count, rule.height, rule.width, 3), np.float64)
    for cells in (2, 4, 8, 16):
        coarse = rng.normal(size=(count, cells, cells, 3))
        rows = np.arange(rule.height) * cells // rule.height
        columns = np.arange(rule.width) * cells // rule.width
        pictures += coarse[:, rows][:, :, columns] / np.sqrt(cells)
    scaled = 128.0 + 64.0 * pictures / pictures.std()
    return PublicSet(rule, None, np.clip(scaled, 0, 255).astype(np.uint8))


@dataclass(frozen=True)
class Parts:
    """Disjoint index lists: `evaluation` is never calibrated or tuned on; `calibration` is the head of `tuning`."""

    evaluation: NDArray[np.int64]
    calibration: NDArray[np.int64]
    tuning: NDArray[np.int64]


def divide(count: int, limits: Limits, limit_tuning: int, rng: np.random.Generator) -> Parts:
    """A fifth of the images, at most `limits.evaluation_images`, for figures; of the rest at most `limit_tuning`."""
    if count < 1:
        raise DataError("the public set holds no image", "name a folder with images: --calibration")
    order = rng.permutation(count)
    held = min(count // 5, limits.evaluation_images)
    rest = order[held:]
    return Parts(order[:held], rest[: limits.calibration_images], rest[:limit_tuning])


def is_blank(pixels: Pixels) -> bool:
    """True when every picture has one value only, so that calibration sees no content."""
    return bool((pixels.min(axis=(1, 2, 3)) == pixels.max(axis=(1, 2, 3))).all())
