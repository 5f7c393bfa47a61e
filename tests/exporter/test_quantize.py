import copy
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from contract.errors import ExportError
from exporter.plan import QUANTIZERS as NAMES
from exporter.quantize import (
    QUANTIZERS,
    ChosenScales,
    InputRange,
    Ranges,
    calibrate,
    channel_scales,
    check_weights,
    codes_of,
    convolutions,
    linear_layers,
    min_max_scales,
    quantize_convolution,
    quantize_linear,
    weight_codes,
)
from exporter.split import split_model
from tests.exporter import tiny


def _frontend(**more: object) -> nn.Module:
    return split_model(tiny.tiny_model(**more), 2)[0]


def _range(inputs: np.ndarray) -> InputRange:
    return InputRange(*(each.astype(np.float64) for each in (inputs.min(0), inputs.max(0), inputs.mean(0))))


def test_qu_01_calibration_keeps_no_batch() -> None:
    """Memory does not depend on the number of images: a batch is gone when the next is drawn, state is per channel."""
    frontend = _frontend()
    alive: list[weakref.ref] = []

    def batches(count: int) -> Iterator[torch.Tensor]:
        for seed in range(count):
            assert sum(each() is not None for each in alive) <= 1  # the one in the caller's hands
            batch = tiny.images(2, seed)
            alive.append(weakref.ref(batch))
            yield batch
            del batch

    few, many = (calibrate(frontend, batches(count)).inputs for count in (3, 40))
    for ranges in (few, many):
        assert {seen.mean.shape for seen in ranges.values()} == {(48,), (192,)}
    for name in few:
        assert (many[name].minimum <= few[name].minimum).all() and (many[name].maximum >= few[name].maximum).all()


