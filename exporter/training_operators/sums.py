"""Sums along axes, softmax, and products of matrices."""

from __future__ import annotations

import torch
from torch.fx import Node

from exporter.training_operators._writer import RULES, Rule, Writer, argument, axes_of, rule, value_of

aten = torch.ops.aten


# Sums


def _reduce(kind: str) -> Rule:
    def write(w: Writer, node: Node) -> str:
        axes, given = argument(node, 1), value_of(node.args[0])
        counts = given.dtype == torch.bool  # what torch sums as numbers
        inputs = [w.as_tensor(node.args[0], value_of(node).dtype) if counts else w.of(node.args[0])]
        if axes is not None and axes != []:
            inputs.append(w.constant(axes_of(axes, given.dim())))
        return w.emit(kind, inputs, keepdims=int(bool(argument(node, 2, False))))

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
    rows, columns = value_of(node).shape
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
