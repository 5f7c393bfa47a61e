"""INT8 arithmetic of the frontend: streamed input ranges, folds that keep the function, codes and scales.

Where the numbers go in the ONNX file is left to exporter.onnx_graph, whether they are good enough to exporter.parity.

The scheme (SA 1.1 step 3, with per-channel weights): weights symmetric per output channel, linear inputs symmetric
per tensor by min-max. Before the scales are chosen, ranges are evened out by rescalings that cancel in exact
arithmetic: a shift and SmoothQuant (Xiao et al. 2023, alpha 1/2) folded into LayerNorm, the same for the channels of V
folded into qkv, and a constant shift behind the activation. An outlier channel costs 20 dB without them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from contract.errors import ExportError
from exporter.models import FoldSites

CODE_MAX = 127  # -128 is never used: the range is symmetric

Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class InputRange:
    """What calibration saw at one linear layer's input, per channel (K,)."""

    minimum: Doubles
    maximum: Doubles
    mean: Doubles

    @property
    def absmax(self) -> Doubles:
        return np.maximum(np.abs(self.minimum), np.abs(self.maximum))

    def moved(self, shift: Doubles | float, scale: Doubles | float = 1.0) -> InputRange:
        """Range of (x - shift) / scale for a positive scale."""
        return InputRange((self.minimum - shift) / scale, (self.maximum - shift) / scale, (self.mean - shift) / scale)


@dataclass(frozen=True)
class Folded:
    """Input ranges after the folds, and per shifted layer the constant (K,) that its input lost."""

    ranges: dict[str, InputRange]
    shifts: dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class QuantizedLinear:
    """One linear layer as the file will hold it: x_codes @ codes * scales * input_scale + bias."""

    name: str
    codes: NDArray[np.int8]  # (K, N)
    scales: NDArray[np.float32]  # (N,)
    input_scale: float
    bias: NDArray[np.float32]  # (N,)
    shift: NDArray[np.float32] | None  # (K,)


def linear_layers(frontend: nn.Module) -> dict[str, nn.Linear]:
    """Every linear layer by its path, in order of definition."""
    return {name: module for name, module in frontend.named_modules() if isinstance(module, nn.Linear)}


def calibrate(frontend: nn.Module, batches: Iterable[Tensor]) -> dict[str, InputRange]:
    """Input range of every linear layer over all batches (B, 3, h, w), in memory that does not grow with their number.

    Raises ExportError when there is no batch, or a layer's input is not finite.
    """
    seen: dict[str, _Running] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs, name=name: _see(seen, name, inputs[0]))
        for name, layer in linear_layers(frontend).items()
    ]
    try:
        with torch.inference_mode():
            for batch in batches:
                frontend(batch)
    finally:
        for hook in hooks:
            hook.remove()
    if not seen:
        raise ExportError("calibration needs at least one image, found none", "name a folder of images: --calibration")
    return {name: running.range(name) for name, running in seen.items()}


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


def _see(seen: dict[str, _Running], name: str, inputs: Tensor) -> None:
    rows = inputs.detach().reshape(-1, inputs.shape[-1])  # (B * T, K)
    minimum, maximum, total = rows.amin(0).cpu(), rows.amax(0).cpu(), rows.double().sum(0).cpu()
    if name in seen:
        earlier = seen[name]
        minimum, maximum = torch.minimum(earlier.minimum, minimum), torch.maximum(earlier.maximum, maximum)
        seen[name] = _Running(minimum, maximum, earlier.total + total, earlier.count + len(rows))
    else:
        seen[name] = _Running(minimum, maximum, total, len(rows))


