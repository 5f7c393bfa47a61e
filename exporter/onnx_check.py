"""Refuse a finished ONNX file that would run wrongly, slowly or not at all somewhere; nothing is changed here.

Numbers are compared by exporter.parity. Each rule here stands for a fault that leaves results right on one runtime.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, numpy_helper

from contract.errors import GateError
from exporter.masked_frontend import KEEP_NAME
from exporter.onnx_graph import INPUT_NAME, IR_VERSION, OUTPUT_NAME

SIZE_LIMIT_BYTES = 2_000_000_000  # protobuf's own limit; above it weights would need a second file
_DECOMPOSED_NORM = ("ReduceMean", "ReduceVariance", "Pow", "Sqrt", "InstanceNormalization")


@dataclass(frozen=True)
class Expected:
    """What the file must hold."""

    opset: int
    input_shape: tuple[int, int, int]
    output_shape: tuple[int, int]  # (T, d); T = 0 where it is symbolic
    layer_norms: int
    quantized: tuple[str, ...]  # linear layers that must be INT8; empty for a float file
    masked: bool = False  # `keep` (batch, kept) is an input, too


def check_file(data: bytes, expected: Expected) -> None:
    """Raises GateError that names every rule the file breaks."""
    if len(data) > SIZE_LIMIT_BYTES:
        raise _refused([f"{len(data)} bytes are over the {SIZE_LIMIT_BYTES} that one file can hold"])
    model = onnx.load_model_from_string(data)
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        raise _refused([str(error).splitlines()[0]]) from error
    faults = [
        *_form(model, expected),
        *_self_contained(model),
        *_norms(model, expected),
        *_quantization(model, expected),
    ]
    if faults:
        raise _refused(faults)


def _refused(faults: list[str]) -> GateError:
    return GateError("the exported ONNX file was refused: " + "; ".join(faults), "report the model and its arguments")


def _form(model: ModelProto, expected: Expected) -> Iterator[str]:
    versions = {each.domain: each.version for each in model.opset_import}
    if versions != {"": expected.opset}:
        yield f"expected opset {expected.opset} alone, found {versions}"
    if model.ir_version != IR_VERSION:
        yield f"expected IR version {IR_VERSION}, found {model.ir_version}"
    inputs = {INPUT_NAME: expected.input_shape} | ({KEEP_NAME: (0,)} if expected.masked else {})
    for values, shapes in ((model.graph.input, inputs), (model.graph.output, {OUTPUT_NAME: expected.output_shape})):
        if [value.name for value in values] != list(shapes):
            yield f"expected {' and '.join(shapes)} alone at this end, found {[value.name for value in values]}"
            continue
        for value, (name, shape) in zip(values, shapes.items(), strict=True):
            dims = value.type.tensor_type.shape.dim
            if not dims or not dims[0].dim_param:
                yield f"the batch size of {name} is fixed, it must be symbolic"
            if tuple(each.dim_value for each in dims[1:]) != tuple(shape):
                yield f"expected {name} (batch, {shape}), found {[each.dim_param or each.dim_value for each in dims]}"


def _self_contained(model: ModelProto) -> Iterator[str]:
    for each in model.graph.initializer:
        if each.data_location == TensorProto.EXTERNAL:
            yield f"{each.name} is stored in another file"
    if len({each.name for each in model.graph.initializer}) != len(model.graph.initializer):
        yield "two stored arrays share a name"
    for node in model.graph.node:
        if any(each.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for each in node.attribute):
            yield f"{node.name} holds a graph of its own"


def _norms(model: ModelProto, expected: Expected) -> Iterator[str]:
    kinds = Counter(node.op_type for node in model.graph.node)
    decomposed = any(kinds[each] for each in _DECOMPOSED_NORM)
    if kinds["LayerNormalization"] < expected.layer_norms and (decomposed or not kinds["LayerNormalization"]):
        # Fewer without substitutes is sound: two fresh norms of one input are equal, and traced once.
        yield f"expected {expected.layer_norms} LayerNormalization nodes, found {kinds['LayerNormalization']}"
        yield from (f"found {kinds[each]} {each} nodes in their place" for each in _DECOMPOSED_NORM if kinds[each])


def _quantization(model: ModelProto, expected: Expected) -> Iterator[str]:
    stored = {each.name: each for each in model.graph.initializer}
    users = Counter(name for node in model.graph.node for name in node.input)
    made_by = {name: node for node in model.graph.node for name in node.output}
    outputs = {each.name for each in model.graph.output}
    for node in model.graph.node:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            continue
        yield from _zero_point(node, stored)
        if users[node.output[0]] != 1 or node.output[0] in outputs:
            yield f"{node.name} must have one user, found {users[node.output[0]]}"
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.name in expected.quantized:
            sources = [made_by[name].op_type if name in made_by else "stored" for name in node.input]
            if sources != ["DequantizeLinear", "DequantizeLinear"]:
                yield f"{node.name} must multiply INT8 by INT8, found {sources}"
    missing = set(expected.quantized) - {node.name for node in model.graph.node if node.op_type == "MatMul"}
    if missing:
        yield f"no MatMul for {', '.join(sorted(missing))}"


def _zero_point(node: onnx.NodeProto, stored: dict[str, TensorProto]) -> Iterator[str]:
    if len(node.input) != 3 or node.input[2] not in stored:
        yield f"{node.name} must have a stored zero point"
        return
    zero = stored[node.input[2]]
    if zero.data_type != TensorProto.INT8 or np.any(numpy_helper.to_array(zero)):
        yield f"the zero point of {node.name} must be int8 and 0, found {TensorProto.DataType.Name(zero.data_type)}"
    scale = stored.get(node.input[1])
    values = np.zeros(1) if scale is None else numpy_helper.to_array(scale)
    if not np.isfinite(values).all() or values.min() < np.finfo(np.float32).tiny:
        yield f"the scales of {node.name} must be stored, finite and positive"
