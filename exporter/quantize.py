"""INT8 arithmetic of the frontend: streamed ranges, codes, scales and biases of linear layers and convolutions.

Rescalings that even out the ranges beforehand are exporter.quantize_folds, better scales than min-max are
exporter.scale_search. Where the numbers go in the ONNX file is left to exporter.onnx_qdq, whether they are good enough
to exporter.parity.

Everything is symmetric with zero point 0: weights by output channel (or by tensor, as published), inputs by tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from contract.errors import ExportError

CODE_MAX = 127  # -128 is never used: the range is symmetric
LEAST_IMAGES = 2  # one picture's ranges are that picture's

Doubles = NDArray[np.float64]
Scales = NDArray[np.float32]


@dataclass(frozen=True)
class SearchSettings:
    """Bounds of the scale search; SA follows PTQ4ViT, whose numbers these are."""

    candidates: int = 100
    lowest: float = 0.01  # times the min-max scale
    highest: float = 1.2
    rounds: int = 3
    rows: int = 256  # of each layer's inputs that are kept, whatever the number of images


@dataclass(frozen=True)
class Quantizer:
    """How scales are found. The switches are there for the two profiles, and to tell what each fold contributes."""

    per_channel: bool = True  # weight scales: one for every output channel, or one for a layer (three for a fused qkv)
    smooth: bool = True  # shift and SmoothQuant folded into LayerNorm, V channels smoothed
    centre: bool = True  # a constant shift behind activations
    tail_units: int = 32  # hidden units kept out of the INT8 product, at most
    correct_bias: bool = True  # for the mean effect of weight rounding
    search: SearchSettings | None = None


QUANTIZERS = {
    "default": Quantizer(),
    "searched": Quantizer(search=SearchSettings()),
    "paper": Quantizer(
        per_channel=False, smooth=False, centre=False, tail_units=0, correct_bias=False, search=SearchSettings()
    ),
}


@dataclass(frozen=True)
class InputRange:
    """What calibration saw at one layer's input, per channel (K,)."""

    minimum: Doubles
    maximum: Doubles
    mean: Doubles

    @property
    def absmax(self) -> Doubles:
        return np.maximum(np.abs(self.minimum), np.abs(self.maximum))

    def moved(self, shift: Doubles | float, scale: Doubles | float = 1.0) -> InputRange:
        """Range of (x - shift) / scale for a positive scale."""
        return InputRange((self.minimum - shift) / scale, (self.maximum - shift) / scale, (self.mean - shift) / scale)

    def only(self, channels: NDArray[np.int64]) -> InputRange:
        """Range of some channels, in the order given."""
        return InputRange(self.minimum[channels], self.maximum[channels], self.mean[channels])


@dataclass(frozen=True)
class Ranges:
    """What calibration saw: each layer's input by its path, and each convolution's output as (minimum, maximum)."""

    inputs: dict[str, InputRange]
    outputs: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class ChosenScales:
    """Scales of one layer in place of min-max: weights (N,), input."""

    weight: Scales
    input: float


@dataclass(frozen=True)
class QuantizedLinear:
    """One linear layer as the file will hold it: x_codes @ codes * scales * input_scale + bias.

    Without `input_scale` the input stays float and only the weight is stored as INT8; without `bias` none is added.
    """

    name: str
    codes: NDArray[np.int8]  # (K, N)
    scales: Scales  # (N,)
    input_scale: float | None
    bias: NDArray[np.float32] | None  # (N,)
    shift: NDArray[np.float32] | None  # (K,)


@dataclass(frozen=True)
class QuantizedConvolution:
    """One convolution: codes (O, I / groups, kh, kw), scales (O,), bias (O,), scales of its input and its output."""

    name: str
    codes: NDArray[np.int8]
    scales: Scales
    input_scale: float
    output_scale: float
    bias: NDArray[np.float32]


def linear_layers(frontend: nn.Module) -> dict[str, nn.Linear]:
    """Every linear layer by its path, in order of definition."""
    return {name: module for name, module in frontend.named_modules() if isinstance(module, nn.Linear)}


def convolutions(frontend: nn.Module) -> dict[str, nn.Conv2d]:
    """Every convolution that computes in INT8, by its path.

    All but the first: it reads the picture itself, whose 256 levels would be rounded, for a few percent of the work.
    """
    found = {name: module for name, module in frontend.named_modules() if isinstance(module, nn.Conv2d)}
    return dict(list(found.items())[1:])


