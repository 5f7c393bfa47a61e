"""What happens to tokens between the frontend and the wire: noise, quantization, patch retrieval and its rebuild.

Drawing the noise is `contract.keyed_noise`'s part, framing the codes is `contract.codec`'s.

Tokens of one image are (T, d): `prefix` tokens (class token, registers), then the patches in row-major order. Prefix
and patch tokens have statistics of their own, so per-channel figures come as (2, d): row 0 prefix, row 1 patch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from contract.errors import DataError, EngineError
from contract.keyed_noise import random_bits

CODE_MAX = 127
NOISE_HEADROOM = 8.0  # wire steps leave room for this many noise scales above the largest token
SOURCES_MAX = 65535  # a source index is two bytes on the wire
TIE_COSINE = 1e-6  # cosines closer than this are equal: BLAS rounds differently from machine to machine
SIMILARITY_BLOCK_BYTES = 16 << 20  # similarities held at once

Kept = Literal["all", "checkerboard", "quarter", "none"]  # which patch tokens are sent
KEPT: tuple[Kept, ...] = get_args(Kept)


@dataclass(frozen=True)
class TokenLayout:
    """Tokens of one image: `prefix` of them, then a grid (rows, columns) of patches, each `dim` wide."""

    prefix: int
    grid: tuple[int, int]
    dim: int

    @property
    def patches(self) -> int:
        """N, the number of patch tokens."""
        return self.grid[0] * self.grid[1]

    @property
    def count(self) -> int:
        """T = prefix + N."""
        return self.prefix + self.patches


@dataclass(frozen=True)
class Statistics:
    """Standard deviation and largest magnitude per channel (d each) of the server's INT8 tokens before noise."""

    sigma_prefix: tuple[float, ...]
    sigma_patch: tuple[float, ...]
    absmax_prefix: tuple[float, ...]
    absmax_patch: tuple[float, ...]


@dataclass(frozen=True)
class SentRule:
    """Which patch tokens are sent, and how much of the patches' noise the prefix tokens get."""

    kept: Kept = "all"
    prefix_share: float = 1.0


def kept_patches(grid: tuple[int, int], kept: Kept) -> npt.NDArray[np.int64]:
    """The patch positions (K,) that are sent, ascending: the same for every image, so that nothing need be said.

    `checkerboard` sends every second patch of each row, `quarter` every second one of every second row, `none` the
    prefix tokens alone.
    """
    row, column = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    chosen = {
        "all": np.ones(len(row), np.bool_),
        "checkerboard": (row + column) % 2 == 0,
        "quarter": (row % 2 == 0) & (column % 2 == 0),
        "none": np.zeros(len(row), np.bool_),
    }[kept]
    return np.flatnonzero(chosen).astype(np.int64)


def sent_layout(layout: TokenLayout, kept: Kept) -> TokenLayout:
    """The tokens of one image on the wire: the prefix, then the kept patches as one row."""
    return TokenLayout(layout.prefix, (1, len(kept_patches(layout.grid, kept))), layout.dim)


def keep_tokens(tokens: npt.NDArray[Any], layout: TokenLayout, kept: Kept) -> npt.NDArray[Any]:
    """Of tokens (..., T, d) those that are sent, (..., prefix + K, d)."""
    if kept == "all":
        return tokens
    chosen: npt.NDArray[Any] = tokens[..., sent_places(layout, kept), :]
    return chosen


def sent_places(layout: TokenLayout, kept: Kept) -> npt.NDArray[np.int64]:
    """Where the sent tokens stand among all T: (prefix + K,)."""
    return np.concatenate([np.arange(layout.prefix), layout.prefix + kept_patches(layout.grid, kept)])


def noise_scales(statistics: Statistics, kappa: float, prefix_share: float = 1.0) -> npt.NDArray[np.float32]:
    """Laplace scales b = kappa sigma_c as (2, d); prefix tokens get `prefix_share` of it."""
    return (_strengths(kappa, prefix_share) * _two_rows(statistics.sigma_prefix, statistics.sigma_patch)).astype(
        np.float32
    )


