"""Noise that is a function of a secret and of what it protects: keys, draws, weight noise and the class permutation.

Who holds which secret, and when noise is applied, is the device's part (`edge_runtime`).

The same release repeats bit for bit, on every platform and numpy version: bits come from Philox, a counter-based
generator, and every real number after that from IEEE `+ - * / sqrt` and `frexp` alone, so averaging repeated releases
gains nothing. Sums whose order numpy leaves open are taken over integers or by `math.fsum`, which is exact.

No differential privacy is claimed: sensitivity is unbounded, and draws are floating-point numbers.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import struct
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CODE_MAX = 127
CHUNK = 1 << 14  # draws at a time: temporaries stay in the cache, and memory does not grow with the layer

Doubles = npt.NDArray[np.float64]


# Keys


def derive_key(secret: bytes, *parts: bytes | str | int | float) -> bytes:
    """32 bytes: HMAC-SHA256 of the parts, each with its type and length in front, so no two lists of parts collide."""
    return hmac.new(secret, b"".join(map(_tagged, parts)), hashlib.sha256).digest()


def _tagged(part: bytes | str | int | float) -> bytes:
    match part:
        case bytes():
            tag, data = b"b", part
        case str():
            tag, data = b"s", part.encode()
        case int():
            tag, data = b"i", part.to_bytes(part.bit_length() // 8 + 1, "little", signed=True)
        case float():
            tag, data = b"f", struct.pack("<d", part)
        case _:
            raise TypeError(f"a key part must be bytes, str, int or float, found {type(part).__name__}")
    return tag + struct.pack("<I", len(data)) + data


def noise_key(secret: bytes, pixel_digest: bytes, package_digest: bytes, cut: int, kind: str, scale: float) -> bytes:
    """The key of one image's feature noise.

    Releases for training and for inference are the same draw. The scale is part of the key, because two scales of one
    draw would give the signal by subtraction.
    """
    return derive_key(secret, "noise", "features", pixel_digest, package_digest, cut, kind, float(scale))


def wire_id(secret: bytes, pixel_digest: bytes) -> bytes:
    """The 16 bytes that name a sample on the wire: stable, opaque, and no test of membership without the secret."""
    return derive_key(secret, "wire id", pixel_digest)[:16]


def class_list_hash(site_secret: bytes, classes: Sequence[str]) -> bytes:
    """32 bytes on which a site's devices agree when their class lists are equal, order included, names as NFC."""
    return derive_key(site_secret, "class list", *(unicodedata.normalize("NFC", name) for name in classes))


def permutation(secret: bytes, count: int, *parts: bytes | str | int | float) -> npt.NDArray[np.int64]:
    """A keyed permutation of 0..count-1; entry i is the number that i is sent as."""
    return np.argsort(random_bits(derive_key(secret, "permutation", *parts), count), kind="stable").astype(np.int64)


# Draws


def random_bits(key: bytes, count: int) -> npt.NDArray[np.uint64]:
    """`count` words of Philox4x64-10, the key's first 16 bytes as its key (little-endian), counters 1, 2, 3, ..."""
    return _Stream(key).bits(count)


def uniform(key: bytes, count: int) -> Doubles:
    """`count` draws from (0, 1), both ends excluded: (k + 1/2) / 2^52, exact."""
    return _Stream(key).uniform(count)


