"""Public images for leakage-profile: some play the device's and are attacked, the attacker learns from the others.

What is done with them is left to `profiler`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from contract.errors import DataError
from contract.image_folder import Folder
from contract.images import ImageRule, load_pixels, pixel_digest, resize

LEAST_IMAGES = 20  # below that nothing is left to learn from
ATTACKED_SHARE = 5  # at most a fifth of the images are attacked
HELD_SHARE = 10  # a tenth of the others is chosen on

Tell = Callable[[int], object]
Progress = Callable[[str, int, str], AbstractContextManager[Tell]]  # (what, how many, unit) -> tell that some are done


@dataclass(frozen=True)
class Pictures:
    """Public pictures (n, h, w, 3) uint8 with class numbers (n,), None without classes, and digests of the files' own
    pixels."""

    pixels: np.ndarray
    labels: np.ndarray | None
    digests: tuple[bytes, ...]

    def images(self, device: torch.device) -> Tensor:
        """(n, 3, h, w) in [0, 1]."""
        return torch.from_numpy(self.pixels).permute(0, 3, 1, 2).to(device).float() / 255.0

    def first(self, count: int) -> Pictures:
        """The first so many."""
        return Pictures(self.pixels[:count], None if self.labels is None else self.labels[:count], self.digests[:count])


@dataclass(frozen=True)
class Public:
    """Pictures to learn from, to choose on, and to attack."""

    learn: Pictures
    held: Pictures
    attacked: Pictures
    classes: tuple[str, ...]


def digest_of(folder: Folder) -> str:
    """Names and sizes of the public files, so that rows of other images are not mixed in."""
    return folder.digest()


def read_public(folder: Folder, rule: ImageRule, images: int, learn: int, seed: int, progress: Progress) -> Public:
    """Choose and decode public pictures, the attacked ones spread evenly over the classes.

    Raises: DataError for a folder with too few images, or an image that cannot be read.
    """
    if len(folder.images) < LEAST_IMAGES:
        raise DataError(
            f"{folder.root} has {len(folder.images)} images; to learn from some and attack others takes {LEAST_IMAGES}",
            "give a larger folder of public images",
        )
    order = np.random.default_rng(seed).permutation(len(folder.images))
    turn: dict[int | None, int] = {}
    rounds = []
    for row in order:  # the first of each class, then the second of each, and so on
        label = folder.images[row].class_index
        turn[label] = turn.get(label, 0) + 1
        rounds.append(turn[label])
    order = order[np.argsort(rounds, kind="stable")]
    attacked = min(images, len(order) // ATTACKED_SHARE)
    rest = np.random.default_rng([seed, 1]).permutation(order[attacked:])[:learn]
    held = max(2, len(rest) // HELD_SHARE)
    with progress("public images", attacked + len(rest), "images") as tell:
        learnt, chosen_on, tried = (
            _decode(folder, rows, rule, tell) for rows in (rest[held:], rest[:held], order[:attacked])
        )
    known = set(tried.digests)
    return Public(_without(learnt, known), _without(chosen_on, known), tried, folder.classes)


def _without(pictures: Pictures, digests: set[bytes]) -> Pictures:
    """Less copies of attacked pictures, which an attacker would only have to remember."""
    rows = np.array([row for row, digest in enumerate(pictures.digests) if digest not in digests], np.int64)
    labels = None if pictures.labels is None else pictures.labels[rows]
    return Pictures(pictures.pixels[rows], labels, tuple(pictures.digests[row] for row in rows))


def _decode(folder: Folder, rows: np.ndarray, rule: ImageRule, tell: Tell) -> Pictures:
    pixels = np.empty((len(rows), rule.height, rule.width, 3), np.uint8)
    digests, labels = [], []
    for place, row in enumerate(rows):
        file = folder.images[row]
        upright = load_pixels(file.path, file.relative, rule.max_pixels)
        pixels[place] = resize(upright, rule)
        digests.append(pixel_digest(upright))
        labels.append(file.class_index)
        tell(1)
    known = bool(labels) and all(label is not None for label in labels)
    return Pictures(pixels, np.array(labels, np.int64) if known else None, tuple(digests))