def check_weights(frontend: nn.Module) -> None:
    """Raises ExportError that names the first layer whose weights are not finite, or zero altogether."""
    for name, value in (*frontend.named_parameters(), *frontend.named_buffers()):
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise ExportError(f"{name} should be finite, found NaN or infinity", "check the weights file")
    for name, layer in frontend.named_modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)) and not bool(layer.weight.any()):
            raise ExportError(f"{name}.weight holds only zeros: this layer passes nothing on", "check the weights file")


def calibrate(frontend: nn.Module, batches: Iterable[Tensor]) -> Ranges:
    """Ranges of every layer over all batches (B, 3, h, w), in memory that does not grow with their number.

    Raises ExportError when there are fewer than two images, a layer's input is not finite, or memory is short.
    """
    seen: dict[str, _Running] = {}
    outputs: dict[str, tuple[float, float]] = {}
    convolved = convolutions(frontend)
    count = 0
    with _hooked(frontend, {**linear_layers(frontend), **convolved}, seen, convolved, outputs), torch.inference_mode():
        for batch in batches:
            with enough_memory(f"calibration, {len(batch)} images at a time,"):
                frontend(batch)
            count += len(batch)
    if count < LEAST_IMAGES:
        raise ExportError(
            f"calibration needs at least {LEAST_IMAGES} images, found {count}",
            "name a folder of typical images: --calibration",
        )
    return Ranges({name: running.range(name) for name, running in seen.items()}, outputs)


@contextmanager
def enough_memory(what: str) -> Iterator[None]:
    """Turn running out of memory inside the block into an ExportError that says what to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise ExportError(
            f"{what} ran out of memory: {str(error).splitlines()[0] if str(error) else 'none is left'}",
            "lower --split, the model's img_size or the model, or end other programs; "
            "the number of images makes no difference",
        ) from error


@contextmanager
def _hooked(
    frontend: nn.Module, layers: dict[str, nn.Module], seen: dict[str, _Running],
    convolved: dict[str, nn.Conv2d], outputs: dict[str, tuple[float, float]],
) -> Iterator[None]:  # fmt: skip
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs, name=name: _see(seen, name, inputs[0], name in convolved))
        for name, layer in layers.items()
    ]
    hooks += [
        layer.register_forward_hook(lambda _, inputs, output, name=name: _see_output(outputs, name, output))
        for name, layer in convolved.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class _Running:
    """Minimum, maximum and sum so far; the only state that calibration keeps."""

    minimum: Tensor
    maximum: Tensor
    total: Tensor
    count: int

    def range(self, name: str) -> InputRange:
        if not bool(torch.isfinite(self.total).all()):
            raise ExportError(
                f"the input of {name} should be finite during calibration, found NaN or infinity",
                "check the weights file and the calibration images",
            )
        mean = self.total.numpy() / self.count
        return InputRange(self.minimum.double().numpy(), self.maximum.double().numpy(), mean)


def _see(seen: dict[str, _Running], name: str, inputs: Tensor, channels_first: bool) -> None:
    rows = inputs.detach()
    rows = rows.transpose(1, -1) if channels_first else rows
    rows = rows.reshape(-1, rows.shape[-1])  # (B * T, K)
    minimum, maximum, total = rows.amin(0).cpu(), rows.amax(0).cpu(), rows.double().sum(0).cpu()
    if name in seen:
        earlier = seen[name]
        minimum, maximum = torch.minimum(earlier.minimum, minimum), torch.maximum(earlier.maximum, maximum)
        seen[name] = _Running(minimum, maximum, earlier.total + total, earlier.count + len(rows))
    else:
        seen[name] = _Running(minimum, maximum, total, len(rows))


def _see_output(outputs: dict[str, tuple[float, float]], name: str, output: Tensor) -> None:
    low, high = outputs.get(name, (0.0, 0.0))
    outputs[name] = (min(low, float(output.min())), max(high, float(output.max())))


def channel_scales(weight: NDArray[np.float32], channel_axis: int, groups: int | None = None) -> Scales:
    """Min-max scales (C,) of `weight` along an axis; with `groups`, channels of one group have the group's largest.

    A channel of zeros takes the layer's largest scale, so that weight noise still has a grid to act on.
    """
    others = tuple(axis for axis in range(weight.ndim) if axis != channel_axis)
    largest = np.abs(weight).max(axis=others).astype(np.float64)
    if groups is not None:
        largest = np.repeat(largest.reshape(groups, -1).max(axis=1), len(largest) // groups)
    largest = np.where(largest > 0, largest, largest.max() or 1.0)
    return np.maximum(largest / CODE_MAX, np.finfo(np.float32).tiny).astype(np.float32)


def codes_of(weight: NDArray[np.float32], scales: Scales, channel_axis: int) -> NDArray[np.int8]:
    """clamp(round(weight / scale)), of the weight's shape."""
    shape = [1] * weight.ndim
    shape[channel_axis] = -1
    return np.clip(np.rint(weight / scales.reshape(shape)), -CODE_MAX, CODE_MAX).astype(np.int8)