def wire_steps(statistics: Statistics, kappa: float, prefix_share: float = 1.0) -> npt.NDArray[np.float32]:
    """Wire steps delta_c = (absmax_c + 8 b_c) / 127 as (2, d), all positive; alike on both machines."""
    sigma = _two_rows(statistics.sigma_prefix, statistics.sigma_patch)
    absmax = _two_rows(statistics.absmax_prefix, statistics.absmax_patch)
    headroom = NOISE_HEADROOM * _strengths(kappa, prefix_share)
    steps: npt.NDArray[np.float32] = ((absmax + headroom * sigma) / CODE_MAX).astype(np.float32)
    steps[steps < np.finfo(np.float32).tiny] = np.finfo(np.float32).tiny  # a channel that is always zero still divides
    return steps


def _strengths(kappa: float, prefix_share: float) -> npt.NDArray[np.float64]:
    """kappa of prefix and patch tokens (2, 1)."""
    return np.array([[kappa * prefix_share], [kappa]], np.float64)


def _two_rows(prefix: tuple[float, ...], patch: tuple[float, ...]) -> npt.NDArray[np.float64]:
    return np.array([prefix, patch], np.float64)


def add_noise(
    tokens: npt.NDArray[np.float32], unit_noise: npt.NDArray[np.float32], scales: npt.NDArray[np.float32], prefix: int
) -> npt.NDArray[np.float32]:
    """Tokens (..., T, d) plus unit noise of the same shape times the scales (2, d) of prefix and patch channels."""
    noisy = np.empty_like(tokens)
    for row, part in _parts(prefix):
        np.multiply(unit_noise[part], scales[row], out=noisy[part])
        noisy[part] += tokens[part]
    return noisy


def quantize(
    tokens: npt.NDArray[np.float32], steps: npt.NDArray[np.float32], prefix: int
) -> tuple[npt.NDArray[np.int8], int]:
    """Codes clamp(round(x / step), -127, 127) of tokens (..., T, d), and how many values were clamped.

    Raises:
        EngineError: a token is not finite.
    """
    codes = np.empty(tokens.shape, np.int8)
    saturated = 0
    for row, part in _parts(prefix):
        _check_finite(tokens[part])
        with np.errstate(over="ignore"):  # a token in a channel that was always zero: clamped and counted
            scaled = tokens[part] / steps[row]
        np.rint(scaled, out=scaled)
        saturated += int(np.count_nonzero(np.abs(scaled) > CODE_MAX))
        codes[part] = np.clip(scaled, -CODE_MAX, CODE_MAX, out=scaled)
    return codes, saturated


def dequantize(codes: npt.NDArray[np.int8], steps: npt.NDArray[np.float32], prefix: int) -> npt.NDArray[np.float32]:
    """Tokens (..., T, d) from codes: code times step."""
    tokens = np.empty(codes.shape, np.float32)
    for row, part in _parts(prefix):
        np.multiply(codes[part], steps[row], out=tokens[part])
    return tokens


def _check_finite(tokens: npt.NDArray[np.float32]) -> None:
    if not np.isfinite(tokens).all():
        raise EngineError(
            f"tokens must be finite, found {np.count_nonzero(~np.isfinite(tokens))} values that are not",
            "run edge-doctor, which compares the engine with the package's golden vectors",
        )


def _parts(prefix: int) -> tuple[tuple[int, tuple[Any, ...]], tuple[int, tuple[Any, ...]]]:
    return (0, (..., slice(None, prefix), slice(None))), (1, (..., slice(prefix, None), slice(None)))


