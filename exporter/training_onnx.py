"""A traced piece as ONNX bytes: named ends, a symbolic batch, ordinary operators, no weights inside."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np
import onnx
import sympy
import torch
from numpy.typing import NDArray
from onnx import ModelProto, ValueInfoProto, helper, numpy_helper
from torch import Tensor
from torch.fx import GraphModule, Node

from contract.errors import ExportError
from exporter.onnx_graph import drop_unused_initializers, name_nodes, strip_metadata
from exporter.training_operators import RULES, TYPES, Writer
from exporter.training_partition import Piece

OPSET = 20
LARGEST_CONSTANT = 256  # values: sizes, axes and scalars are below it, lifted weights above
_SIZES = ("batch", "kept")


def to_onnx(piece: Piece, title: str, weights: Mapping[str, Tensor]) -> bytes:
    """Raises ExportError when torch cannot write the piece in ONNX, or what it wrote breaks a rule of `check`."""
    model = _write(piece, title)
    strip_metadata(model)
    model.graph.name = title
    drop_unused_initializers(model)
    name_nodes(model)
    check(model, title, _batched(piece), weights)
    return model.SerializeToString(deterministic=True)


def _write(piece: Piece, title: str) -> ModelProto:
    writer = Writer()
    symbols: dict[sympy.Symbol, str] = {}
    nodes = list(piece.module.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    writer.names.update(zip(placeholders, piece.inputs, strict=True))
    for node in nodes:
        if node.op == "call_function":
            if node.target not in RULES:
                raise ExportError(
                    f"the {title} graph needs {node.target}, for which there is no rule", "choose another cut or model"
                )
            writer.names[node] = RULES[node.target](writer, node)
        elif node.op == "get_attr":
            writer.names[node] = _constant(writer, piece.module, node)
    results = nodes[-1].args[0]
    for node, name in zip(results, piece.outputs, strict=True):
        writer.nodes.append(helper.make_node("Identity", [writer.of(node)], [name]))
    ends = [
        [_value_info(name, node.meta["val"], symbols) for name, node in zip(names, of, strict=True)]
        for names, of in ((piece.inputs, placeholders), (piece.outputs, results))
    ]
    graph = helper.make_graph(writer.nodes, title, *ends, initializer=list(writer.constants.values()))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    _drop_dead_nodes(model)
    _name_results(model)
    return model


def _constant(writer: Writer, module: GraphModule, node: Node) -> str:
    """A tensor that the trace has taken for a constant; `check` refuses it where it may be a weight."""
    values = getattr(module, str(node.target)).detach()
    node.meta["val"] = values
    return writer.constant(values.numpy(), values.numpy().dtype)


def _value_info(name: str, value: Tensor, symbols: dict[sympy.Symbol, str]) -> ValueInfoProto:
    sizes = []
    for size in value.shape:
        if isinstance(size, torch.SymInt):
            for symbol in sorted(size.node.expr.free_symbols, key=str):
                if symbol not in symbols:
                    symbols[symbol] = _SIZES[len(symbols)]
            sizes.append(str(size.node.expr.subs({each: sympy.Symbol(called) for each, called in symbols.items()})))
        else:
            sizes.append(size)
    return helper.make_tensor_value_info(name, TYPES[value.dtype][0], sizes)


def _drop_dead_nodes(model: ModelProto) -> None:
    """Transposes that Gemm has taken over, above all."""
    wanted = {each.name for each in model.graph.output}
    for place in reversed(range(len(model.graph.node))):
        node = model.graph.node[place]
        if wanted.isdisjoint(node.output):
            del model.graph.node[place]
        else:
            wanted.update(node.input)


def _name_results(model: ModelProto) -> None:
    """Let whoever made a result write it under its own name, where it is made here and only once."""
    made = {name for node in model.graph.node for name in node.output}
    copies = [node for node in model.graph.node if node.op_type == "Identity"]
    renamed: dict[str, str] = {}
    for copy in copies:
        source, name = copy.input[0], copy.output[0]
        if source in made and source not in renamed and name in {each.name for each in model.graph.output}:
            renamed[source] = name
            model.graph.node.remove(copy)
    for node in model.graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]


def _batched(piece: Piece) -> set[str]:
    """Ends with a size that is known only when the graph runs."""
    nodes = list(piece.module.graph.nodes)
    ends = [node for node in nodes if node.op == "placeholder"] + list(nodes[-1].args[0])
    names = (*piece.inputs, *piece.outputs)
    return {
        name for name, node in zip(names, ends, strict=True)
        if any(isinstance(size, torch.SymInt) for size in node.meta["val"].shape)
    }  # fmt: skip


def check(model: ModelProto, title: str, batched: Collection[str], weights: Mapping[str, Tensor]) -> None:
    """Raises ExportError for what would run wrongly or hide a weight.

    Refused are ScatterND with a reduction (onnxruntime's kernel races with itself), operators outside the standard
    domain, float constants as large as a weight may be, and ends whose batch became fixed.
    """
    faults = []
    if {each.domain: each.version for each in model.opset_import} != {"": OPSET}:
        faults.append(
            f"expected opset {OPSET} alone, found {[(each.domain, each.version) for each in model.opset_import]}"
        )
    for node in model.graph.node:
        if node.domain or not onnx.defs.has(node.op_type, OPSET):
            faults.append(f"{node.op_type} is no standard operator of opset {OPSET}")
        if node.op_type == "ScatterND" and any(
            each.name == "reduction" and each.s != b"none" for each in node.attribute
        ):
            faults.append("ScatterND with a reduction gives wrong sums on several threads")
    faults.extend(_lifted(model, weights))
    for value in (*model.graph.input, *model.graph.output):
        dims = value.type.tensor_type.shape.dim
        if value.name in batched and not any(each.dim_param for each in dims):
            faults.append(f"the batch of {value.name} became fixed: {[each.dim_value for each in dims]}")
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        faults.append(str(error).splitlines()[0])
    if faults:
        raise ExportError(
            f"the {title} graph was refused: " + "; ".join(dict.fromkeys(faults)), "choose another cut or model"
        )


def _lifted(model: ModelProto, weights: Mapping[str, Tensor]) -> list[str]:
    """Constants that are weights, or could be."""
    stored = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    for node in model.graph.node:
        for each in node.attribute if node.op_type == "Constant" else ():
            if each.name == "value":
                stored[node.output[0]] = numpy_helper.to_array(each.t)
    faults = []
    for name, values in stored.items():
        if values.dtype.kind != "f":
            continue
        if values.size > LARGEST_CONSTANT:
            faults.append(f"{name} {values.shape} is a constant of the graph, and no input")
        elif values.size > 1 and (owner := _owner(values, weights)):
            faults.append(f"{owner} is a constant of the graph, and no input")
    return faults


def _owner(values: NDArray[np.generic], weights: Mapping[str, Tensor]) -> str | None:
    flat = np.sort(values, axis=None)
    if flat[0] == flat[-1]:
        return None
    same = (name for name, each in weights.items() if each.numel() == flat.size)
    return next(
        (name for name in same if np.array_equal(np.sort(weights[name].detach().numpy(), axis=None), flat)), None
    )


def macs(piece: Piece) -> int:
    """Multiply-accumulates of the piece for one image: convolutions and matrix products."""
    batch_hint = None
    total = 0
    for node in piece.module.graph.nodes:
        if node.op == "placeholder" and batch_hint is None:
            batch_hint = next((s.node.hint for s in node.meta["val"].shape[:1] if isinstance(s, torch.SymInt)), None)
        if node.target is torch.ops.aten.convolution.default:
            out, weight = node.meta["val"].shape, node.args[1].meta["val"].shape
            total += math.prod(_hints(out)) * math.prod(weight[1:])
        elif node.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
            left = node.args[-2].meta["val"].shape
            total += math.prod(_hints(node.meta["val"].shape)) * int(left[-1])
    return total // (batch_hint or 1)


def _hints(shape: torch.Size) -> list[int]:
    return [size if isinstance(size, int) else size.node.hint for size in shape]