class Shift(nn.Module):
    """x - shift, put behind an activation so that symmetric codes are used on both sides; shift is (K,)."""

    def __init__(self, shift: Tensor) -> None:
        super().__init__()
        self.shift = nn.Parameter(shift, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x - self.shift


@torch.no_grad()
def fold(frontend: nn.Module, sites: FoldSites, ranges: dict[str, InputRange]) -> Folded:
    """Even out the ranges inside `frontend`, changing its parameters in place but not its function."""
    ranges = dict(ranges)
    shifts: dict[str, NDArray[np.float32]] = {}
    for qkv_name, proj_name in sites.valued:
        _smooth_values(frontend.get_submodule(qkv_name), frontend.get_submodule(proj_name), proj_name, ranges)
    for norm_name, linear_name in sites.normed:
        norm, linear = frontend.get_submodule(norm_name), frontend.get_submodule(linear_name)
        shifts[linear_name] = _smooth_norm(norm, linear, linear_name, ranges)
    for activation_name, linear_name in sites.activated:
        shifts[linear_name] = _shift_activation(frontend, activation_name, linear_name, ranges)
    return Folded(ranges, shifts)


def _smooth_values(qkv: nn.Linear, proj: nn.Linear, name: str, ranges: dict[str, InputRange]) -> None:
    """Divide V's channels by s and multiply proj's columns by it: attention mixes tokens, never channels."""
    scale = _smoothing(ranges[name].absmax, proj.weight)
    start = qkv.out_features - proj.in_features  # V is the last third of the fused layer
    divisor = torch.from_numpy(scale)
    qkv.weight[start:] = (qkv.weight[start:].double() / divisor[:, None]).float()
    if qkv.bias is not None:
        qkv.bias[start:] = (qkv.bias[start:].double() / divisor).float()
    proj.weight.mul_(divisor[None, :].float())
    ranges[name] = ranges[name].moved(0.0, scale)


def _smooth_norm(
    norm: nn.LayerNorm, linear: nn.Linear, name: str, ranges: dict[str, InputRange]
) -> NDArray[np.float32]:
    """Make the norm's output (x - z) / s and give s and z to the linear layer: W' = W s, b' = b + W z."""
    seen = ranges[name]
    centre = (seen.minimum + seen.maximum) / 2.0
    scale = _smoothing((seen.maximum - seen.minimum) / 2.0, linear.weight)
    z, s = torch.from_numpy(centre), torch.from_numpy(scale)
    _add_to_bias(linear, linear.weight.double() @ z)
    linear.weight.mul_(s[None, :].float())
    norm.weight.copy_((norm.weight.double() / s).float())
    norm.bias.copy_(((norm.bias.double() - z) / s).float())
    ranges[name] = seen.moved(centre, scale)
    return (centre / scale).astype(np.float32)


def _shift_activation(
    frontend: nn.Module, activation_name: str, linear_name: str, ranges: dict[str, InputRange]
) -> NDArray[np.float32]:
    """Subtract the middle of the activation's range behind it: GELU's output is else half empty codes."""
    seen = ranges[linear_name]
    middle = float(seen.minimum.min() + seen.maximum.max()) / 2.0
    linear = frontend.get_submodule(linear_name)
    shift = torch.full((linear.in_features,), middle, dtype=torch.float32)
    _add_to_bias(linear, linear.weight.double() @ shift.double())
    parent_name, _, child = activation_name.rpartition(".")
    parent = frontend.get_submodule(parent_name)
    setattr(parent, child, nn.Sequential(getattr(parent, child), Shift(shift)))
    ranges[linear_name] = seen.moved(middle)
    return shift.numpy()


def _smoothing(absmax: Doubles, weight: Tensor) -> Doubles:
    """SmoothQuant's s = max|x|^1/2 / max|W|^1/2 per input channel; 1 where either is zero."""
    strongest = weight.abs().amax(0).double().numpy()  # (K,)
    usable = (absmax > 0) & (strongest > 0)
    return np.where(usable, np.sqrt(np.where(usable, absmax, 1.0) / np.where(usable, strongest, 1.0)), 1.0)


def _add_to_bias(linear: nn.Linear, extra: Tensor) -> None:
    before = 0.0 if linear.bias is None else linear.bias.double()
    linear.bias = nn.Parameter((before + extra).float(), requires_grad=False)


def weight_codes(weight: NDArray[np.float32], channel_axis: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Symmetric per-channel codes of `weight` (its shape) and scales (C,); code = clamp(round(w / scale)).

    A channel of zeros takes the layer's largest scale, so that weight noise still has a grid to act on.
    """
    others = tuple(axis for axis in range(weight.ndim) if axis != channel_axis)
    largest = np.abs(weight).max(axis=others).astype(np.float64)
    largest = np.where(largest > 0, largest, largest.max() or 1.0)
    scales = np.maximum(largest / CODE_MAX, np.finfo(np.float32).tiny).astype(np.float32)
    shape = [1] * weight.ndim
    shape[channel_axis] = -1
    codes = np.clip(np.rint(weight / scales.reshape(shape)), -CODE_MAX, CODE_MAX).astype(np.int8)
    return codes, scales


def quantize_linear(
    name: str, linear: nn.Linear, seen: InputRange, shift: NDArray[np.float32] | None
) -> QuantizedLinear:
    """Codes, scales and bias of one layer after the folds.

    The bias also takes up the mean effect of weight rounding: b + (W - W_q) E[x]. Without it a shifted input, whose
    mean is far from zero, would multiply every rounding error.
    """
    weight = linear.weight.detach().numpy().T  # (K, N)
    codes, scales = weight_codes(weight, channel_axis=1)
    bias = np.zeros(weight.shape[1]) if linear.bias is None else linear.bias.detach().double().numpy()
    error = weight.astype(np.float64) - codes * scales.astype(np.float64)
    bias = bias + seen.mean @ error
    input_scale = float(seen.absmax.max()) / CODE_MAX
    if not input_scale > np.finfo(np.float32).tiny:
        input_scale = 1.0 / CODE_MAX  # the layer saw zeros only; any finite scale codes them exactly
    return QuantizedLinear(name, codes, scales, input_scale, bias.astype(np.float32), shift)
