"""Write INT8 into a float graph: one Q -> DQ pair per linear MatMul, stored codes for its weight, nothing on outputs.

Scales come from exporter.quantize. The form is bound by what runs fast and loads everywhere: int8 with an explicit
zero point of 0, a pair of its own for every MatMul (a shared pair falls back to float in onnxruntime), a zero point of
its own for every scale (onnxruntime 1.32 rewrites it where x64quantprecision is set, and refuses a shared one), weights
(K, N) with scales along axis 1, and the bias as a float Add (TensorRT refuses an int32 bias).

A convolution has a pair in front and another behind it, without which onnxruntime has no INT8 kernel for it, and keeps
its float bias: onnxruntime rounds that itself since 1.21, older ones compute the convolution in float.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from exporter.onnx_graph import add_initializer
from exporter.quantize import QuantizedConvolution, QuantizedLinear, weight_codes


def quantize_graph(
    model: ModelProto,
    layers: Mapping[str, QuantizedLinear],
    convolutions: Mapping[str, QuantizedConvolution] | None = None,
) -> ModelProto:
    """A copy of a float graph with the layers named in `layers` and `convolutions`, and every other convolution's
    weight, as INT8.

    A copy, because protobuf gives the memory of removed float weights back only with the whole message.
    """
    quantized = ModelProto()
    quantized.CopyFrom(ModelProto(ir_version=model.ir_version, producer_name=model.producer_name))
    quantized.opset_import.extend(model.opset_import)
    quantized.metadata_props.extend(model.metadata_props)
    graph, source = quantized.graph, model.graph
    graph.name = source.name
    graph.input.extend(source.input)
    graph.output.extend(source.output)
    stored = {each.name: each for each in source.initializer}
    for node in source.node:
        if node.op_type == "MatMul" and node.name in layers:
            graph.node.extend(_quantized_linear(graph, node, layers[node.name]))
        elif node.op_type == "Conv" and convolution_name(node) in (convolutions or {}):
            graph.node.extend(_quantized_convolution(graph, node, convolutions[convolution_name(node)]))
        elif node.op_type == "Conv":
            graph.node.extend(_stored_convolution(graph, node, numpy_helper.to_array(stored[node.input[1]])))
        else:
            graph.node.append(node)
    biased = {name for name, layer in layers.items() if layer.bias is not None}
    _add_missing_biases(graph, {name for name in biased if f"{name}.bias" not in stored})
    own = {each.name for each in graph.initializer}
    used = {name for node in graph.node for name in node.input}
    graph.initializer.extend(each for name, each in stored.items() if name in used and name not in own)
    return quantized


def convolution_name(node: NodeProto) -> str:
    """Path of the module that a Conv node was traced from: its weight keeps the parameter's name."""
    return node.input[1].removesuffix(".weight")


def rectified_convolutions(model: ModelProto) -> frozenset[str]:
    """Convolutions whose output nothing but one ReLU reads."""
    users = Counter(name for node in model.graph.node for name in node.input)
    relus = {node.input[0] for node in model.graph.node if node.op_type == "Relu"}
    return frozenset(
        convolution_name(node)
        for node in model.graph.node
        if node.op_type == "Conv" and node.output[0] in relus and users[node.output[0]] == 1
    )


def _quantized_linear(graph: GraphProto, node: NodeProto, layer: QuantizedLinear) -> Iterator[NodeProto]:
    name, read = layer.name, node.input[0]
    if layer.input_scale is not None:
        yield from _pair(graph, name, "input", read, layer.input_scale)
        read = f"{name}.input"
    if layer.bias is not None:
        add_initializer(graph, f"{name}.bias", layer.bias)
    yield _stored_weight(graph, name, layer.codes, layer.scales, channel_axis=1)
    yield helper.make_node("MatMul", [read, f"{name}.weight_values"], list(node.output), name=name)


def _quantized_convolution(graph: GraphProto, node: NodeProto, layer: QuantizedConvolution) -> Iterator[NodeProto]:
    name = layer.name
    yield from _pair(graph, name, "input", node.input[0], layer.input_scale)
    yield _stored_weight(graph, name, layer.codes, layer.scales, channel_axis=0)
    add_initializer(graph, f"{name}.bias", layer.bias)
    convolution = NodeProto()
    convolution.CopyFrom(node)
    convolution.input[:] = [f"{name}.input", f"{name}.weight_values", f"{name}.bias"]
    convolution.output[0] = f"{name}.exact_output"
    convolution.name = name
    yield convolution
    yield from _pair(graph, name, "output", f"{name}.exact_output", layer.output_scale, node.output[0])


def _pair(
    graph: GraphProto, name: str, end: str, read: str, scale: float, result: str | None = None
) -> Iterator[NodeProto]:
    """Q and DQ of one tensor with a scale and a zero point of their own; the result is `<name>.<end>` unless named."""
    add_initializer(graph, f"{name}.{end}_scale", np.asarray(scale, np.float32))
    add_initializer(graph, f"{name}.{end}_zero_point", np.zeros((), np.int8))
    grid, codes = [f"{name}.{end}_scale", f"{name}.{end}_zero_point"], f"{name}.{end}_codes"
    yield helper.make_node("QuantizeLinear", [read, *grid], [codes], name=f"{name}.quantize_{end}")
    yield helper.make_node(
        "DequantizeLinear", [codes, *grid], [result or f"{name}.{end}"], name=f"{name}.dequantize_{end}"
    )


def _stored_convolution(graph: GraphProto, node: NodeProto, weight: NDArray[np.float32]) -> Iterable[NodeProto]:
    """Weight-only INT8: the patch embedding is 1 % of the work, its input holds the raw pixels' range."""
    name = convolution_name(node)
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
