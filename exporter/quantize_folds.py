"""Rescalings of a frontend that keep its function and even out the ranges that INT8 has to hold.

Codes and scales are exporter.quantize's; which modules may be folded is told by the model's family.

An outlier channel costs 20 dB without them, and no choice of scales gets that back: a shift and SmoothQuant (Xiao et
al. 2023, alpha 1/2) go into LayerNorm, the same for the channels of V into the fused qkv; the hidden units of an MLP
that reach farthest get a thin float product of their own; what is left behind the activation is shifted to the middle
of its range; BatchNorm is merged into the convolution in front of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from exporter.models import FoldSites
from exporter.quantize import Doubles, InputRange, Quantizer, Ranges

_TAIL_STEP = 16  # units in the tail and in the rest stay multiples of this where the layer is one


@dataclass(frozen=True)
class Folded:
    """Ranges after the folds, and per shifted layer the constant (K,) that its input lost.

    `tails` are the linear layers whose product stays float; `centred` maps a layer that reads a shifted activation to
    the path of the stored shift.
    """

    ranges: Ranges
    shifts: dict[str, NDArray[np.float32]]
    tails: tuple[str, ...]
    centred: dict[str, str]


class Shift(nn.Module):
    """x - shift, put behind an activation so that symmetric codes are used on both sides; shift is (K,)."""

    def __init__(self, shift: Tensor) -> None:
        super().__init__()
        self.shift = nn.Parameter(shift, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x - self.shift


class TailedLinear(nn.Module):
    """One linear layer (K -> N) as two: `tail` takes the last U inputs, `body` the others, shifted, and the bias."""

    def __init__(self, linear: nn.Linear, units: int) -> None:
        super().__init__()
        rest = linear.in_features - units
        self.shift: nn.Module = nn.Identity()
        self.body = nn.Linear(rest, linear.out_features, bias=linear.bias is not None)
        self.tail = nn.Linear(units, linear.out_features, bias=False)
        self.body.weight = nn.Parameter(linear.weight[:, :rest].contiguous(), requires_grad=False)
        self.tail.weight = nn.Parameter(linear.weight[:, rest:].contiguous(), requires_grad=False)
        self.body.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        rest, last = x.split([self.body.in_features, self.tail.in_features], -1)
        return self.body(self.shift(rest)) + self.tail(last)


def sources(frontend: nn.Module, example: Tensor) -> dict[str, str]:
    """For modules that read another module's output as it is: path -> path of the module that made it."""
    made: dict[int, tuple[str, Tensor]] = {}  # the tensor too: a freed one's id may be used again
    found: dict[str, str] = {}

    def read(name: str, inputs: tuple[object, ...]) -> None:
        if inputs and id(inputs[0]) in made:
            found[name] = made[id(inputs[0])][0]

    def make(name: str, output: object) -> None:
        if isinstance(output, Tensor):
            made.setdefault(id(output), (name, output))

    leaves = [(name, module) for name, module in frontend.named_modules() if not next(module.children(), None)]
    hooks = [each.register_forward_pre_hook(lambda _, inputs, name=name: read(name, inputs)) for name, each in leaves]
    hooks += [each.register_forward_hook(lambda _, inputs, out, name=name: make(name, out)) for name, each in leaves]
    try:
        with torch.no_grad():
            frontend(example)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@torch.no_grad()
def merge_batch_norms(frontend: nn.Module, example: Tensor) -> tuple[str, ...]:
    """Write every BatchNorm that reads one convolution into its weights, in place; the names of those merged.

    W' = W gamma / sigma, b' = (b - mean) gamma / sigma + beta.
    """
    merged = []
    modules = dict(frontend.named_modules())
    for norm_name, source in sources(frontend, example).items():
        norm, layer = modules[norm_name], modules[source]
        if type(norm) is not nn.BatchNorm2d or type(layer) is not nn.Conv2d or norm.running_var is None:
            continue
        gain = torch.rsqrt(norm.running_var.double() + norm.eps)
        offset = torch.zeros_like(gain)
        if norm.affine:
            gain, offset = gain * norm.weight.double(), norm.bias.double()
        before = 0.0 if layer.bias is None else layer.bias.double()
        layer.bias = nn.Parameter(((before - norm.running_mean.double()) * gain + offset).float(), requires_grad=False)
        layer.weight.copy_((layer.weight.double() * gain[:, None, None, None]).float())
        _replace(frontend, norm_name, nn.Identity())
        merged.append(norm_name)
    return tuple(merged)


@torch.no_grad()
def fold(frontend: nn.Module, sites: FoldSites, ranges: Ranges, quantizer: Quantizer, feeds: dict[str, str]) -> Folded:
    """Even out the ranges inside `frontend`, changing its modules in place but not its function.

    `feeds` is what `sources` found.
    """
    inputs = dict(ranges.inputs)
    shifts: dict[str, NDArray[np.float32]] = {}
    centred: dict[str, str] = {}
    tails = []
    for qkv_name, proj_name in sites.valued if quantizer.smooth else ():
        _smooth_values(frontend.get_submodule(qkv_name), frontend.get_submodule(proj_name), proj_name, inputs)
    for norm_name, linear_name in sites.normed if quantizer.smooth else ():
        norm, linear = frontend.get_submodule(norm_name), frontend.get_submodule(linear_name)
        shifts[linear_name] = _smooth_norm(norm, linear, linear_name, inputs)
    for activation_name, linear_name in sites.activated:
        name = _part_tail(frontend, linear_name, feeds.get(activation_name), inputs, quantizer.tail_units)
        if name != linear_name:
            tails.append(f"{linear_name}.tail")
        if quantizer.centre:
            place = activation_name if name == linear_name else f"{linear_name}.shift"
            shifts[name], centred[name] = _shift_activation(frontend, place, name, inputs)
    return Folded(Ranges(inputs, ranges.outputs), shifts, tuple(tails), centred)


