"""The owner's preview: what a manifest says of its decoders, and how alike two pictures are.

A decoder is an attack that its publisher trained on public pictures, as an ONNX file: it reads wire codes and draws a
picture. Training it is the server's part, running it and what is said to a data owner are the device's. Both measure
with the same figures, which are here because a device has no library for them.

Pictures are (h, w, 3) in [0, 1].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CODES_NAME, PICTURE_NAME = "codes", "picture"  # ends of the graph: (1, S, d) int8 -> (1, 3, h, w) float32 in [0, 1]
PSNR_MAX_DB = 100.0  # of equal pictures
RECORDS_NAME = "decoders.json"  # see `Decoders`

_WINDOW, _SIGMA = 11, 1.5  # SSIM's Gaussian window, pixels (Wang et al. 2004)
_C1, _C2 = 0.01**2, 0.03**2
_SIDE_PIXELS = 256.0  # larger pictures are averaged down to about this side first, as in Wang's own code

Doubles = NDArray[np.float64]
Picture = NDArray[np.floating]


@dataclass(frozen=True)
class Decoder:
    """One trained decoder: the cut and the strength it was trained for, and its figures on held-out public pictures.

    Figures are means over `images` pictures that it never saw, released as a device does. `ridge_psnr_db` is a linear
    attacker's on the same, `colour_psnr_db` and `colour_ssim` are what one colour for all pictures gets.
    """

    onnx: str
    cut: int
    kappa: float
    alpha: float
    steps: int
    learnt_images: int
    images: int
    psnr_db: float
    ssim: float
    ridge_psnr_db: float
    colour_psnr_db: float
    colour_ssim: float


@dataclass(frozen=True)
class Decoders:
    """What whoever trains decoders tells whoever signs the package, as JSON beside their files."""

    decoders: tuple[Decoder, ...]


def psnr_db(true: Picture, found: Picture) -> float:
    """10 log10(1 / MSE) in dB, at most 100."""
    error = float(np.square(np.subtract(true, found, dtype=np.float64)).mean())
    return min(PSNR_MAX_DB, -10.0 * math.log10(error)) if error > 0.0 else PSNR_MAX_DB


def ssim(true: Picture, found: Picture) -> float:
    """Structural similarity (Wang et al. 2004), mean over colours: 1 for equal pictures.

    The window has 11 pixels, less where a picture is smaller than that. Raises: ValueError below 3 pixels a side.
    """
    x, y = (_averaged_down(np.asarray(each, np.float64)) for each in (true, found))
    if min(x.shape[:2]) < 3:
        raise ValueError(f"pictures should have sides of 3 pixels or more, found {x.shape[:2]}")
    size = min(_WINDOW, min(x.shape[:2]) // 2 * 2 - 1)
    mean_x, mean_y = _blurred(x, size), _blurred(y, size)
    var_x, var_y = (_blurred(a * a, size) - mean**2 for a, mean in ((x, mean_x), (y, mean_y)))
    shared = _blurred(x * y, size) - mean_x * mean_y
    structure = (2.0 * shared + _C2) / (var_x + var_y + _C2)
    return float((structure * (2.0 * mean_x * mean_y + _C1) / (mean_x**2 + mean_y**2 + _C1)).mean())


def _averaged_down(picture: Doubles) -> Doubles:
    factor = max(1, round(min(picture.shape[:2]) / _SIDE_PIXELS))
    rows, columns = (side // factor for side in picture.shape[:2])
    cells = picture[: rows * factor, : columns * factor].reshape(rows, factor, columns, factor, 3)
    averaged: Doubles = cells.mean(axis=(1, 3))
    return averaged


def _blurred(picture: Doubles, size: int) -> Doubles:
    """Means under the Gaussian window wherever it fits whole (h - size + 1, w - size + 1, 3)."""
    places = np.arange(size) - (size - 1) / 2.0
    window = np.exp(-(places**2) / (2.0 * _SIGMA**2))
    window /= window.sum()
    for axis in (0, 1):
        picture = np.lib.stride_tricks.sliding_window_view(picture, size, axis) @ window
    return picture
