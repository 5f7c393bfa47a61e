"""Operators of torch, backward ones above all, in terms that ONNX has, chosen for onnxruntime's CPU kernels.

Every function here takes what the aten operator of its name takes. Which graph they are used in is left to
exporter.training_trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.nn import functional

from contract.errors import ExportError

aten = torch.ops.aten
_KEPT_WHOLE = (aten.native_layer_norm, aten.gelu, aten._softmax, aten._log_softmax, aten.addmm, aten.col2im)
_STOCK = (
    aten._softmax_backward_data, aten._log_softmax_backward_data,
    aten.select_backward, aten.native_group_norm_backward, aten.silu_backward, aten.hardtanh_backward,
    aten.sigmoid_backward, aten.tanh_backward, aten.linalg_vector_norm,
)  # fmt: skip


def decomposition_table() -> Mapping[torch._ops.OperatorBase, Callable[..., object]]:
    """What make_fx is to take apart, and how."""
    kept = {overload for packet in _KEPT_WHOLE for overload in _overloads(packet)}
    table = {op: function for op, function in core_aten_decompositions().items() if op not in kept}
    table.update(get_decompositions(_STOCK))
    table.update(_OWN)
    return table


def _overloads(packet: torch._ops.OpOverloadPacket) -> list[torch._ops.OpOverload]:
    return [getattr(packet, name) for name in packet.overloads()]


Pair = tuple[int, int]
SMALL_PLANE = 9  # places of a map; up to so many one product of the batch is faster than onnxruntime's of each image


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> Any:  # fmt: skip
    """Of small maps, a product (512 channels, 2 x 2, batch 32: 12 ms in place of 34); NotImplemented: as it is."""
    if transposed or weight.dim() != 4:
        return NotImplemented
    stride, padding, dilation = map(_pair, (stride, padding, dilation))
    size = tuple(
        (int(x.shape[2 + i]) + 2 * padding[i] - dilation[i] * (weight.shape[2 + i] - 1) - 1) // stride[i] + 1
        for i in (0, 1)
    )
    if not _is_small(size, groups):
        return NotImplemented
    out = weight.shape[0]
    flat = weight.reshape(out, -1) @ _columns(x, weight, size, stride, padding, dilation)
    z = flat.reshape(out, -1, *size).transpose(0, 1)
    return z if bias is None else z + bias.reshape(-1, 1, 1)


def convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: object, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int, wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Two-dimensional convolution only. Raises ExportError for a transposed or one- or three-dimensional one."""
    if transposed or weight.dim() != 4:
        raise ExportError(
            f"only plain 2-D convolutions can be trained on a device, found one with weight {tuple(weight.shape)}",
            "choose a cut in front of it, or another model",
        )
    stride, padding, dilation = map(_pair, (stride, padding, dilation))
    return (
        _conv_input(grad, x, weight, stride, padding, dilation, groups) if wanted[0] else None,
        _conv_weight(grad, x, weight, stride, padding, dilation, groups) if wanted[1] else None,
        grad.sum([0, 2, 3]) if wanted[2] else None,
    )


def _pair(values: Sequence[int]) -> Pair:
    first, second = tuple(values) * (2 if len(values) == 1 else 1)
    return first, second


def _is_small(size: Sequence[int], groups: int) -> bool:
    return groups == 1 and int(size[0]) * int(size[1]) <= SMALL_PLANE


