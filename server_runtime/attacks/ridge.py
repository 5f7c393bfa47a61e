"""Ridge decoder: one linear map from a noisy token to its own image patch, learnt on public images and the known noise.

The quick yardstick of noise.md. It flatters a defence: a trained transformer decoder reads 4 to 7 dB more. Running a
frontend is left to the caller; here are the noise law, the fit and the figures, in numpy and float64.

Symbols: m tokens, d channels of a token, p = 3 ph pw values of a patch, N patches, images (n, h, w, 3) in [0, 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contract.tokens import Statistics, add_noise, dequantize, noise_scales, quantize, wire_steps

STRENGTHS = tuple(float(10.0**power) for power in range(-7, 3))  # of the penalty, on channels of variance 1

Doubles = NDArray[np.float64]


class Moments:
    """Sums over pairs of token and patch: all that a fit or a held-out error needs, whatever their number."""

    def __init__(self, channels: int, values: int) -> None:
        self.count = 0
        self.token_sum, self.patch_sum = np.zeros(channels), np.zeros(values)
        self.token_square = np.zeros((channels, channels))
        self.cross = np.zeros((channels, values))
        self.patch_square = 0.0  # sum of all squared values

    def add(self, tokens: NDArray[np.floating], patches: NDArray[np.floating]) -> None:
        """Tokens (m, d) and the patches (m, p) that they stand for."""
        x, y = np.asarray(tokens, np.float64), np.asarray(patches, np.float64)
        self.count += len(x)
        self.token_sum += x.sum(axis=0)
        self.patch_sum += y.sum(axis=0)
        self.token_square += x.T @ x
        self.cross += x.T @ y
        self.patch_square += float(np.vdot(y, y))

    def mean_square_error(self, decoder: RidgeDecoder) -> float:
        """Mean over values of (patch - decoded)^2 on these pairs, before clipping."""
        w, b, n = decoder.weight, decoder.offset, self.count
        decoded_square = np.vdot(w, self.token_square @ w) + 2 * self.token_sum @ w @ b + n * b @ b
        shared = np.vdot(w, self.cross) + b @ self.patch_sum
        return float((self.patch_square - 2 * shared + decoded_square) / (n * len(b)))


@dataclass(frozen=True)
class RidgeDecoder:
    """patch = token @ weight + offset; `strength` is the penalty that was chosen."""

    weight: Doubles  # (d, p)
    offset: Doubles  # (p,)
    strength: float

    def decode(self, tokens: NDArray[np.floating]) -> Doubles:
        """Patches (..., p) in [0, 1] of tokens (..., d)."""
        patches: Doubles = np.clip(np.asarray(tokens, np.float64) @ self.weight + self.offset, 0.0, 1.0)
        return patches


def fit(train: Moments, held: Moments, strengths: Sequence[float] = STRENGTHS) -> RidgeDecoder:
    """The decoder whose penalty is best on `held`, pairs of other public images. Raises: ValueError without pairs."""
    if train.count < 2 or held.count < 1:
        raise ValueError(f"a ridge needs pairs to fit and to choose on, found {train.count} and {held.count}")
    mean_x, mean_y = train.token_sum / train.count, train.patch_sum / train.count
    covariance = train.token_square / train.count - np.outer(mean_x, mean_x)
    spread = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    spread[spread == 0.0] = 1.0  # a channel that never varies says nothing, at any penalty
    values, vectors = np.linalg.eigh(covariance / np.outer(spread, spread))
    projected = vectors.T @ ((train.cross / train.count - np.outer(mean_x, mean_y)) / spread[:, None])  # (d, p)
    decoders = []
    for strength in strengths:
        weight = (vectors / (np.maximum(values, 0.0) + strength)) @ projected / spread[:, None]
        decoders.append(RidgeDecoder(weight, mean_y - mean_x @ weight, strength))
    return min(decoders, key=held.mean_square_error)


def released(
    tokens: NDArray[np.float32], statistics: Statistics, kappa: float, prefix: int, rng: np.random.Generator
) -> NDArray[np.float32]:
    """Tokens (n, T, d) as a server receives them: Laplace noise of strength kappa, wire codes, dequantized."""
    noisy = add_noise(
        tokens, rng.laplace(size=tokens.shape).astype(np.float32), noise_scales(statistics, kappa), prefix
    )
    steps = wire_steps(statistics, kappa)
    codes, _ = quantize(noisy, steps, prefix)
    return dequantize(codes, steps, prefix)


def patches_of(images: NDArray[np.floating], grid: tuple[int, int]) -> NDArray[np.floating]:
    """Patches (n, N, p) of images (n, h, w, 3), row by row as the tokens are."""
    n, height, width, _ = images.shape
    rows, columns = grid
    parts = images.reshape(n, rows, height // rows, columns, width // columns, 3)
    return parts.transpose(0, 1, 3, 2, 4, 5).reshape(n, rows * columns, -1)


def images_of(patches: NDArray[np.floating], grid: tuple[int, int], size: tuple[int, int]) -> NDArray[np.floating]:
    """The inverse of `patches_of`; `size` is (h, w)."""
    rows, columns = grid
    high, wide = size[0] // rows, size[1] // columns
    parts = patches.reshape(len(patches), rows, columns, high, wide, 3)
    return parts.transpose(0, 1, 3, 2, 4, 5).reshape(len(patches), *size, 3)


def mean_psnr_db(images: NDArray[np.floating], found: NDArray[np.floating]) -> float:
    """Mean over images of 10 log10(1 / MSE); a perfect image counts as 100 dB."""
    error = np.square(np.asarray(images, np.float64) - found).reshape(len(images), -1).mean(axis=1)
    return float(np.mean(-10.0 * np.log10(np.maximum(error, 1e-10))))


def mean_colour(moments: Moments) -> Doubles:
    """The best guess without any token: the public images' mean colour (3,)."""
    colour: Doubles = (moments.patch_sum / moments.count).reshape(-1, 3).mean(axis=0)
    return colour
