"""The file here is a byte string with arrays at odd offsets: the law needs no more than the manifest's records."""

from dataclasses import replace

import numpy as np
import pytest

from contract.errors import ManifestError
from contract.keyed_noise import corrected_bias, derive_key, noisy_weights
from contract.manifest import WeightRecord
from contract.onnx_weights import noised_onnx

LINEAR = WeightRecord("blocks.0.mlp.fc2", (24, 8), 1, 7, 211, 251, 351)
CONV = WeightRecord("patch_embed.proj", (8, 3, 2, 2), 0, 400, 500, None, None)
SIZE = 540


def _key(name: str) -> bytes:
    return derive_key(b"s" * 32, "weights", name)


def _file() -> bytes:
    rng = np.random.default_rng(0)
    data = bytearray(rng.bytes(SIZE))
    parts = (
        (LINEAR.codes_offset, rng.integers(-127, 128, (24, 8)).astype(np.int8)),
        (LINEAR.scales_offset, rng.uniform(0.01, 0.1, 8).astype("<f4")),
        (LINEAR.shift_offset, np.full(24, 2.5, "<f4")),
        (LINEAR.bias_offset, rng.normal(size=8).astype("<f4")),
        (CONV.codes_offset, rng.integers(-127, 128, (8, 3, 2, 2)).astype(np.int8)),
        (CONV.scales_offset, rng.uniform(0.01, 0.1, 8).astype("<f4")),
    )
    for offset, values in parts:
        data[offset : offset + values.nbytes] = values.tobytes()
    return bytes(data)


def _array(data: bytes, offset: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.frombuffer(data, dtype, int(np.prod(shape)), offset).reshape(shape)


def test_the_recorded_arrays_follow_the_noise_law_and_nothing_else_changes() -> None:
    data = _file()
    noised, share, saturated = noised_onnx(data, (LINEAR, CONV), 0.1, _key)
    changed = 0
    touched = np.zeros(SIZE, bool)
    for record in (LINEAR, CONV):
        codes = _array(data, record.codes_offset, record.shape, "i1")
        scales = _array(data, record.scales_offset, (8,), "<f4")
        noisy = noisy_weights(codes, scales, record.channel_axis, 0.1, _key(record.name))
        np.testing.assert_array_equal(_array(noised, record.codes_offset, record.shape, "i1"), noisy.codes)
        touched[record.codes_offset : record.codes_offset + codes.size] = True
        changed += noisy.changed
        if record is LINEAR:
            bias = _array(data, record.bias_offset, (8,), "<f4")
            shift = _array(data, record.shift_offset, (24,), "<f4")
            wanted = corrected_bias(bias, shift, codes, noisy.codes, scales, 1)
            np.testing.assert_array_equal(_array(noised, record.bias_offset, (8,), "<f4"), wanted)
            assert not np.array_equal(wanted, bias)
            touched[record.bias_offset : record.bias_offset + 32] = True
    before, after = np.frombuffer(data, np.uint8), np.frombuffer(noised, np.uint8)
    np.testing.assert_array_equal(before[~touched], after[~touched])
    assert share == changed / (24 * 8 + 8 * 12) and share > 0.5
    assert saturated >= 0


def test_the_same_key_gives_the_same_bytes_and_another_key_others() -> None:
    data = _file()
    first = noised_onnx(data, (LINEAR, CONV), 0.1, _key)
    assert first == noised_onnx(memoryview(data), (LINEAR, CONV), 0.1, _key)
    assert first[0] != noised_onnx(data, (LINEAR, CONV), 0.1, lambda name: derive_key(b"t" * 32, name))[0]


def test_no_noise_gives_the_same_bytes() -> None:
    assert noised_onnx(_file(), (LINEAR, CONV), 0.0, _key) == (bytearray(_file()), 0.0, 0)


def test_the_input_is_not_written() -> None:
    data = bytearray(_file())
    noised_onnx(data, (LINEAR, CONV), 0.1, _key)
    assert data == _file()


def test_a_file_without_records_stays_as_it_is() -> None:
    assert noised_onnx(b"float file", (), 0.1, _key) == (bytearray(b"float file"), 0.0, 0)


@pytest.mark.parametrize("field", ["codes_offset", "scales_offset", "shift_offset", "bias_offset"])
@pytest.mark.parametrize("offset", [-1, SIZE - 3])
def test_a_record_outside_the_file_is_refused_by_name(field: str, offset: int) -> None:
    with pytest.raises(ManifestError, match="blocks.0.mlp.fc2"):
        noised_onnx(_file(), (replace(LINEAR, **{field: offset}),), 0.1, _key)
