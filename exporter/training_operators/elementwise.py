"""Operators that treat every element by itself."""

from __future__ import annotations

import torch
from torch.fx import Node

from exporter.training_decompositions import BETWEEN
from exporter.training_operators._writer import RULES, Rule, Writer, argument, rule, value_of

aten = torch.ops.aten


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
        dtype = (
            next((each for each in floats if each.is_floating_point), floats[0]) if compares else value_of(node).dtype
        )
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
    return w.as_tensor(node.args[0], value_of(node).dtype)


@rule(aten.where.self)
def _where(w: Writer, node: Node) -> str:
    condition, yes, no = node.args
    dtype = value_of(node).dtype
    return w.emit("Where", [w.of(condition), w.as_tensor(yes, dtype), w.as_tensor(no, dtype)])


@rule(aten.clamp.default, aten.hardtanh.default)
def _clip(w: Writer, node: Node) -> str:
    dtype = value_of(node).dtype
    low, high = argument(node, 1), argument(node, 2)
    if node.target is aten.hardtanh.default:
        low, high = argument(node, 1, -1.0), argument(node, 2, 1.0)
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
    return w.emit("LeakyRelu", [w.of(node.args[0])], alpha=float(argument(node, 1, 0.01)))
