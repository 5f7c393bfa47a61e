"""Write INT8 into a float graph: one Q -> DQ pair per linear MatMul, stored codes for its weight, nothing on outputs.

Scales come from exporter.quantize. The form is bound by what runs fast and loads everywhere: int8 with an explicit
zero point of 0, a pair of its own for every MatMul (a shared pair falls back to float in onnxruntime), a zero point of
its own for every scale (onnxruntime 1.32 rewrites it where x64quantprecision is set, and refuses a shared one), weights
(K, N) with scales along axis 1, and the bias as a float Add (TensorRT refuses an int32 bias).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from exporter.onnx_graph import add_initializer
from exporter.quantize import QuantizedLinear, weight_codes


def quantize_graph(model: ModelProto, layers: Mapping[str, QuantizedLinear]) -> ModelProto:
    """A copy of a float graph with the linear layers named in `layers` and every convolution's weight as INT8.

    A copy, because protobuf gives the memory of removed float weights back only with the whole message.
    """
    quantized = ModelProto()
    quantized.CopyFrom(ModelProto(ir_version=model.ir_version, producer_name=model.producer_name))
    quantized.opset_import.extend(model.opset_import)
    graph, source = quantized.graph, model.graph
    graph.name = source.name
    graph.input.extend(source.input)
    graph.output.extend(source.output)
    stored = {each.name: each for each in source.initializer}
    for node in source.node:
        if node.op_type == "MatMul" and node.name in layers:
            graph.node.extend(_quantized_linear(graph, node, layers[node.name]))
        elif node.op_type == "Conv":
            graph.node.extend(_stored_convolution(graph, node, numpy_helper.to_array(stored[node.input[1]])))
        else:
            graph.node.append(node)
    _add_missing_biases(graph, {name for name in layers if f"{name}.bias" not in stored})
    own = {each.name for each in graph.initializer}
    used = {name for node in graph.node for name in node.input}
    graph.initializer.extend(each for name, each in stored.items() if name in used and name not in own)
    return quantized


def _quantized_linear(graph: GraphProto, node: NodeProto, layer: QuantizedLinear) -> Iterable[NodeProto]:
    name = layer.name
    add_initializer(graph, f"{name}.input_scale", np.asarray(layer.input_scale, np.float32))
    add_initializer(graph, f"{name}.input_zero_point", np.zeros((), np.int8))
    pair = [f"{name}.input_scale", f"{name}.input_zero_point"]
    yield helper.make_node(
        "QuantizeLinear", [node.input[0], *pair], [f"{name}.input_codes"], name=f"{name}.quantize_input"
    )
    yield helper.make_node(
        "DequantizeLinear", [f"{name}.input_codes", *pair], [f"{name}.input"], name=f"{name}.dequantize_input"
    )
    add_initializer(graph, f"{name}.bias", layer.bias)
    yield _stored_weight(graph, name, layer.codes, layer.scales, channel_axis=1)
    yield helper.make_node("MatMul", [f"{name}.input", f"{name}.weight_values"], list(node.output), name=name)


def _stored_convolution(graph: GraphProto, node: NodeProto, weight: NDArray[np.float32]) -> Iterable[NodeProto]:
    """Weight-only INT8: the patch embedding is 1 % of the work, its input holds the raw pixels' range."""
    name = node.input[1].removesuffix(".weight")
    codes, scales = weight_codes(weight, channel_axis=0)
    yield _stored_weight(graph, name, codes, scales, channel_axis=0)
    convolution = NodeProto()
    convolution.CopyFrom(node)
    convolution.input[1] = f"{name}.weight_values"
    convolution.name = name
    yield convolution


def _stored_weight(graph: GraphProto, name: str, codes: np.ndarray, scales: np.ndarray, channel_axis: int) -> NodeProto:
    zeros = f"{name}.weight_zero_points"
    add_initializer(graph, zeros, np.zeros(len(scales), np.int8))
    add_initializer(graph, f"{name}.weight_codes", codes)
    add_initializer(graph, f"{name}.weight_scales", scales)
    return helper.make_node(
        "DequantizeLinear", [f"{name}.weight_codes", f"{name}.weight_scales", zeros], [f"{name}.weight_values"],
        name=f"{name}.dequantize_weight", axis=channel_axis,
    )  # fmt: skip


def _add_missing_biases(graph: GraphProto, without: set[str]) -> None:
    """An Add of its own for layers that had no bias as float: rounding gave them one."""
    for place in reversed(range(len(graph.node))):
        node = graph.node[place]
        if node.op_type == "MatMul" and node.name in without:
            output, product = node.output[0], f"{node.name}.product"
            node.output[0] = product
            addition = helper.make_node("Add", [product, f"{node.name}.bias"], [output], name=f"{node.name}.add_bias")
            graph.node.insert(place + 1, addition)


def int8_share(model: ModelProto) -> tuple[float, tuple[str, ...]]:
    """Share of matrix-weight elements stored as INT8, and the names of the matrix weights that are not."""
    stored = {each.name: each for each in model.graph.initializer}
    quantized = sum(math.prod(each.dims) for each in stored.values() if each.name.endswith(".weight_codes"))
    float_names = sorted(
        {
            name
            for node in model.graph.node
            if node.op_type in ("MatMul", "Gemm", "Conv")
            for name in node.input[:2]
            if name in stored and len(stored[name].dims) >= 2
        }
    )
    total = quantized + sum(math.prod(stored[name].dims) for name in float_names)
    return (quantized / total if total else 0.0), tuple(float_names)
