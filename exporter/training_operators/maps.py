"""Convolutions, norms and poolings."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from exporter.training_decompositions import MIRROR, NORMALISE
from exporter.training_operators._writer import Writer, argument, backwards, rule, value_of

aten = torch.ops.aten
MIRRORED = 16  # places of a kernel; a larger permutation would be a constant as large as a lifted weight


@rule(aten.convolution.default)
def _convolution(w: Writer, node: Node) -> str:
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = node.args
    inputs = [w.of(x), w.of(weight)] + ([] if bias is None else [w.of(bias)])
    rank = len(stride)
    padding = list(padding) * (rank if len(padding) == 1 else 1)
    window = {"strides": list(stride), "pads": padding * 2, "dilations": list(dilation), "group": groups}
    if transposed:
        return w.emit("ConvTranspose", inputs, output_padding=list(output_padding), **window)
    return w.emit("Conv", inputs, kernel_shape=list(value_of(weight).shape[2:]), **window)


@rule(MIRROR)
def _mirror(w: Writer, node: Node) -> str:
    """A product with a permutation: onnxruntime's Slice backwards takes twice as long."""
    shape = list(value_of(node).shape)
    places = shape[-2] * shape[-1]
    if places > MIRRORED:
        return backwards(w, w.of(node.args[0]), [len(shape) - 2, len(shape) - 1])
    flat = w.emit("Reshape", [w.of(node.args[0]), w.constant([-1, places])])
    turned = w.emit("MatMul", [flat, w.constant(np.eye(places)[::-1], np.float32)])
    return w.emit("Reshape", [turned, w.constant(shape)])


@rule(aten.col2im.default)
def _fold(w: Writer, node: Node) -> str:
    columns, image, kernel, dilation, padding, stride = node.args
    inputs = [w.of(columns), w.constant(list(image)), w.constant(list(kernel))]
    return w.emit("Col2Im", inputs, dilations=list(dilation), pads=[*padding] * 2, strides=list(stride))


def _or_filled(w: Writer, node: object, like: Node, value: float) -> str:
    if isinstance(node, Node):
        return w.of(node)
    return w.emit("Expand", [w.constant(value, np.float32), w.constant(list(value_of(like).shape))])


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
    height, width = value_of(x).shape[2:]
    return (out, w.emit("Mod", [indices, w.constant(height * width)]))


def _window(node: Node) -> dict[str, object]:
    kernel = argument(node, 1)
    stride = argument(node, 2) or kernel
    padding, dilation = argument(node, 3, [0, 0]), argument(node, 4, [1, 1])
    pair = [list(each) * (2 if len(each) == 1 else 1) for each in (kernel, stride, padding, dilation)]
    return {
        "kernel_shape": pair[0], "strides": pair[1], "pads": pair[2] * 2, "dilations": pair[3],
        "ceil_mode": int(argument(node, 5, False)),
    }  # fmt: skip


@rule(aten.avg_pool2d.default)
def _average_pool(w: Writer, node: Node) -> str:
    kernel = argument(node, 1)
    stride = argument(node, 2) or kernel
    padding = argument(node, 3, [0, 0])
    pair = [list(each) * (2 if len(each) == 1 else 1) for each in (kernel, stride, padding)]
    return w.emit(
        "AveragePool", [w.of(node.args[0])], kernel_shape=pair[0], strides=pair[1], pads=pair[2] * 2,
        ceil_mode=int(argument(node, 4, False)), count_include_pad=int(argument(node, 5, True)),
    )  # fmt: skip