def retrieval_sources(
    features: npt.NDArray[np.float16] | npt.NDArray[np.float32],
    on_progress: Callable[[int], object] | None = None,
    positions: npt.NDArray[np.int64] | None = None,
) -> npt.NDArray[np.uint16]:
    """For each image and position the other image whose token there is most alike (split adaptation, patch retrieval).

    Args:
        features: clean patch tokens (n, N, d); may be a memory map, of which one position is read at a time.
        on_progress: called with 1 after each position.
        positions: the K that are looked at; all N by default.

    Returns:
        (n, K): argmax over j != i of cos(x[i, p], x[j, p]). Ties, which is cosines within 1e-6, go to the lowest j. A
        single image is its own source.

    Raises:
        DataError: more images than two bytes can count.
        EngineError: a token is not finite.
    """
    count = len(features)
    chosen = np.arange(features.shape[1]) if positions is None else positions
    check_source_count(count)
    sources = np.zeros((count, len(chosen)), np.uint16)
    for column, position in enumerate(chosen if count > 1 else ()):
        sources[:, column] = _nearest_others(_unit_rows(features[:, position]))
        if on_progress is not None:
            on_progress(1)
    return sources


def check_source_count(count: int) -> None:
    """Raises: DataError when `count` images are more than source indices can tell apart."""
    if count > SOURCES_MAX:
        raise DataError(
            f"patch retrieval takes at most {SOURCES_MAX} images, found {count}",
            "split the images over several devices or runs",
        )


def _unit_rows(tokens: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Rows (n, d) at length 1; a row of zeros stays."""
    rows = np.array(tokens, np.float32)
    largest = np.abs(rows).max(axis=1, keepdims=True)
    _check_finite(largest)
    rows /= np.maximum(largest, np.finfo(np.float32).tiny)  # before squaring, which could overflow
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return rows


def _nearest_others(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.intp]:
    """For each unit row (n, d) the lowest index of the most similar other row; blocks keep memory below n * n."""
    count = len(rows)
    nearest = np.empty(count, np.intp)
    block = max(1, SIMILARITY_BLOCK_BYTES // (4 * count))
    for start in range(0, count, block):
        stop = min(start + block, count)
        cosines = rows[start:stop] @ rows.T
        cosines[np.arange(stop - start), np.arange(start, stop)] = -np.inf  # never the image itself
        ties = cosines >= cosines.max(axis=1, keepdims=True) - np.float32(TIE_COSINE)
        nearest[start:stop] = ties.argmax(axis=1)  # the first True
    return nearest


def augmentation_positions(seed: int, sample_id: bytes, run: int, patches: int, replaced: int) -> npt.NDArray[np.int64]:
    """The `replaced` distinct patch positions, ascending, that augmentation run `run` of one sample replaces.

    Public by design: device and server derive the same positions from the seed in the welcome message.
    """
    key = hashlib.sha256(b"cutlayer-positions-1:%d:%d:" % (seed, run) + sample_id).digest()
    shuffled = np.argsort(random_bits(key, patches), kind="stable")
    return np.sort(shuffled[:replaced]).astype(np.int64)


def token_origins(
    sources: npt.NDArray[np.uint16], rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], prefix: int
) -> npt.NDArray[np.int64]:
    """The sample whose token stands at each place of each augmented copy: the one law of patch retrieval.

    Args:
        sources: (n, N) from `retrieval_sources`.
        rows: (B,) the samples to copy.
        positions: (B, P) the patch positions (0 is the first patch) that each copy takes from its source images.
        prefix: how many leading tokens are no patches and never replaced.

    Returns:
        (B, prefix + N).
    """
    origins = np.repeat(rows.astype(np.int64)[:, None], prefix + sources.shape[1], axis=1)
    origins[np.arange(len(rows))[:, None], prefix + positions] = sources[rows[:, None], positions]
    return origins


def augment(
    codes: npt.NDArray[np.int8],
    sources: npt.NDArray[np.uint16],
    rows: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    prefix: int,
) -> npt.NDArray[np.int8]:
    """Copies (B, T, d) of some samples in which chosen patches come from their source images, noise included.

    Codes (n, T, d) are the noisy tokens of all samples in upload order; the rest is as for `token_origins`. The
    server's rebuild follows the same law, hence equals the device's own materialisation bit for bit.
    """
    return codes[token_origins(sources, rows, positions, prefix), np.arange(codes.shape[1])]