_CALIBRATION = """
import sys, resource, torch
from exporter.quantize import Quantizer
from exporter.quantize_frontend import prepare
from exporter.models import family_of
from exporter.split import split_model
from tests.exporter import tiny
torch.set_num_threads(1)
model = tiny.tiny_model(img_size=64)
frontend, _ = split_model(model, 2)
generator = torch.Generator().manual_seed(0)
batches = (torch.randn(4, 3, 64, 64, generator=generator) for _ in range(int(sys.argv[1]) // 4))
with torch.no_grad():
    prepare(frontend, family_of(model)[1].fold_sites(frontend), Quantizer(), batches)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_qu_01_a_thousand_images_take_no_more_memory_than_32() -> None:
    """The whole process, as the system counts it: 1,000 images would be 49 MB, their activations gigabytes."""
    few, many = (
        int(subprocess.run([sys.executable, "-c", _CALIBRATION, count], capture_output=True, text=True, check=True,
                           cwd=Path(__file__).parents[2]).stdout)
        for count in ("32", "1000")
    )  # fmt: skip
    assert many < 1.03 * few


def test_batches_do_not_change_the_ranges() -> None:
    frontend = _frontend()
    batch = tiny.images(12)
    whole, pieces = calibrate(frontend, [batch]).inputs, calibrate(frontend, batch.split(5)).inputs
    for name, seen in whole.items():
        np.testing.assert_allclose(pieces[name].absmax, seen.absmax, rtol=1e-5)
        np.testing.assert_allclose(pieces[name].mean, seen.mean, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("count", [0, 1])
def test_no_image_and_a_single_one_are_errors(count: int) -> None:
    with pytest.raises(ExportError, match=f"at least 2 images, found {count}") as caught:
        calibrate(_frontend(), [tiny.images(1)] * count)
    assert "--calibration" in caught.value.cure


def test_a_layer_that_sees_nan_is_named() -> None:
    frontend = _frontend()
    with torch.no_grad():
        frontend.blocks[1].norm2.bias[0] = float("nan")
    with pytest.raises(ExportError, match=r"blocks\.1\.mlp\.fc1"):
        calibrate(frontend, [tiny.images(2)])


@pytest.mark.parametrize(("value", "said"), [(float("nan"), "NaN or infinity"), (float("inf"), "NaN or infinity")])
def test_weights_that_are_no_numbers_are_named(value: float, said: str) -> None:
    frontend = _frontend()
    with torch.no_grad():
        frontend.blocks[1].mlp.fc2.weight[3, 5] = value
    with pytest.raises(ExportError, match=rf"blocks\.1\.mlp\.fc2\.weight.*{said}"):
        check_weights(frontend)


def test_a_layer_of_zeros_is_named() -> None:
    frontend = _frontend()
    check_weights(frontend)
    with torch.no_grad():
        frontend.blocks[0].attn.proj.weight.zero_()
    with pytest.raises(ExportError, match=r"blocks\.0\.attn\.proj\.weight holds only zeros"):
        check_weights(frontend)


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 99 bytes")]
)
def test_memory_that_runs_out_says_what_to_lower(error: Exception) -> None:
    frontend = _frontend()

    def fail(*_: object) -> None:
        raise error

    frontend.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(ExportError, match="ran out of memory") as caught:
        calibrate(frontend, [tiny.images(4)])
    assert "4 images at a time" in caught.value.cause and "lower --split" in caught.value.cure


def test_other_errors_of_torch_are_not_taken_for_memory() -> None:
    with pytest.raises(RuntimeError, match="shape|size"):
        calibrate(nn.Sequential(nn.Linear(3, 2)), [torch.zeros(2, 5)])


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 8), columns=st.integers(1, 8), axis=st.integers(0, 1), seed=st.integers(0, 99),
       magnitude=st.sampled_from([1e-30, 1e-6, 1.0, 1e6]))  # fmt: skip
def test_codes_are_symmetric_and_half_a_step_away_at_most(
    rows: int, columns: int, axis: int, seed: int, magnitude: float
) -> None:
    """Invariant 2 of split adaptation; rounding what was rounded changes nothing."""
    weight = (np.random.default_rng(seed).normal(size=(rows, columns)) * magnitude).astype(np.float32)
    codes, scales = weight_codes(weight, axis)
    assert codes.dtype == np.int8 and codes.min() >= -127
    along = scales[:, None] if axis == 0 else scales[None, :]
    assert (np.abs(codes * along - weight) <= 0.5001 * along).all()
    np.testing.assert_array_equal(codes_of(codes * along, scales, axis), codes)


@pytest.mark.parametrize(("groups", "distinct"), [(None, 12), (1, 1), (3, 3)])
def test_channels_of_one_group_share_the_largest_scale(groups: int | None, distinct: int) -> None:
    weight = np.random.default_rng(0).normal(size=(12, 7)).astype(np.float32)
    scales = channel_scales(weight, 0, groups)
    assert len(scales) == 12 and len(set(scales)) == distinct
    own = channel_scales(weight, 0)
    np.testing.assert_array_equal(scales, np.repeat(own.reshape(distinct, -1).max(1), 12 // distinct))


def test_a_channel_of_zeros_has_a_usable_scale() -> None:
    codes, scales = weight_codes(np.array([[0.0, 2.0], [0.0, -1.0]], np.float32), 1)
    assert not codes[:, 0].any() and scales[0] == scales[1]
    codes, scales = weight_codes(np.zeros((2, 2), np.float32), 1)
    assert np.isfinite(scales).all() and (scales > 0).all()


def test_the_bias_takes_up_the_mean_effect_of_rounding() -> None:
    rng = np.random.default_rng(0)
    layer = nn.Linear(64, 16)
    inputs = (5.0 + rng.normal(size=(4000, 64))).astype(np.float32)  # a mean far from zero
    seen = _range(inputs)
    scales = min_max_scales(layer, seen, None)
    exact = layer(torch.from_numpy(inputs)).detach().numpy()
    biases = {}
    for correct in (True, False):
        quantized = quantize_linear("layer", layer, seen, scales, correct_bias=correct)
        found = inputs @ (quantized.codes * quantized.scales) + quantized.bias
        biases[correct] = np.abs((found - exact).mean(0)).max()
    assert biases[True] < 1e-4 < 1e-2 < biases[False]
    assert copy.deepcopy(quantized).input_scale == pytest.approx(np.abs(inputs).max() / 127)


def test_a_layer_that_saw_only_zeros_has_a_usable_scale() -> None:
    zeros = np.zeros(4)
    layer = nn.Linear(4, 2)
    assert min_max_scales(layer, InputRange(zeros, zeros, zeros), None).input > 0


def test_chosen_scales_are_used_as_they_are() -> None:
    layer, zeros = nn.Linear(4, 2), np.zeros(4)
    chosen = ChosenScales(np.array([0.5, 0.25], np.float32), 0.125)
    quantized = quantize_linear("layer", layer, InputRange(zeros, zeros, zeros), chosen)
    np.testing.assert_array_equal(quantized.scales, chosen.weight)
    assert quantized.input_scale == 0.125


@pytest.mark.parametrize("groups", [1, 4])
def test_a_convolution_s_bias_takes_up_the_mean_effect_of_rounding(groups: int) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 12, 3, groups=groups)
    inputs = 4.0 + torch.randn(64, 8, 12, 12)
    ranges = _ranges_of(layer, inputs)
    exact = layer(inputs).detach().numpy()
    found = {}
    for correct in (True, False):
        quantized = quantize_convolution("layer", layer, ranges, False, True, correct)
        weight = torch.from_numpy(quantized.codes * quantized.scales.reshape(-1, 1, 1, 1))
        outputs = nn.functional.conv2d(inputs, weight, torch.from_numpy(quantized.bias), groups=groups).numpy()
        found[correct] = np.abs((outputs - exact).mean((0, 2, 3))).max()
    assert found[True] < 0.1 * found[False]


def _ranges_of(layer: nn.Conv2d, inputs: torch.Tensor) -> Ranges:
    rows = inputs.transpose(1, -1).reshape(-1, inputs.shape[1]).numpy()
    output = layer(inputs).detach()
    return Ranges({"layer": _range(rows)}, {"layer": (float(output.min()), float(output.max()))})


def test_what_only_a_relu_reads_may_saturate_below_zero() -> None:
    layer = nn.Conv2d(2, 3, 1)
    seen = InputRange(np.full(2, -1.0), np.full(2, 2.0), np.zeros(2))
    ranges = Ranges({"layer": seen}, {"layer": (-12.7, 2.54)})
    plain, rectified = (quantize_convolution("layer", layer, ranges, each, True, True) for each in (False, True))
    assert plain.output_scale == pytest.approx(0.1) and rectified.output_scale == pytest.approx(0.02)
    assert plain.input_scale == pytest.approx(2 / 127)


def test_every_linear_layer_and_all_convolutions_but_the_first_are_found() -> None:
    frontend = _frontend()
    assert list(linear_layers(frontend)) == [
        f"blocks.{i}.{name}" for i in (0, 1) for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    ]
    assert not convolutions(frontend)
    assert list(convolutions(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)))) == ["2"]


def test_convolutions_are_seen_by_channel_and_their_output_as_a_whole() -> None:
    torch.manual_seed(0)
    frontend = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3))
    batch = torch.randn(6, 3, 8, 8)
    ranges = calibrate(frontend, batch.split(4))
    with torch.no_grad():
        inputs, output = frontend[:2](batch), frontend(batch)
    np.testing.assert_allclose(ranges.inputs["2"].maximum, inputs.amax((0, 2, 3)).numpy(), rtol=1e-6)
    np.testing.assert_allclose(ranges.inputs["2"].mean, inputs.mean((0, 2, 3)).numpy(), rtol=1e-5)
    assert ranges.outputs == {"2": (pytest.approx(float(output.min())), pytest.approx(float(output.max())))}


def test_the_plan_knows_every_quantizer_by_name() -> None:
    assert set(NAMES) == set(QUANTIZERS)