def weight_codes(weight: NDArray[np.float32], channel_axis: int) -> tuple[NDArray[np.int8], Scales]:
    """Symmetric codes of `weight` (its shape) with min-max scales (C,) per channel."""
    scales = channel_scales(weight, channel_axis)
    return codes_of(weight, scales, channel_axis), scales


def input_scale_of(absmax: float) -> float:
    """Min-max scale of a tensor; where it was zeros only, any finite scale codes it exactly."""
    scale = absmax / CODE_MAX
    return scale if scale > np.finfo(np.float32).tiny else 1.0 / CODE_MAX


def min_max_scales(linear: nn.Linear, seen: InputRange, groups: int | None) -> ChosenScales:
    """What the search starts from, and what stays where it finds nothing better."""
    weight = linear.weight.detach().numpy()  # (N, K)
    return ChosenScales(channel_scales(weight, 0, groups), input_scale_of(float(seen.absmax.max())))


def quantize_linear(
    name: str, linear: nn.Linear, seen: InputRange, scales: ChosenScales, shift: NDArray[np.float32] | None = None,
    correct_bias: bool = True,
) -> QuantizedLinear:  # fmt: skip
    """Codes and bias of one layer after the folds.

    The bias also takes up the mean effect of weight rounding: b + (W - W_q) E[x]. Without it a shifted input, whose
    mean is far from zero, would multiply every rounding error.
    """
    weight = linear.weight.detach().numpy().T  # (K, N)
    codes = codes_of(weight, scales.weight, channel_axis=1)
    bias = np.zeros(weight.shape[1]) if linear.bias is None else linear.bias.detach().double().numpy()
    if correct_bias:
        bias = bias + seen.mean @ (weight.astype(np.float64) - codes * scales.weight.astype(np.float64))
    return QuantizedLinear(name, codes, scales.weight, scales.input, bias.astype(np.float32), shift)


def store_linear(name: str, linear: nn.Linear, shift: NDArray[np.float32] | None) -> QuantizedLinear:
    """A layer without bias whose product stays float: only its weight is stored as INT8."""
    codes, scales = weight_codes(linear.weight.detach().numpy().T, channel_axis=1)
    return QuantizedLinear(name, codes, scales, None, None, shift)


def quantize_convolution(
    name: str, layer: nn.Conv2d, ranges: Ranges, rectified: bool, per_channel: bool, correct_bias: bool
) -> QuantizedConvolution:
    """Codes, scales and bias of one convolution whose BatchNorm is merged into it.

    `rectified`: only a ReLU reads the output, so that what is below zero may saturate.
    """
    weight = layer.weight.detach().numpy()
    scales = channel_scales(weight, 0, None if per_channel else 1)
    codes = codes_of(weight, scales, 0)
    seen, (low, high) = ranges.inputs[name], ranges.outputs[name]
    bias = np.zeros(len(weight)) if layer.bias is None else layer.bias.detach().double().numpy()
    if correct_bias:
        error = (weight - codes * scales.reshape(-1, 1, 1, 1).astype(np.float64)).sum((2, 3))  # (O, I / groups)
        mean = seen.mean.reshape(layer.groups, -1)  # (groups, I / groups)
        bias = bias + np.einsum("oi,oi->o", error, np.repeat(mean, len(weight) // layer.groups, axis=0))
    output_scale = input_scale_of(high if rectified else max(high, -low))
    return QuantizedConvolution(
        name, codes, scales, input_scale_of(float(seen.absmax.max())), output_scale, bias.astype(np.float32)
    )
