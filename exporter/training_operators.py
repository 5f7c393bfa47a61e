"""What one aten operator of a traced training graph is in ONNX, opset 20.

A rule takes the writer and the node and gives the names of the node's results. An operator without a rule here is
refused by exporter.training_onnx, so that nothing is written that has not been thought about.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from onnx import NodeProto, TensorProto, helper, numpy_helper
from torch.fx import Node

from exporter.training_decompositions import BETWEEN, NORMALISE

aten = torch.ops.aten

TYPES = {
    torch.float32: (TensorProto.FLOAT, np.float32), torch.int64: (TensorProto.INT64, np.int64),
    torch.bool: (TensorProto.BOOL, np.bool_), torch.int32: (TensorProto.INT32, np.int32),
    torch.float64: (TensorProto.DOUBLE, np.float64),
}  # fmt: skip


class Writer:
    """ONNX nodes and small constants in the making; `names` says what an fx node's results are called."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: dict[tuple[str, tuple[int, ...], bytes], TensorProto] = {}
        self.names: dict[Node, Any] = {}
        self._count = 0

    def emit(self, kind: str, inputs: Sequence[str], outputs: int = 1, **attributes: object) -> Any:
        """Append a node; its one output's name, or a tuple of names."""
        names = []
        for _ in range(outputs):
            names.append(f"v{self._count}")
            self._count += 1
        self.nodes.append(helper.make_node(kind, list(inputs), names, **attributes))
        return names[0] if outputs == 1 else tuple(names)

    def constant(self, values: object, dtype: Any = np.int64) -> str:
        array = np.asarray(values, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self.constants:
            self.constants[key] = numpy_helper.from_array(array, f"c{len(self.constants)}")
        return self.constants[key].name

    def of(self, node: Node) -> str:
        return self.names[node]

    def as_tensor(self, value: object, dtype: torch.dtype) -> str:
        """A tensor, a number or a size as an operand of the given type."""
        code, kind = TYPES[dtype]
        if not isinstance(value, Node):
            return self.constant(value, kind)
        name = self.of(value)
        found = value.meta["val"]
        if not isinstance(found, torch.Tensor):  # a size: one-dimensional here
            name = self.emit("Squeeze", [name, self.constant([0])])
            found_dtype = torch.int64
        else:
            found_dtype = found.dtype
        return name if found_dtype == dtype else self.emit("Cast", [name], to=code)

    def sizes(self, sizes: Sequence[object]) -> str:
        """A shape as one int64 tensor."""
        if all(isinstance(size, int) for size in sizes):
            return self.constant(list(sizes))
        parts = [self.of(size) if isinstance(size, Node) else self.constant([size]) for size in sizes]
        return self.emit("Concat", parts, axis=0) if len(parts) > 1 else parts[0]


Rule = Callable[[Writer, Node], Any]
RULES: dict[object, Rule] = {}


def rule(*targets: object) -> Callable[[Rule], Rule]:
    def add(function: Rule) -> Rule:
        for target in targets:
            RULES[target] = function
        return function

    return add


def _value(node: Node) -> torch.Tensor:
    return node.meta["val"]


def _argument(node: Node, place: int, default: object = None) -> Any:
    return node.args[place] if len(node.args) > place else default


def _axes(axes: object, rank: int) -> list[int]:
    return [axis % rank for axis in (axes if isinstance(axes, (list, tuple)) else [axes])]


MIRRORED = 49  # places of a kernel that is turned round by a product


# Element by element


def _unary(kind: str, **attributes: object) -> Rule:
    return lambda w, node: w.emit(kind, [w.of(node.args[0])], **attributes)


for _target, _kind in {
    aten.neg.default: "Neg", aten.relu.default: "Relu", aten.sigmoid.default: "Sigmoid", aten.tanh.default: "Tanh",
    aten.erf.default: "Erf", aten.exp.default: "Exp", aten.log.default: "Log", aten.sqrt.default: "Sqrt",
    aten.abs.default: "Abs", aten.reciprocal.default: "Reciprocal", aten.sin.default: "Sin", aten.cos.default: "Cos",
    aten.sign.default: "Sign", aten.logical_not.default: "Not", aten.bitwise_not.default: "Not",
    aten.hardswish.default: "HardSwish", aten.copy.default: "Identity", aten.clone.default: "Identity",
}.items():  # fmt: skip
    RULES[_target] = _unary(_kind)


def _binary(kind: str, compares: bool = False) -> Rule:
    def write(w: Writer, node: Node) -> str:
        left, right = node.args[:2]
        tensors = [each.meta["val"] for each in (left, right) if isinstance(each, Node)]
        floats = [each.dtype for each in tensors if isinstance(each, torch.Tensor)]
        dtype = next((each for each in floats if each.is_floating_point), floats[0]) if compares else _value(node).dtype
        factor = node.kwargs.get("alpha", 1)
        operand = w.as_tensor(right, dtype)
        if factor != 1:
            operand = w.emit("Mul", [operand, w.as_tensor(factor, dtype)])
        return w.emit(kind, [w.as_tensor(left, dtype), operand])

    return write


for _packet, _kind in (
    (aten.add, "Add"), (aten.sub, "Sub"), (aten.mul, "Mul"), (aten.div, "Div"), (aten.pow, "Pow"),
    (aten.maximum, "Max"), (aten.minimum, "Min"),
):  # fmt: skip
    for _name in ("Tensor", "Scalar", "Tensor_Scalar", "default"):
        if _name in _packet.overloads():
            RULES[getattr(_packet, _name)] = _binary(_kind)
for _packet, _kind in ((aten.gt, "Greater"), (aten.ge, "GreaterOrEqual"), (aten.lt, "Less"), (aten.le, "LessOrEqual"),
                       (aten.eq, "Equal")):  # fmt: skip
    RULES[_packet.Tensor] = RULES[_packet.Scalar] = _binary(_kind, compares=True)
RULES[aten.logical_and.default] = RULES[aten.bitwise_and.Tensor] = _binary("And")
RULES[aten.logical_or.default] = RULES[aten.bitwise_or.Tensor] = _binary("Or")


@rule(aten.rsqrt.default)
def _rsqrt(w: Writer, node: Node) -> str:
    return w.emit("Reciprocal", [w.emit("Sqrt", [w.of(node.args[0])])])


@rule(aten._to_copy.default)
def _cast(w: Writer, node: Node) -> str:
    return w.as_tensor(node.args[0], _value(node).dtype)


@rule(aten.where.self)
def _where(w: Writer, node: Node) -> str:
    condition, yes, no = node.args
    dtype = _value(node).dtype
    return w.emit("Where", [w.of(condition), w.as_tensor(yes, dtype), w.as_tensor(no, dtype)])


@rule(aten.clamp.default, aten.hardtanh.default)
def _clip(w: Writer, node: Node) -> str:
    dtype = _value(node).dtype
    low, high = _argument(node, 1), _argument(node, 2)
    if node.target is aten.hardtanh.default:
        low, high = _argument(node, 1, -1.0), _argument(node, 2, 1.0)
    bounds = ["" if each is None else w.as_tensor(each, dtype) for each in (low, high)]
    return w.emit("Clip", [w.of(node.args[0]), *bounds])


@rule(aten.gelu.default)
def _gelu(w: Writer, node: Node) -> str:
    return w.emit("Gelu", [w.of(node.args[0])], approximate=node.kwargs.get("approximate", "none"))


@rule(BETWEEN)
def _between(w: Writer, node: Node) -> str:
    x, slope, middle = node.args
    return w.emit("HardSigmoid", [w.of(x)], alpha=slope, beta=middle)


@rule(aten.leaky_relu.default)
def _leaky(w: Writer, node: Node) -> str:
    return w.emit("LeakyRelu", [w.of(node.args[0])], alpha=float(_argument(node, 1, 0.01)))


# Sizes: one-dimensional int64 tensors of one value


@rule(aten.sym_size.int)
def _size(w: Writer, node: Node) -> str:
    axis = node.args[1]
    return w.emit("Shape", [w.of(node.args[0])], start=axis, end=axis + 1)


def _size_arithmetic(kind: str) -> Rule:
    def write(w: Writer, node: Node) -> str:
        return w.emit(kind, [w.of(each) if isinstance(each, Node) else w.constant([each]) for each in node.args])

    return write


for _target, _kind in ((operator.mul, "Mul"), (operator.add, "Add"), (operator.sub, "Sub"), (operator.floordiv, "Div")):
    RULES[_target] = _size_arithmetic(_kind)


@rule(operator.getitem)
def _item(w: Writer, node: Node) -> str:
    return w.names[node.args[0]][node.args[1]]


# Made from nothing


@rule(aten.full.default, aten.full_like.default, aten.scalar_tensor.default, aten.zeros.default, aten.ones.default)
def _full(w: Writer, node: Node) -> str:
    dtype = _value(node).dtype
    fixed = {aten.zeros.default: 0, aten.ones.default: 1}
    value = node.args[0] if node.target is aten.scalar_tensor.default else fixed.get(node.target, _argument(node, 1))
    name = w.as_tensor(value, dtype)
    if node.target is aten.full_like.default:
        return w.emit("Expand", [name, w.emit("Shape", [w.of(node.args[0])])])
    shape = [] if node.target is aten.scalar_tensor.default else node.args[0]
    return w.emit("Expand", [name, w.sizes(shape)]) if len(shape) else name


@rule(aten.arange.start_step, aten.arange.default, aten.arange.start)
def _arange(w: Writer, node: Node) -> str:
    start, end, step = (0, node.args[0], 1) if node.target is aten.arange.default else (*node.args, 1)[:3]
    dtype = _value(node).dtype
    return w.emit("Range", [w.as_tensor(each, dtype) for each in (start, end, step)])


# Shapes


@rule(aten.reshape.default, aten.view.default)
def _reshape(w: Writer, node: Node) -> str:
    return w.emit("Reshape", [w.of(node.args[0]), w.sizes(node.args[1])])


@rule(aten.expand.default)
def _expand(w: Writer, node: Node) -> str:
    sizes = [1 if size == -1 else size for size in node.args[1]]  # ONNX broadcasts both ways
    return w.emit("Expand", [w.of(node.args[0]), w.sizes(sizes)])


@rule(aten.permute.default)
def _permute(w: Writer, node: Node) -> str:
    return w.emit("Transpose", [w.of(node.args[0])], perm=_axes(node.args[1], _value(node).dim()))


@rule(aten.unsqueeze.default)
def _unsqueeze(w: Writer, node: Node) -> str:
    return w.emit("Unsqueeze", [w.of(node.args[0]), w.constant(_axes(node.args[1], _value(node).dim()))])


@rule(aten.squeeze.dims, aten.squeeze.dim)
def _squeeze(w: Writer, node: Node) -> str:
    shape = _value(node.args[0]).shape
    axes = [axis for axis in _axes(node.args[1], len(shape)) if isinstance(shape[axis], int) and shape[axis] == 1]
    return w.emit("Squeeze", [w.of(node.args[0]), w.constant(axes)]) if axes else w.of(node.args[0])


@rule(aten.slice.Tensor)
def _slice(w: Writer, node: Node) -> str:
    """A slice of a slice along another axis is one copy instead of two."""
    cuts = [_cut(node)]
    source = node.args[0]
    while source.target is aten.slice.Tensor and _cut(source)[2] not in {axis for _, _, axis, _ in cuts}:
        cuts.append(_cut(source))
        source = source.args[0]
    starts, ends, axes, steps = zip(*cuts, strict=True)
    return w.emit("Slice", [w.of(source), w.sizes(starts), w.sizes(ends), w.constant(axes), w.constant(steps)])


def _cut(node: Node) -> tuple[Any, Any, int, int]:
    """Start, end, axis, step of a slice."""
    axis, start, end, step = (_argument(node, place, default) for place, default in ((1, 0), (2, 0), (3, None), (4, 1)))
    return (
        0 if start is None else start,
        np.iinfo(np.int64).max if end is None else end,
        axis % _value(node).dim(),
        step,
    )


@rule(aten.flip.default)
def _flip(w: Writer, node: Node) -> str:
    """A kernel is mirrored by a product with a permutation: onnxruntime's Slice backwards takes twice as long."""
    shape = list(_value(node).shape)
    axes = _axes(node.args[1], len(shape))
    are_last, are_known = sorted(axes) == [*range(min(axes), len(shape))], all(isinstance(n, int) for n in shape)
    if are_last and are_known and (places := math.prod(shape[axis] for axis in axes)) <= MIRRORED:
        flat = w.emit("Reshape", [w.of(node.args[0]), w.constant([-1, places])])
        turned = w.emit("MatMul", [flat, w.constant(np.eye(places)[::-1], np.float32)])
        return w.emit("Reshape", [turned, w.constant(shape)])
    ends = [[-1] * len(axes), [np.iinfo(np.int64).min] * len(axes), axes, [-1] * len(axes)]
    return w.emit("Slice", [w.of(node.args[0]), *map(w.constant, ends)])


@rule(aten.select.int)
def _select(w: Writer, node: Node) -> str:
    axis = node.args[1] % _value(node.args[0]).dim()
    return w.emit("Gather", [w.of(node.args[0]), w.constant(node.args[2])], axis=axis)


@rule(aten.cat.default)
def _cat(w: Writer, node: Node) -> str:
    axis = _argument(node, 1, 0) % _value(node).dim()
    return w.emit("Concat", [w.of(each) for each in node.args[0]], axis=axis)


@rule(aten.split_with_sizes.default)
def _split(w: Writer, node: Node) -> Any:
    axis = _argument(node, 2, 0) % _value(node.args[0]).dim()
    sizes = node.args[1]
    found = w.emit("Split", [w.of(node.args[0]), w.sizes(sizes)], outputs=len(sizes), axis=axis)
    return (found,) if len(sizes) == 1 else found


@rule(aten.constant_pad_nd.default)
def _pad(w: Writer, node: Node) -> str:
    pads, value = node.args[1], _argument(node, 2, 0)
    axes = [_value(node).dim() - 1 - place for place in range(len(pads) // 2)]
    order = [*pads[0::2], *pads[1::2]]
    dtype = TYPES[_value(node).dtype][1]
    return w.emit("Pad", [w.of(node.args[0]), w.sizes(order), w.constant(value, dtype), w.constant(axes)])


@rule(aten.repeat.default)
def _repeat(w: Writer, node: Node) -> str:
    return w.emit("Tile", [w.of(node.args[0]), w.sizes(node.args[1])])


# Indices


@rule(aten.index_select.default)
def _index_select(w: Writer, node: Node) -> str:
    return w.emit("Gather", [w.of(node.args[0]), w.of(node.args[2])], axis=node.args[1])


@rule(aten.embedding.default)
def _embedding(w: Writer, node: Node) -> str:
    return w.emit("Gather", [w.of(node.args[0]), w.of(node.args[1])], axis=0)


@rule(aten.gather.default)
def _gather(w: Writer, node: Node) -> str:
    return w.emit("GatherElements", [w.of(node.args[0]), w.of(node.args[2])], axis=node.args[1])


@rule(aten.scatter_add.default)
def _scatter_add(w: Writer, node: Node) -> str:
    target, axis, indices, values = node.args
    return w.emit("ScatterElements", [w.of(target), w.of(indices), w.of(values)], axis=axis, reduction="add")


# Sums


def _reduce(kind: str) -> Rule:
    def write(w: Writer, node: Node) -> str:
        axes = _argument(node, 1)
        inputs = [w.of(node.args[0])]
        if axes is not None and axes != []:
            inputs.append(w.constant(_axes(axes, _value(node.args[0]).dim())))
        return w.emit(kind, inputs, keepdims=int(bool(_argument(node, 2, False))))

    return write


for _target, _kind in {
    aten.sum.dim_IntList: "ReduceSum", aten.sum.default: "ReduceSum", aten.mean.dim: "ReduceMean",
    aten.mean.default: "ReduceMean", aten.amax.default: "ReduceMax", aten.amin.default: "ReduceMin",
}.items():  # fmt: skip
    RULES[_target] = _reduce(_kind)


@rule(aten._softmax.default)
def _softmax(w: Writer, node: Node) -> str:
    return w.emit("Softmax", [w.of(node.args[0])], axis=node.args[1])


@rule(aten._log_softmax.default)
def _log_softmax(w: Writer, node: Node) -> str:
    return w.emit("LogSoftmax", [w.of(node.args[0])], axis=node.args[1])


# Products


def _turned(w: Writer, node: Node) -> tuple[str, int]:
    """A matrix, or what it is the transpose of: Gemm turns its operands itself."""
    if node.target is aten.permute.default and list(node.args[1]) == [1, 0]:
        return w.of(node.args[0]), 1
    return w.of(node), 0


def _copied_turned(w: Writer, name: str, columns: int) -> str:
    """The transpose as a copy, made in three dimensions so that onnxruntime does not put it back into the product.

    In a weight's gradient both factors are long and out of the cache: reading one of them across its rows costs 1.5
    times the product (1576 x 192 by 1576 x 768: 11.1 ms, with the narrow one copied 7.0 ms), the copy 0.25 ms.
    """
    turned = w.emit("Transpose", [w.emit("Reshape", [name, w.constant([1, -1, columns])])], perm=[0, 2, 1])
    return w.emit("Reshape", [turned, w.constant([columns, -1])])


@rule(aten.mm.default)
def _mm(w: Writer, node: Node) -> str:
    (left, turn_left), (right, turn_right) = (_turned(w, each) for each in node.args)
    rows, columns = _value(node).shape
    if turn_left and not turn_right and isinstance(rows, int) and isinstance(columns, int):
        if rows <= columns:
            return w.emit("MatMul", [_copied_turned(w, left, rows), right])
        return w.emit("Transpose", [w.emit("MatMul", [_copied_turned(w, right, columns), left])], perm=[1, 0])
    return w.emit("Gemm", [left, right], transA=turn_left, transB=turn_right)


@rule(aten.addmm.default)
def _addmm(w: Writer, node: Node) -> str:
    bias, *factors = node.args
    (left, turn_left), (right, turn_right) = (_turned(w, each) for each in factors)
    return w.emit("Gemm", [left, right, w.of(bias)], transA=turn_left, transB=turn_right)


@rule(aten.bmm.default)
def _bmm(w: Writer, node: Node) -> str:
    return w.emit("MatMul", [w.of(each) for each in node.args])


@rule(aten.convolution.default)
def _convolution(w: Writer, node: Node) -> str:
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = node.args
    inputs = [w.of(x), w.of(weight)] + ([] if bias is None else [w.of(bias)])
    rank = len(stride)
    padding = list(padding) * (rank if len(padding) == 1 else 1)
    window = {"strides": list(stride), "pads": padding * 2, "dilations": list(dilation), "group": groups}
    if transposed:
        return w.emit("ConvTranspose", inputs, output_padding=list(output_padding), **window)
    return w.emit("Conv", inputs, kernel_shape=list(_value(weight).shape[2:]), **window)


@rule(aten.col2im.default)
def _fold(w: Writer, node: Node) -> str:
    columns, image, kernel, dilation, padding, stride = node.args
    inputs = [w.of(columns), w.constant(list(image)), w.constant(list(kernel))]
    return w.emit("Col2Im", inputs, dilations=list(dilation), pads=[*padding] * 2, strides=list(stride))


# Norms and poolings


def _or_filled(w: Writer, node: object, like: Node, value: float) -> str:
    if isinstance(node, Node):
        return w.of(node)
    return w.emit("Expand", [w.constant(value, np.float32), w.constant(list(_value(like).shape))])


@rule(aten.native_layer_norm.default)
def _layer_norm(w: Writer, node: Node) -> Any:
    x, shape, weight, bias, epsilon = node.args
    if weight is None:
        weight = w.emit("Expand", [w.constant(1.0, np.float32), w.constant(list(shape))])
    else:
        weight = w.of(weight)
    inputs = [w.of(x), weight] + ([] if bias is None else [w.of(bias)])
    return w.emit("LayerNormalization", inputs, outputs=3, axis=-len(shape), epsilon=epsilon)


@rule(NORMALISE)
def _normalise(w: Writer, node: Node) -> Any:
    *inputs, epsilon = node.args
    names = [w.of(each) for each in inputs]
    return w.emit("BatchNormalization", names, outputs=3, epsilon=epsilon, momentum=0.0, training_mode=1)


@rule(aten._native_batch_norm_legit_no_training.default, aten.native_batch_norm.default)
def _frozen_norm(w: Writer, node: Node) -> Any:
    x, weight, bias, mean, variance = node.args[:5]
    scale, shift = _or_filled(w, weight, mean, 1.0), _or_filled(w, bias, mean, 0.0)
    found = w.emit("BatchNormalization", [w.of(x), scale, shift, w.of(mean), w.of(variance)], epsilon=node.args[-1])
    return (found, None, None)


@rule(aten.max_pool2d_with_indices.default)
def _max_pool(w: Writer, node: Node) -> Any:
    """Indices count within one channel's plane, as torch's do; ONNX's count through the whole tensor."""
    window = _window(node)
    x = node.args[0]
    if not any(user.target is operator.getitem and user.args[1] == 1 for user in node.users):
        return (w.emit("MaxPool", [w.of(x)], **window), None)
    out, indices = w.emit("MaxPool", [w.of(x)], outputs=2, **window)
    height, width = _value(x).shape[2:]
    return (out, w.emit("Mod", [indices, w.constant(height * width)]))


def _window(node: Node) -> dict[str, object]:
    kernel = _argument(node, 1)
    stride = _argument(node, 2) or kernel
    padding, dilation = _argument(node, 3, [0, 0]), _argument(node, 4, [1, 1])
    pair = [list(each) * (2 if len(each) == 1 else 1) for each in (kernel, stride, padding, dilation)]
    return {
        "kernel_shape": pair[0], "strides": pair[1], "pads": pair[2] * 2, "dilations": pair[3],
        "ceil_mode": int(_argument(node, 5, False)),
    }  # fmt: skip


@rule(aten.avg_pool2d.default)
def _average_pool(w: Writer, node: Node) -> str:
    kernel = _argument(node, 1)
    stride = _argument(node, 2) or kernel
    padding = _argument(node, 3, [0, 0])
    pair = [list(each) * (2 if len(each) == 1 else 1) for each in (kernel, stride, padding)]
    return w.emit(
        "AveragePool", [w.of(node.args[0])], kernel_shape=pair[0], strides=pair[1], pads=pair[2] * 2,
        ceil_mode=int(_argument(node, 4, False)), count_include_pad=int(_argument(node, 5, True)),
    )  # fmt: skip
