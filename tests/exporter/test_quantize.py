import copy
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from contract.errors import ExportError
from exporter.models import FoldSites, family_of
from exporter.onnx_graph import inference_mode
from exporter.quantize import InputRange, calibrate, fold, linear_layers, quantize_linear, weight_codes
from exporter.split import split_model
from tests.exporter import tiny


def _frontend(**more: object) -> tuple[nn.Module, FoldSites]:
    model = tiny.tiny_model(**more)
    frontend, _ = split_model(model, 2)
    return frontend, family_of(model)[1].fold_sites(frontend)


@pytest.mark.parametrize("more", [{}, {"qkv_bias": False}, {"qk_norm": True}, {"name": "deit3_small_patch16_224"}])
def test_folds_keep_the_function(more: dict) -> None:
    frontend, sites = _frontend(**more)
    inputs = tiny.images(5)
    with inference_mode(frontend):
        before = frontend(inputs)
        folded = fold(frontend, sites, calibrate(frontend, [tiny.images(16, seed=1)]))
        after = frontend(inputs)
    assert set(folded.shifts) == {f"blocks.{i}.{name}" for i in (0, 1) for name in ("attn.qkv", "mlp.fc1", "mlp.fc2")}
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


def test_folds_tame_an_outlier_channel() -> None:
    frontend, sites = _frontend()
    with torch.no_grad():
        frontend.blocks[0].norm1.weight[5] *= 60
        frontend.blocks[0].attn.qkv.weight[:, 5] /= 60
    ranges = calibrate(frontend, [tiny.images(16, seed=1)])
    folded = fold(frontend, sites, ranges)

    def unevenness(seen: InputRange) -> float:
        return float(seen.absmax.max() / np.median(seen.absmax))

    assert unevenness(ranges["blocks.0.attn.qkv"]) > 20
    assert unevenness(folded.ranges["blocks.0.attn.qkv"]) < 8


def test_ranges_after_the_folds_are_what_calibration_would_see() -> None:
    frontend, sites = _frontend()
    batch = tiny.images(16, seed=1)
    folded = fold(frontend, sites, calibrate(frontend, [batch]))
    for name, seen in calibrate(frontend, [batch]).items():
        for field in ("minimum", "maximum", "mean"):
            expected, found = getattr(seen, field), getattr(folded.ranges[name], field)
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3 * seen.absmax.max())


def test_qu_01_calibration_keeps_no_batch() -> None:
    """Memory does not depend on the number of images: a batch is gone when the next is drawn, state is per channel."""
    frontend, _ = _frontend()
    alive: list[weakref.ref] = []

    def batches(count: int) -> Iterator[torch.Tensor]:
        for seed in range(count):
            assert sum(each() is not None for each in alive) <= 1  # the one in the caller's hands
            batch = tiny.images(2, seed)
            alive.append(weakref.ref(batch))
            yield batch
            del batch

    few, many = calibrate(frontend, batches(3)), calibrate(frontend, batches(40))
    for ranges in (few, many):
        assert {seen.mean.shape for seen in ranges.values()} == {(48,), (192,)}
    for name in few:
        assert (many[name].minimum <= few[name].minimum).all() and (many[name].maximum >= few[name].maximum).all()


def test_batches_do_not_change_the_ranges() -> None:
    frontend, _ = _frontend()
    batch = tiny.images(12)
    whole, pieces = calibrate(frontend, [batch]), calibrate(frontend, batch.split(5))
    for name, seen in whole.items():
        np.testing.assert_allclose(pieces[name].absmax, seen.absmax, rtol=1e-5)
        np.testing.assert_allclose(pieces[name].mean, seen.mean, rtol=1e-4, atol=1e-6)


def test_no_batch_is_an_error() -> None:
    with pytest.raises(ExportError, match="at least one image"):
        calibrate(_frontend()[0], [])


def test_a_layer_that_sees_nan_is_named() -> None:
    frontend, _ = _frontend()
    with torch.no_grad():
        frontend.blocks[1].norm2.bias[0] = float("nan")
    with pytest.raises(ExportError, match=r"blocks\.1\.mlp\.fc1"):
        calibrate(frontend, [tiny.images(2)])


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 8), columns=st.integers(1, 8), axis=st.integers(0, 1), seed=st.integers(0, 99),
       magnitude=st.sampled_from([1e-30, 1e-6, 1.0, 1e6]))  # fmt: skip
def test_codes_are_symmetric_and_half_a_step_away_at_most(
    rows: int, columns: int, axis: int, seed: int, magnitude: float
) -> None:
    weight = (np.random.default_rng(seed).normal(size=(rows, columns)) * magnitude).astype(np.float32)
    codes, scales = weight_codes(weight, axis)
    assert codes.dtype == np.int8 and codes.min() >= -127
    along = scales[:, None] if axis == 0 else scales[None, :]
    assert (np.abs(codes * along - weight) <= 0.5001 * along).all()


def test_a_channel_of_zeros_has_a_usable_scale() -> None:
    codes, scales = weight_codes(np.array([[0.0, 2.0], [0.0, -1.0]], np.float32), 1)
    assert not codes[:, 0].any() and scales[0] == scales[1]
    codes, scales = weight_codes(np.zeros((2, 2), np.float32), 1)
    assert np.isfinite(scales).all() and (scales > 0).all()


def test_the_bias_takes_up_the_mean_effect_of_rounding() -> None:
    rng = np.random.default_rng(0)
    layer = nn.Linear(64, 16)
    inputs = (5.0 + rng.normal(size=(4000, 64))).astype(np.float32)  # a mean far from zero
    seen = InputRange(*(each.astype(np.float64) for each in (inputs.min(0), inputs.max(0), inputs.mean(0))))
    quantized = quantize_linear("layer", layer, seen, None)
    exact = layer(torch.from_numpy(inputs)).detach().numpy()
    found = inputs @ (quantized.codes * quantized.scales) + quantized.bias
    assert np.abs((found - exact).mean(0)).max() < 1e-4
    assert copy.deepcopy(quantized).input_scale == pytest.approx(np.abs(inputs).max() / 127)


def test_a_layer_that_saw_only_zeros_has_a_usable_scale() -> None:
    zeros = np.zeros(4)
    quantized = quantize_linear("layer", nn.Linear(4, 2), InputRange(zeros, zeros, zeros), None)
    assert quantized.input_scale > 0


def test_every_linear_layer_is_found() -> None:
    frontend, _ = _frontend()
    assert list(linear_layers(frontend)) == [
        f"blocks.{i}.{name}" for i in (0, 1) for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    ]