def _smooth_values(qkv: nn.Linear, proj: nn.Linear, name: str, inputs: dict[str, InputRange]) -> None:
    """Divide V's channels by s and multiply proj's columns by it: attention mixes tokens, never channels."""
    scale = _smoothing(inputs[name].absmax, proj.weight)
    start = qkv.out_features - proj.in_features  # V is the last third of the fused layer
    divisor = torch.from_numpy(scale)
    qkv.weight[start:] = (qkv.weight[start:].double() / divisor[:, None]).float()
    if qkv.bias is not None:
        qkv.bias[start:] = (qkv.bias[start:].double() / divisor).float()
    proj.weight.mul_(divisor[None, :].float())
    inputs[name] = inputs[name].moved(0.0, scale)


def _smooth_norm(
    norm: nn.LayerNorm, linear: nn.Linear, name: str, inputs: dict[str, InputRange]
) -> NDArray[np.float32]:
    """Make the norm's output (x - z) / s and give s and z to the linear layer: W' = W s, b' = b + W z."""
    seen = inputs[name]
    centre = (seen.minimum + seen.maximum) / 2.0
    scale = _smoothing((seen.maximum - seen.minimum) / 2.0, linear.weight)
    z, s = torch.from_numpy(centre), torch.from_numpy(scale)
    _add_to_bias(linear, linear.weight.double() @ z)
    linear.weight.mul_(s[None, :].float())
    norm.weight.copy_((norm.weight.double() / s).float())
    norm.bias.copy_(((norm.bias.double() - z) / s).float())
    inputs[name] = seen.moved(centre, scale)
    return (centre / scale).astype(np.float32)


def _part_tail(
    frontend: nn.Module, name: str, source: str | None, inputs: dict[str, InputRange], most_units: int
) -> str:
    """Put the farthest-reaching hidden units last and split their product off; the path of the layer that is INT8.

    Moving units needs the layer that makes them: `source`, which the activation reads.
    """
    linear = frontend.get_submodule(name)
    units = min(most_units, linear.in_features // 16 // _TAIL_STEP * _TAIL_STEP)
    maker = None if source is None else frontend.get_submodule(source)
    if not units or not isinstance(maker, nn.Linear) or maker.out_features != linear.in_features:
        return name
    seen = inputs.pop(name)
    order = np.argsort(seen.absmax, kind="stable")
    moved = torch.from_numpy(order)
    maker.weight.copy_(maker.weight[moved])
    if maker.bias is not None:
        maker.bias.copy_(maker.bias[moved])
    linear.weight.copy_(linear.weight[:, moved])
    _replace(frontend, name, TailedLinear(linear, units))
    inputs[f"{name}.body"], inputs[f"{name}.tail"] = seen.only(order[:-units]), seen.only(order[-units:])
    return f"{name}.body"


def _shift_activation(
    frontend: nn.Module, place: str, name: str, inputs: dict[str, InputRange]
) -> tuple[NDArray[np.float32], str]:
    """Subtract the middle of the range behind module `place`: GELU's output is else half empty codes.

    Noise on the layer's weights must respect this shift, which is far from the input's mean and would be multiplied:
    18 dB at the cut become 3 dB (measured on a trained ViT-S, alpha 0.1). A shift folded into LayerNorm centres its
    input: no difference. Hence the path of the stored shift is told, too.
    """
    seen, linear = inputs[name], frontend.get_submodule(name)
    middle = float(seen.minimum.min() + seen.maximum.max()) / 2.0
    shift = torch.full((linear.in_features,), middle, dtype=torch.float32)
    _add_to_bias(linear, linear.weight.double() @ shift.double())
    inputs[name] = seen.moved(middle)
    _replace(frontend, place, nn.Sequential(frontend.get_submodule(place), Shift(shift)))
    return shift.numpy(), f"{place}.1.shift"


def _replace(frontend: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(frontend.get_submodule(parent), child, module)


def _smoothing(absmax: Doubles, weight: Tensor) -> Doubles:
    """SmoothQuant's s = max|x|^1/2 / max|W|^1/2 per input channel; 1 where either is zero."""
    strongest = weight.abs().amax(0).double().numpy()  # (K,)
    usable = (absmax > 0) & (strongest > 0)
    return np.where(usable, np.sqrt(np.where(usable, absmax, 1.0) / np.where(usable, strongest, 1.0)), 1.0)


def _add_to_bias(linear: nn.Linear, extra: Tensor) -> None:
    before = 0.0 if linear.bias is None else linear.bias.double()
    linear.bias = nn.Parameter((before + extra).float(), requires_grad=False)
