"""How features of kept patches, and what a server changed in its layers, travel."""

from __future__ import annotations

import numpy as np
import pytest

from contract.errors import RemoteProtocolError, TrainingError
from contract.model_delta import SCALE, names_in, read_delta, write_delta
from contract.patch_features import WireFeatures, read_features, write_features

RNG = np.random.default_rng(0)
FEATURES = (RNG.normal(size=(6, 5, 4)) * [1, 10, 0.1, 0]).astype(np.float32)
SHIPPED = {"blocks.2.w": RNG.normal(size=(4, 3, 2)).astype(np.float32), "norm.b": np.ones(3, np.float32)}


@pytest.mark.parametrize(("precision", "width"), [("float32", 4), ("float16", 2), ("int8", 1)])
def test_invariant_6_upload_bytes_are_samples_by_tokens_by_channels_by_width(precision: str, width: int) -> None:
    wire = write_features(FEATURES, precision)
    assert wire.values.nbytes == 6 * 5 * 4 * width
    assert (wire.scales is not None) == (precision == "int8")


def test_features_lose_what_their_precision_says() -> None:
    np.testing.assert_array_equal(read_features(write_features(FEATURES, "float32")), FEATURES)
    np.testing.assert_allclose(read_features(write_features(FEATURES, "float16")), FEATURES, rtol=2**-11)
    half_a_step = np.abs(FEATURES).max(axis=(0, 1)) / 127 / 2
    assert (np.abs(read_features(write_features(FEATURES, "int8")) - FEATURES) <= half_a_step * 1.001 + 1e-9).all()


@pytest.mark.parametrize(("precision", "value"), [("float16", 1e6), ("int8", np.nan), ("float32", np.inf)])
def test_values_that_cannot_travel_are_refused(precision: str, value: float) -> None:
    with pytest.raises(TrainingError, match=f"not finite in {precision}"):
        write_features(np.full((1, 2, 3), value, np.float32), precision)


@pytest.mark.parametrize(
    "wire",
    [
        WireFeatures(np.zeros((1, 2, 3), np.int8), None),
        WireFeatures(np.zeros((1, 2, 3), np.float16), np.ones(3, np.float32)),
        WireFeatures(np.zeros((1, 2, 3), np.int8), np.ones(2, np.float32)),
    ],
)
def test_scales_that_do_not_fit_are_refused(wire: WireFeatures) -> None:
    with pytest.raises(RemoteProtocolError, match="scales"):
        read_features(wire)


@pytest.mark.parametrize(("precision", "share"), [("float32", 1e-7), ("float16", 1e-3), ("int8", 5e-3)])
def test_a_change_arrives_as_exactly_as_its_precision_says(precision: str, share: float) -> None:
    now = {name: (value + RNG.normal(size=value.shape) * 0.01).astype(np.float32) for name, value in SHIPPED.items()}
    coded = write_delta(now, SHIPPED, precision)
    assert names_in(coded) == set(SHIPPED)
    found = read_delta(coded, SHIPPED)
    for name, value in now.items():
        largest = np.abs(value - SHIPPED[name]).max()
        assert np.abs(found[name] - value).max() <= share * largest + 1e-7
    if precision == "int8":
        assert coded["blocks.2.w" + SCALE].shape == (4,) and coded["norm.b" + SCALE].shape == (1,)


def test_what_has_not_moved_does_not_travel() -> None:
    now = {**SHIPPED, "norm.b": SHIPPED["norm.b"] + np.float32(0.5)}
    for precision in ("float32", "float16", "int8"):
        coded = write_delta(now, SHIPPED, precision)
        assert names_in(coded) == {"norm.b"}
        found = read_delta(coded, SHIPPED)
        assert found["blocks.2.w"] is SHIPPED["blocks.2.w"]
        np.testing.assert_allclose(found["norm.b"], now["norm.b"], rtol=1e-3)
    assert write_delta(SHIPPED, SHIPPED, "int8") == {}


@pytest.mark.parametrize(
    ("coded", "cause"),
    [
        ({"norm.w": np.zeros(3, np.float32)}, "norm.w: expected a tensor that the server trains"),
        ({"norm.b": np.zeros(4, np.float32)}, r"norm.b: expected the shape \(3,\)"),
        ({"norm.b": np.zeros(3, np.int8)}, "norm.b: expected 1 float32 scales, found none"),
        ({"norm.b": np.zeros(3, np.int8), "norm.b" + SCALE: np.ones(3, np.float32)}, "expected 1 float32 scales"),
        ({"norm.b" + SCALE: np.ones(1, np.float32)}, "expected a tensor that the server trains"),
    ],
)
def test_changes_that_do_not_fit_are_refused(coded: dict[str, np.ndarray], cause: str) -> None:
    with pytest.raises(RemoteProtocolError, match=cause):
        read_delta(coded, SHIPPED)
