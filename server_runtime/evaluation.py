"""The operator's own labelled images, by which the server judges the model that it trains: read and prepared as devices
prepare theirs.

What is done about a bad judgement is left to the strategies.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from contract.errors import ConfigError
from contract.image_folder import scan
from contract.images import ImageRule, load_pixels, normalise, resize


@dataclass(frozen=True)
class Evaluation:
    """Images (n, 3, h, w) f32, normalised, and their class numbers (n,) i64, of `classes` classes."""

    images: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    classes: int


def digest_of(root: Path) -> str:
    """SHA-256 in hex over names and sizes. Raises: DataError."""
    return scan(root, None).digest()


def check_same(recorded: str, root: Path | None) -> None:
    """A run goes on with the images that it was judged by. Raises: ConfigError, DataError."""
    if recorded and (root is None or digest_of(root) != recorded):
        raise ConfigError(
            f"this run is judged by other images than those of {'no --public' if root is None else root}",
            "give the --public folder that it was started with, or start another --run",
        )


def read_evaluation(root: Path, rule: ImageRule) -> Evaluation:
    """A folder with one folder for each class, in the order of their names. Raises: DataError, ConfigError."""
    folder = scan(root, None)
    if not folder.classes:
        raise ConfigError(
            f"{root} has no class folders, and the model is judged by classes",
            "give --public a folder with one folder for each of the site's classes",
        )
    pictures = [resize(load_pixels(each.path, each.relative, rule.max_pixels), rule) for each in folder.images]
    labels = np.array([each.class_index for each in folder.images], np.int64)
    return Evaluation(normalise(np.stack(pictures), rule), labels, len(folder.classes))