def _columns(x: Tensor, weight: Tensor, size: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """What each place of the kernel sees of every image, (C * rows * columns, B * h * w): channels first, so that whole
    batches are copied at once."""
    first = x.transpose(0, 1)
    if padding != (0, 0):
        first = functional.pad(first, (padding[1], padding[1], padding[0], padding[0]))
    taps = [seen.reshape(x.shape[1], -1) for seen in _taps(first, 2, weight, size, stride, dilation)]
    if len(taps) == 1:
        return taps[0]
    return torch.stack(taps, dim=1).reshape(x.shape[1] * len(taps), -1)


def _taps(
    padded: Tensor, axis: int, weight: Tensor, size: Sequence[int], stride: Pair, dilation: Pair
) -> Iterator[Tensor]:
    """What each place of the kernel, row by row, sees of maps whose height is `axis` and whose width follows it."""
    before = (slice(None),) * axis
    for row in range(weight.shape[2]):
        for column in range(weight.shape[3]):
            starts = row * dilation[0], column * dilation[1]
            cuts = (slice(starts[i], starts[i] + (size[i] - 1) * stride[i] + 1, stride[i]) for i in (0, 1))
            yield padded[(*before, *cuts)]


def _conv_input(
    grad: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Tensor:
    """Of small maps one product and a fold, else a forward convolution with the mirrored kernel: onnxruntime's
    ConvTranspose is 1.5 times slower."""
    if _is_small(grad.shape[2:], groups):
        flat = weight.reshape(weight.shape[0], -1).t() @ _channels_first(grad)
        spread = flat.reshape(flat.shape[0], -1, int(grad.shape[2]) * int(grad.shape[3])).transpose(0, 1)
        kernel, image = list(weight.shape[2:]), [int(each) for each in x.shape[2:]]
        return aten.col2im(spread, image, kernel, list(dilation), list(padding), list(stride))
    mirrored = [dilation[i] * (weight.shape[2 + i] - 1) - padding[i] for i in (0, 1)]
    if stride == (1, 1) and min(mirrored) >= 0:
        out, each, *kernel = weight.shape
        grouped = MIRROR(weight) if max(kernel) > 1 else weight
        grouped = grouped.reshape(groups, out // groups, each, *kernel).transpose(1, 2)
        turned = grouped.reshape(groups * each, out // groups, *kernel)
        return aten.convolution(grad, turned, None, [1, 1], mirrored, list(dilation), False, [0, 0], groups)
    reached = [
        (grad.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (weight.shape[2 + i] - 1) + 1
        for i in (0, 1)
    ]
    rest = [int(x.shape[2 + i]) - reached[i] for i in (0, 1)]
    return aten.convolution(grad, weight, None, list(stride), list(padding), list(dilation), True, rest, groups)


def _conv_weight(
    grad: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Tensor:
    """One slice of the channels-last input and one matrix product per kernel position; of small maps one product."""
    if _is_small(grad.shape[2:], groups):
        size = int(grad.shape[2]), int(grad.shape[3])
        columns_seen = _columns(x, weight, size, stride, padding, dilation)
        return (_channels_first(grad) @ columns_seen.t()).reshape(weight.shape)
    out, each, rows, columns = weight.shape
    channels = groups * each
    height, width = grad.shape[2], grad.shape[3]
    if (
        stride == (rows, columns)
        and padding == (0, 0)
        and groups == 1
        and x.shape[2:] == (height * rows, width * columns)
    ):
        patches = x.reshape(-1, channels, height, rows, width, columns).permute(0, 2, 4, 1, 3, 5)
        return (_channels_first(grad) @ patches.reshape(-1, channels * rows * columns)).reshape(weight.shape)
    last = x.permute(0, 2, 3, 1)
    if padding != (0, 0):
        last = functional.pad(last, (0, 0, padding[1], padding[1], padding[0], padding[0]))
    flat = _channels_first(grad)  # turned inside a product it is 1.5 times slower
    taps = []
    for seen in _taps(last, 1, weight, (height, width), stride, dilation):
        if groups == 1:
            taps.append(flat @ seen.reshape(-1, channels))  # (out, channels)
        else:
            split = seen.reshape(-1, groups, each).permute(1, 0, 2)
            taps.append(torch.bmm(flat.reshape(groups, out // groups, -1), split).reshape(out, each))
    return torch.stack(taps, dim=2).reshape(weight.shape)


def _channels_first(maps: Tensor) -> Tensor:
    """(B, C, h, w) as (C, B * h * w)."""
    return maps.permute(1, 0, 2, 3).reshape(maps.shape[1], -1)


_LIBRARY = torch.library.Library("cutlayer", "DEF")
_LIBRARY.define(
    "normalise(Tensor x, Tensor scale, Tensor shift, Tensor a, Tensor b, float eps) -> (Tensor, Tensor, Tensor)"
)
NORMALISE = torch.ops.cutlayer.normalise.default  # ONNX's BatchNormalization in training mode; traced, never run


_LIBRARY.define("between(Tensor x, float slope, float middle) -> Tensor")
BETWEEN = torch.ops.cutlayer.between.default  # slope * x + middle, held in 0..1: ONNX's HardSigmoid; never run


_LIBRARY.define("mirror(Tensor kernel) -> Tensor")
MIRROR = torch.ops.cutlayer.mirror.default  # a finite kernel (out, in, rows, columns), turned round; traced, never run


@torch.library.register_fake("cutlayer::mirror")
def _mirrored(kernel: Tensor) -> Tensor:
    return torch.empty_like(kernel)


@torch.library.register_fake("cutlayer::between")
def _between(x: Tensor, slope: float, middle: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("cutlayer::normalise")
def _normalised(
    x: Tensor, scale: Tensor, shift: Tensor, a: Tensor, b: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(a), torch.empty_like(b)


class BatchNorm(torch.autograd.Function):
    """BatchNorm in train mode: output and both new running statistics.

    ONNX counts a momentum the other way round; with 0 its statistics are the batch's own. onnxruntime overwrites the
    statistics that it is given, so it gets scratch copies. torch's running variance is the unbiased one, ONNX's not.
    """

    @staticmethod
    def forward(
        context: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor,
        momentum: float, epsilon: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        scale = torch.ones_like(mean) if weight is None else weight
        shift = torch.zeros_like(mean) if bias is None else bias
        out, batch_mean, batch_variance = NORMALISE(x, scale, shift, mean * 0.5, variance * 0.5, epsilon)
        count = _rows(x)
        unbiased = batch_variance * (count / (count - 1.0))
        moved = mean * (1 - momentum) + batch_mean * momentum, variance * (1 - momentum) + unbiased * momentum
        context.save_for_backward(x, weight, batch_mean, torch.rsqrt(batch_variance + epsilon))
        context.mark_non_differentiable(*moved)
        return out, *moved

    @staticmethod
    def backward(context: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = context.saved_tensors
        wanted = context.needs_input_grad[:3]
        grads = native_batch_norm_backward(grad, x, weight, None, None, mean, inverse, True, 0.0, wanted)
        return *grads, None, None, None, None


def _rows(x: Tensor) -> Tensor:
    """How many values per channel, as a float tensor: B is known only when the graph runs."""
    spatial = 1
    for size in x.shape[2:]:
        spatial *= size
    return torch.full((), spatial, dtype=torch.float32) * x.shape[0]


def native_batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor | None, variance: Tensor | None,
    save_mean: Tensor | None, save_inverse: Tensor | None, training: bool, epsilon: float, wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradient of x is a * grad + b * x + c with one a, b, c per channel."""
    axes = [0, *range(2, x.dim())]
    shape = [1, -1] + [1] * (x.dim() - 2)
    if training:
        assert save_mean is not None and save_inverse is not None
        centre, inverse = save_mean, save_inverse
    else:
        assert mean is not None and variance is not None
        centre, inverse = mean, torch.rsqrt(variance + epsilon)
    scale = inverse if weight is None else weight * inverse
    if not training and not (wanted[1] or wanted[2]):
        return grad * scale.reshape(shape), None, None
    total = grad.sum(axes)
    along = ((x - centre.reshape(shape)) * grad).sum(axes)  # before any factor: x may be far from 0
    weight_grad = along * inverse if wanted[1] else None
    bias_grad = total if wanted[2] else None
    if not wanted[0]:
        return None, weight_grad, bias_grad
    if not training:
        return grad * scale.reshape(shape), weight_grad, bias_grad
    count = _rows(x)
    slope = -scale * inverse * inverse * along / count
    constant = -scale * total / count - slope * centre
    plain = torch.zeros(centre.shape), torch.ones(centre.shape)
    moved = aten._native_batch_norm_legit_no_training(x, slope, constant, *plain, 0.0, 0.0)[0]  # b * x + c in one pass
    return grad * scale.reshape(shape) + moved, weight_grad, bias_grad


def threshold_backward(grad: Tensor, x: Tensor, threshold: float) -> Tensor:
    """A product with a mask: onnxruntime's Where is 6 times slower on a CPU."""
    return grad * (x > threshold).to(grad.dtype)


def native_layer_norm_backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor, inverse: Tensor, weight: Tensor | None,
    bias: Tensor | None, wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Over the last axis in few passes; the sums along it are products with the weight. Other axes as torch does it."""
    if len(shape) != 1 or weight is None:
        return _STOCK_LAYER_NORM(grad, x, shape, mean, inverse, weight, bias, wanted)
    rows = list(range(x.dim() - 1))
    normal = (x - mean) * inverse
    along = grad * normal
    weight_grad = along.sum(rows) if wanted[1] else None
    bias_grad = grad.sum(rows) if wanted[2] else None
    if not wanted[0]:
        return None, weight_grad, bias_grad
    column = (weight / shape[0]).unsqueeze(1)
    level, slope = grad @ column, along @ column
    return (grad * weight - (normal * slope + level)) * inverse, weight_grad, bias_grad


def gelu_backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    """With as few passes over the activations as standard operators allow: they are most of its time."""
    if approximate != "none":
        return _STOCK_GELU(grad, x, approximate=approximate)
    scaled = x * math.sqrt(0.5)
    density = scaled * torch.exp(-0.5 * math.log(math.pi) - scaled * scaled)  # x / sqrt(2 pi) * exp(-x * x / 2)
    return grad * (BETWEEN(torch.erf(scaled), 0.5, 0.5) + density)


def avg_pool2d_backward(
    grad: Tensor, x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil_mode: bool,
    count_padding: bool, divisor: int | None,
) -> Tensor:  # fmt: skip
    """Windows that touch neither each other nor the rim only. Raises ExportError for others."""
    kernel = tuple(kernel) * (2 if len(kernel) == 1 else 1)
    stride = tuple(stride) * (2 if len(stride) == 1 else 1) or kernel
    height, width = grad.shape[2:]
    rest = [int(x.shape[2 + i]) - int(grad.shape[2 + i]) * kernel[i] for i in (0, 1)]
    if kernel != stride or any(padding) or min(rest) < 0:
        raise ExportError(
            f"only average pools with windows side by side can be trained on a device, found {kernel} every {stride}",
            "choose a cut in front of it, or another model",
        )
    each = (grad / (divisor or kernel[0] * kernel[1])).reshape(-1, x.shape[1], height, 1, width, 1)
    spread = each.expand(-1, -1, -1, kernel[0], -1, kernel[1]).reshape(
        -1, x.shape[1], height * kernel[0], width * kernel[1]
    )
    return functional.pad(spread, (0, rest[1], 0, rest[0])) if any(rest) else spread


def slice_backward(grad: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Tensor:
    """Zeros around what the slice had taken."""
    size = sizes[dim]
    start = start + size if start < 0 else start
    if step != 1:
        parts = grad.unsqueeze(dim + 1)
        parts = functional.pad(parts, [0, 0] * (grad.dim() - dim - 1) + [0, step - 1])
        grad = parts.flatten(dim, dim + 1)
        surplus = start + grad.shape[dim] - size
        if surplus > 0:
            grad = grad.narrow(dim, 0, grad.shape[dim] - surplus)
    after = size - start - grad.shape[dim]
    return functional.pad(grad, [0, 0] * (grad.dim() - dim - 1) + [start, after])


def embedding_dense_backward(
    grad: Tensor, indices: Tensor, rows: int, padding_index: int, scale_by_frequency: bool
) -> Tensor:
    """A product with one-hot rows: onnxruntime's ScatterND(add) races with itself where an index comes twice."""
    flat = indices.reshape(-1)
    hot = (torch.arange(rows).unsqueeze(1) == flat.unsqueeze(0)).to(grad.dtype)  # (rows, B*K)
    return hot @ grad.reshape(-1, grad.shape[-1])


def max_pool2d_with_indices_backward(
    grad: Tensor, x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], ceil_mode: bool, indices: Tensor,
) -> Tensor:  # fmt: skip
    """Every gradient back to where its maximum came from."""
    channels, height, width = x.shape[1:]
    flat = x.new_zeros(x.shape[0], channels, height * width)
    return flat.scatter_add(2, indices.flatten(2), grad.flatten(2)).reshape(x.shape)


_STOCK_GELU = get_decompositions([aten.gelu_backward])[aten.gelu_backward.default]
_STOCK_LAYER_NORM = get_decompositions([aten.native_layer_norm_backward])[aten.native_layer_norm_backward.default]
_OWN: dict[torch._ops.OperatorBase, Callable[..., object]] = {
    aten.avg_pool2d_backward.default: avg_pool2d_backward,
    aten.convolution.default: convolution,
    aten.gelu_backward.default: gelu_backward,
    aten.native_layer_norm_backward.default: native_layer_norm_backward,
    aten.convolution_backward.default: convolution_backward,
    aten.native_batch_norm_backward.default: native_batch_norm_backward,
    aten.threshold_backward.default: threshold_backward,
    aten.slice_backward.default: slice_backward,
    aten.embedding_dense_backward.default: embedding_dense_backward,
    aten.max_pool2d_with_indices_backward.default: max_pool2d_with_indices_backward,
}
