from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.cut_gradient import CODE_MAX, FLOAT16_MAX, Floats, WireGradient, read_gradient, write_gradient

SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 40))


def drawn(seed: int, rows: int, size: int, scale: float = 1.0) -> Floats:
    """A gradient (rows, size) whose rows are of very different lengths."""
    rng = np.random.default_rng([seed, rows, size])
    lengths = 10.0 ** rng.uniform(-4, 1, (rows, 1))
    return (scale * lengths * rng.normal(size=(rows, size))).astype(np.float32)


@given(shape=SHAPES, seed=st.integers(0, 1000))
def test_float32_is_exact(shape: tuple[int, int], seed: int) -> None:
    gradient = drawn(seed, *shape)
    wire, residue = write_gradient(gradient, "float32")
    assert residue is None and wire.scales is None
    assert read_gradient(wire).tobytes() == gradient.tobytes()


@given(shape=SHAPES, seed=st.integers(0, 1000), scale=st.sampled_from([1e-6, 1.0, 1e3]))
def test_float16_is_the_nearest_half(shape: tuple[int, int], seed: int, scale: float) -> None:
    gradient = drawn(seed, *shape, scale)
    wire, residue = write_gradient(gradient, "float16")
    assert residue is None and wire.scales is None and wire.values.dtype == np.float16
    received = read_gradient(wire)
    assert received.dtype == np.float32
    ulp = np.spacing(np.abs(wire.values)).astype(np.float32)
    assert (np.abs(received - gradient) <= ulp / 2).all()


def test_float16_saturates_instead_of_becoming_infinite() -> None:
    gradient = np.array([[1e9, -1e9, 65519.9, -65520.0, 3e38, 65504.0]], np.float32)
    received = read_gradient(write_gradient(gradient, "float16")[0])
    assert received.tolist() == [[FLOAT16_MAX, -FLOAT16_MAX, FLOAT16_MAX, -FLOAT16_MAX, FLOAT16_MAX, FLOAT16_MAX]]


@given(shape=SHAPES, seed=st.integers(0, 1000), scale=st.sampled_from([1e-20, 1.0, 1e20]))
def test_int8_is_off_by_half_a_step_of_its_row_at_most(shape: tuple[int, int], seed: int, scale: float) -> None:
    gradient = drawn(seed, *shape, scale)
    wire, residue = write_gradient(gradient, "int8")
    assert wire.values.dtype == np.int8 and wire.scales is not None and wire.scales.shape == shape[:1]
    assert residue is not None and residue.shape == shape[1:] and residue.dtype == np.float32
    error = np.abs(read_gradient(wire).astype(np.float64) - gradient)
    assert (error <= 0.50001 * wire.scales[:, None]).all()
    assert (np.abs(wire.values).max(axis=1) == CODE_MAX).all()  # every row uses all of its range


def test_int8_rows_of_nothing_stay_nothing() -> None:
    gradient = np.zeros((3, 4), np.float32)
    gradient[1] = [1.0, -127.0, 0.25, 64.0]
    wire, residue = write_gradient(gradient, "int8")
    assert wire.scales is not None and wire.scales.tolist() == [0.0, 1.0, 0.0]
    assert wire.values.tolist() == [[0] * 4, [1, -127, 0, 64], [0] * 4]
    assert residue is not None and residue.tolist() == [0.0, 0.0, 0.25, 0.0]
    assert read_gradient(wire).tolist() == [[0.0] * 4, [1.0, -127.0, 0.0, 64.0], [0.0] * 4]


@given(rows=st.lists(st.integers(1, 9), min_size=1, max_size=12), size=st.integers(1, 20), seed=st.integers(0, 1000))
def test_what_int8_rounds_off_comes_with_later_batches(rows: list[int], size: int, seed: int) -> None:
    """Per position, the sums over all batches differ by the last residue alone, however the batches' sizes vary."""
    meant, received = np.zeros(size), np.zeros(size)
    residue: Floats | None = None
    largest = 0.0
    for number, count in enumerate(rows):
        gradient = drawn(seed + number, count, size)
        wire, residue = write_gradient(gradient, "int8", residue)
        assert wire.scales is not None
        meant += gradient.sum(axis=0, dtype=np.float64)
        received += read_gradient(wire).sum(axis=0, dtype=np.float64)
        largest = max(largest, float(np.abs(gradient).sum(axis=0).max()))
        assert (np.abs(residue) <= 0.5001 * wire.scales.sum()).all()  # it does not grow with the batches
    assert residue is not None
    assert received + residue == pytest.approx(meant, abs=1e-6 * (1 + largest) * len(rows))


def test_without_the_residue_that_law_does_not_hold() -> None:
    gradient = np.array([[127.0, 0.4]], np.float32)
    plain = sum(float(read_gradient(write_gradient(gradient, "int8")[0])[0, 1]) for _ in range(10))
    fed, residue = 0.0, None
    for _ in range(10):
        wire, residue = write_gradient(gradient, "int8", residue)
        fed += float(read_gradient(wire)[0, 1])
    assert plain == 0.0 and fed == pytest.approx(4.0, abs=0.5)


@given(shape=SHAPES, seed=st.integers(0, 1000), precision=st.sampled_from(["float32", "float16", "int8"]))
def test_the_same_gradient_gives_the_same_bytes_and_is_left_alone(
    shape: tuple[int, int], seed: int, precision: str
) -> None:
    gradient, residue = drawn(seed, *shape), drawn(seed + 1, 1, shape[1])[0]
    before = gradient.tobytes(), residue.tobytes()
    one, left = write_gradient(gradient, precision, residue)  # type: ignore[arg-type]
    other, again = write_gradient(gradient.copy(), precision, residue.copy())  # type: ignore[arg-type]
    assert one.values.tobytes() == other.values.tobytes()
    assert (one.scales is None) == (precision != "int8") == (left is None)
    if one.scales is not None and other.scales is not None and left is not None and again is not None:
        assert one.scales.tobytes() == other.scales.tobytes() and left.tobytes() == again.tobytes()
    assert (gradient.tobytes(), residue.tobytes()) == before


def test_reading_leaves_what_was_received_alone() -> None:
    codes, scales = np.array([[1, -2]], np.int8), np.array([0.5], np.float32)
    for array in (codes, scales):
        array.flags.writeable = False  # as arrays of a received message are
    assert read_gradient(WireGradient(codes, scales)).tolist() == [[0.5, -1.0]]