def laplace(key: bytes, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Laplace noise of scale b = 1 (mean magnitude 1, standard deviation sqrt 2), C order."""
    return _draw(key, shape, _laplace_quantile)


def normal(key: bytes, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Standard normal noise, C order."""
    return _draw(key, shape, _normal_quantile)


class _Stream:
    """One key's uniform draws, taken piece by piece."""

    def __init__(self, key: bytes) -> None:
        words = np.frombuffer(key, "<u8", count=2).astype(np.uint64)
        self._philox = np.random.Philox(counter=0, key=words)  # numpy counts up before it draws

    def bits(self, count: int) -> npt.NDArray[np.uint64]:
        return self._philox.random_raw(count)

    def uniform(self, count: int) -> Doubles:
        # 52 bits and a half: k + 1/2 fits the 53-bit significand, so 0 and 1 cannot come out and 1 - u is exact.
        u: Doubles = ((self.bits(count) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
        return u


def _draw(key: bytes, shape: tuple[int, ...], quantile: Callable[[Doubles], Doubles]) -> npt.NDArray[np.float32]:
    stream = _Stream(key)
    drawn = np.empty(math.prod(shape), np.float32)
    for piece in _chunks(drawn.size):
        drawn[piece] = quantile(stream.uniform(piece.stop - piece.start))
    return drawn.reshape(shape)


def _chunks(size: int) -> Iterator[slice]:
    for start in range(0, size, CHUNK):
        yield slice(start, min(start + CHUNK, size))


def _laplace_quantile(u: Doubles) -> Doubles:
    return np.copysign(natural_log(2.0 * np.minimum(u, 1.0 - u)), u - 0.5)


# log(m) = 2 atanh(s) = 2 s (1 + s^2/3 + s^4/5 + ...) with s = (m - 1) / (m + 1). For m in [sqrt 1/2, sqrt 2] s^2 is at
# most 0.0295, and the first term left out, s^22/23, is below 1e-18.
_ATANH_SERIES = tuple(1.0 / (2 * k + 1) for k in range(11))
_LN_2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476


def natural_log(x: Doubles) -> Doubles:
    """Natural logarithm of positive normal numbers, relative error below 1e-14, the same bits everywhere."""
    significand, exponent = np.frexp(x)
    below = significand < _SQRT_HALF
    significand = np.where(below, 2.0 * significand, significand)
    s: Doubles = (significand - 1.0) / (significand + 1.0)
    logarithm: Doubles = (exponent - below) * _LN_2 + 2.0 * s * _polynomial(_ATANH_SERIES, s * s)
    return logarithm


# M. J. Wichura, "Algorithm AS 241: The Percentage Points of the Normal Distribution", Applied Statistics 37 (1988),
# routine PPND16: three ratios of polynomials, lowest degree first, relative error about 1e-16.
# fmt: off
_CENTRE = (
    (3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
     4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3),
    (1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
     2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3),
)
_TAIL = (
    (1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
     1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4),
    (1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
     1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9),
)
_FAR_TAIL = (
    (6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
     2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7),
    (1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
     7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15),
)
# fmt: on


def _normal_quantile(u: Doubles) -> Doubles:
    q = u - 0.5
    r = 0.180625 - q * q
    quantile = q * _polynomial(_CENTRE[0], r) / _polynomial(_CENTRE[1], r)
    outside = np.flatnonzero(np.abs(q) > 0.425)  # 15 % of the draws
    tail = u[outside]
    r = np.sqrt(-natural_log(np.minimum(tail, 1.0 - tail)))
    far = r > 5.0  # one draw in 36 thousand million
    magnitude = _polynomial(_TAIL[0], r - 1.6) / _polynomial(_TAIL[1], r - 1.6)
    if far.any():
        beyond = r[far] - 5.0
        magnitude[far] = _polynomial(_FAR_TAIL[0], beyond) / _polynomial(_FAR_TAIL[1], beyond)
    quantile[outside] = np.copysign(magnitude, q[outside])
    return quantile


def _polynomial(coefficients: tuple[float, ...], x: Doubles) -> Doubles:
    value = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value *= x
        value += coefficient
    return value


# Weight noise


@dataclass(frozen=True)
class NoisyWeights:
    """New codes of the layer's shape, how many differ from the shipped ones, and how many were clipped to +-127."""

    codes: npt.NDArray[np.int8]
    changed: int
    saturated: int


def noisy_weights(
    codes: npt.NDArray[np.int8], scales: npt.NDArray[np.float32], channel_axis: int, alpha: float, key: bytes
) -> NoisyWeights:
    """Weight noise of split adaptation (Eq. 12) on the weights as shipped, kept in INT8 by stochastic rounding.

    The law is w' = n_x w + n_plus with n_x ~ N(1, alpha) and n_plus ~ N(0, alpha std(w)), the standard deviations given
    and std(w) that of the whole dequantized layer. The two normals add up to one, w' ~ N(w, alpha^2 (w^2 + std(w)^2)),
    which is what is drawn. Then code' = floor(w' / scale + u), u uniform: on average the noise survives the grid
    unchanged. Scales stay as shipped; alpha 0 gives the codes as they are.

    Args:
        codes: the layer, any shape; draws follow its C order.
        scales: (C,) per-channel scales along `channel_axis`.
        alpha: relative strength.
        key: from `derive_key`, one per device, package and layer.
    """
    if alpha == 0.0:
        return NoisyWeights(codes.copy(), changed=0, saturated=0)
    along_channels = [1] * codes.ndim
    along_channels[channel_axis] = -1
    std = _layer_std_in_steps(codes, scales, channel_axis).reshape(along_channels)
    std_of_code = np.broadcast_to(std, codes.shape).flat  # sliced below, never held for the whole layer
    shipped = codes.reshape(-1)
    noised = np.empty_like(shipped)
    normals, uniforms = _Stream(derive_key(key, "weights")), _Stream(derive_key(key, "rounding"))
    saturated = 0
    for piece in _chunks(shipped.size):
        count = piece.stop - piece.start
        code = shipped[piece].astype(np.float64)
        spread = np.sqrt(code * code + std_of_code[piece] ** 2)
        moved = np.floor(code + alpha * spread * _normal_quantile(normals.uniform(count)) + uniforms.uniform(count))
        saturated += int(np.count_nonzero(np.abs(moved) > CODE_MAX))
        noised[piece] = np.clip(moved, -CODE_MAX, CODE_MAX)
    return NoisyWeights(noised.reshape(codes.shape), int(np.count_nonzero(noised != shipped)), saturated)


def _layer_std_in_steps(codes: npt.NDArray[np.int8], scales: npt.NDArray[np.float32], channel_axis: int) -> Doubles:
    """std(w) of the dequantized layer divided by each channel's scale, (C,); exact sums, so alike everywhere."""
    sums, squares = _channel_sums(np.moveaxis(codes, channel_axis, 0))
    scale = scales.astype(np.float64)
    mean = math.fsum(scale * sums) / codes.size
    variance = math.fsum(scale * scale * squares) / codes.size - mean * mean
    std = math.sqrt(max(variance, 0.0))
    return np.divide(std, scale, out=np.zeros_like(scale), where=scale > 0.0)  # scale 0: no step could carry noise


def _channel_sums(channels: npt.NDArray[np.int8]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Per channel (first axis) the sum of codes and the sum of squared codes."""
    others = tuple(range(1, channels.ndim))
    sums = channels.sum(axis=others, dtype=np.int64)
    squares = np.square(channels, dtype=np.int16).sum(axis=others, dtype=np.int64)
    return sums, squares


def corrected_bias(
    bias: npt.NDArray[np.float32],
    shift: npt.NDArray[np.float32],
    old_codes: npt.NDArray[np.int8],
    new_codes: npt.NDArray[np.int8],
    scales: npt.NDArray[np.float32],
    channel_axis: int,
) -> npt.NDArray[np.float32]:
    """The folded bias after the weights W became W': b' = b + shift @ (W' - W).

    The layer computes (x - shift) @ W + b, where b already holds shift @ W; that fold must follow the weights.

    Args:
        bias, scales: (C,). shift: (K,).
        old_codes, new_codes: (K, C) for channel axis 1, (C, K) for channel axis 0.
    """
    if channel_axis == 0:
        old_codes, new_codes = old_codes.T, new_codes.T
    lost = np.zeros(len(bias), np.float64)  # shift @ (W - W') in steps; subtracting +0.0 leaves even a bias of -0.0
    rows = max(1, CHUNK // len(bias))
    for start in range(0, len(shift), rows):
        piece = slice(start, start + rows)
        lost += shift[piece].astype(np.float64) @ np.subtract(old_codes[piece], new_codes[piece], dtype=np.float64)
    return (bias - lost * scales).astype(np.float32)
