"""Weight noise written into the bytes of a quantized ONNX file: the one law for devices, tuning and attacks.

Where the codes lie is recorded in the signed manifest, so neither onnx nor torch is needed. The draw itself is
contract.keyed_noise; which secret keys it is the caller's affair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from contract.errors import ManifestError
from contract.keyed_noise import corrected_bias, noisy_weights
from contract.manifest import WeightRecord


def noised_onnx(
    data: bytes | bytearray | memoryview,
    weights: Sequence[WeightRecord],
    alpha: float,
    key_for: Callable[[str], bytes],
) -> tuple[bytearray, float, int]:
    """Copy an ONNX file with noise of relative strength `alpha` on every recorded weight (SA Eq. 12).

    The noise acts on the dequantized weights as shipped and is rounded back stochastically to the shipped scales.
    Where a layer's input was shifted at export, its float bias follows the noised codes, so that the noise meets
    the layer's true input and not the constant that the fold put there.

    Returns the new file, the share of changed codes in [0, 1] and the number of codes clipped to +-127.
    `key_for(record.name)` gives the 32-byte key of a layer's draw. alpha = 0 returns the same bytes.

    Raises ManifestError when a record points outside the file.
    """
    noised = bytearray(data)
    changed = saturated = total = 0
    for record in weights:
        codes = _int8(noised, record)
        scales = _floats(noised, record, "scales", record.scales_offset, _channels(record))
        noisy = noisy_weights(codes, scales, record.channel_axis, alpha, key_for(record.name))
        if record.shift_offset is not None and record.bias_offset is not None:
            shift = _floats(noised, record, "shift", record.shift_offset, codes.size // _channels(record))
            bias = _floats(noised, record, "bias", record.bias_offset, _channels(record))
            bias = corrected_bias(bias, shift, codes, noisy.codes, scales, record.channel_axis)
            _write(noised, record.bias_offset, bias.astype("<f4").tobytes())
        _write(noised, record.codes_offset, noisy.codes.tobytes())
        changed += noisy.changed
        saturated += noisy.saturated
        total += codes.size
    return noised, changed / total if total else 0.0, saturated


def _channels(record: WeightRecord) -> int:
    return record.shape[record.channel_axis]


def _int8(data: bytearray, record: WeightRecord) -> NDArray[np.int8]:
    raw = _part(data, record, "codes", record.codes_offset, math.prod(record.shape))
    return np.frombuffer(raw, np.int8).reshape(record.shape)


def _floats(data: bytearray, record: WeightRecord, part: str, offset: int, count: int) -> NDArray[np.float32]:
    return np.frombuffer(_part(data, record, part, offset, 4 * count), "<f4").astype(np.float32)


def _part(data: bytearray, record: WeightRecord, part: str, offset: int, size_bytes: int) -> bytes:
    """A copy: a view would pin the bytearray's buffer while it is written."""
    if offset < 0 or offset + size_bytes > len(data):
        raise ManifestError(
            f"the {part} of layer {record.name} should lie at bytes {offset} to {offset + size_bytes}, "
            f"but the ONNX file has {len(data)} bytes",
            "the package is damaged or its manifest belongs to another file: fetch the package again",
        )
    return bytes(memoryview(data)[offset : offset + size_bytes])


def _write(data: bytearray, offset: int, raw: bytes) -> None:
    data[offset : offset + len(raw)] = raw
