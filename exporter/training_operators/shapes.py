"""Operators that move, cut and join elements, pick some by their numbers, or make them from nothing."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from exporter.training_operators._writer import RULES, TYPES, Rule, Writer, argument, axes_of, backwards, rule, value_of

aten = torch.ops.aten


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
    dtype = value_of(node).dtype
    fixed = {aten.zeros.default: 0, aten.ones.default: 1}
    value = node.args[0] if node.target is aten.scalar_tensor.default else fixed.get(node.target, argument(node, 1))
    name = w.as_tensor(value, dtype)
    if node.target is aten.full_like.default:
        return w.emit("Expand", [name, w.emit("Shape", [w.of(node.args[0])])])
    shape = [] if node.target is aten.scalar_tensor.default else node.args[0]
    return w.emit("Expand", [name, w.sizes(shape)]) if len(shape) else name


@rule(aten.arange.start_step, aten.arange.default, aten.arange.start)
def _arange(w: Writer, node: Node) -> str:
    start, end, step = (0, node.args[0], 1) if node.target is aten.arange.default else (*node.args, 1)[:3]
    dtype = value_of(node).dtype
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
    return w.emit("Transpose", [w.of(node.args[0])], perm=axes_of(node.args[1], value_of(node).dim()))


@rule(aten.unsqueeze.default)
def _unsqueeze(w: Writer, node: Node) -> str:
    return w.emit("Unsqueeze", [w.of(node.args[0]), w.constant(axes_of(node.args[1], value_of(node).dim()))])


@rule(aten.squeeze.dims, aten.squeeze.dim)
def _squeeze(w: Writer, node: Node) -> str:
    shape = value_of(node.args[0]).shape
    axes = [axis for axis in axes_of(node.args[1], len(shape)) if isinstance(shape[axis], int) and shape[axis] == 1]
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
    axis, start, end, step = (argument(node, place, default) for place, default in ((1, 0), (2, 0), (3, None), (4, 1)))
    return (
        0 if start is None else start,
        np.iinfo(np.int64).max if end is None else end,
        axis % value_of(node).dim(),
        step,
    )


@rule(aten.flip.default)
def _flip(w: Writer, node: Node) -> str:
    axes = axes_of(node.args[1], value_of(node).dim())
    return backwards(w, w.of(node.args[0]), axes)


@rule(aten.select.int)
def _select(w: Writer, node: Node) -> str:
    axis = node.args[1] % value_of(node.args[0]).dim()
    return w.emit("Gather", [w.of(node.args[0]), w.constant(node.args[2])], axis=axis)


@rule(aten.cat.default)
def _cat(w: Writer, node: Node) -> str:
    axis = argument(node, 1, 0) % value_of(node).dim()
    return w.emit("Concat", [w.of(each) for each in node.args[0]], axis=axis)


@rule(aten.split_with_sizes.default)
def _split(w: Writer, node: Node) -> Any:
    axis = argument(node, 2, 0) % value_of(node.args[0]).dim()
    sizes = node.args[1]
    found = w.emit("Split", [w.of(node.args[0]), w.sizes(sizes)], outputs=len(sizes), axis=axis)
    return (found,) if len(sizes) == 1 else found


@rule(aten.constant_pad_nd.default)
def _pad(w: Writer, node: Node) -> str:
    pads, value = node.args[1], argument(node, 2, 0)
    axes = [value_of(node).dim() - 1 - place for place in range(len(pads) // 2)]
    order = [*pads[0::2], *pads[1::2]]
    dtype = TYPES[value_of(node).dtype][1]
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
