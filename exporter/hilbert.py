"""Hilbert-transformed pictures: the out-of-distribution half of the calibration and tuning set (SA 1.1 step 2).

Which pictures are transformed, and what for, is left to exporter.public_set and its callers.

The transform turns the phase of every frequency by a quarter and keeps its amplitude: I' = IFFT2(m FFT2(I)) with
m = -i sgn, and m = 1 where the sign is zero, which is what the paper's amplitude replacement restores there (the mean
above all). In two dimensions the sign is that of a half-plane: of the horizontal frequency, and of the vertical one
where the horizontal is its own mirror image. A sign of the rows alone leaves 0.72 of the correlation, this one 0.13.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
Pixels = NDArray[np.uint8]


def transform(channels: Doubles) -> Doubles:
    """Hilbert transform over the last two axes (..., h, w), before any clipping; same shape, real."""
    turned = np.fft.ifft2(np.fft.fft2(channels) * _turn(*channels.shape[-2:]))
    return np.ascontiguousarray(turned.real)


def transformed_pixels(pixels: Pixels) -> Pixels:
    """Pictures (B, h, w, 3), each channel transformed on [0, 1] and clipped, as pictures again."""
    channels = pixels.astype(np.float64).transpose(0, 3, 1, 2) / 255.0
    turned = np.clip(transform(channels), 0.0, 1.0)
    return np.rint(255.0 * turned).astype(np.uint8).transpose(0, 2, 3, 1)


def _turn(height: int, width: int) -> NDArray[np.complex128]:
    """The factor m (h, w) of every frequency."""
    across = np.broadcast_to(_signs(width), (height, width))
    down = np.broadcast_to(_signs(height)[:, None], (height, width))
    sign = np.where(across != 0, across, down)
    return np.where(sign != 0, -1j * sign, 1.0)


def _signs(size: int) -> Doubles:
    """Sign of each frequency of a transform of `size` values; 0 for the constant and for Nyquist's, own mirrors."""
    frequency = np.fft.fftfreq(size)
    frequency[np.isclose(np.abs(frequency), 0.5)] = 0.0
    return np.sign(frequency)
