"""Frontend as an ONNX graph: the trace, and a flat list of passes that make it plain, named and self-contained.

Quantizing the graph is left to exporter.onnx_qdq, refusing a bad one to exporter.onnx_check.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper
from torch import nn

from contract.errors import ExportError
from exporter.masked_frontend import KEEP_NAME, MaskedFrontend, state_patches
from exporter.models._inference import inference_mode
from exporter.quantize import linear_layers

INPUT_NAME = "images"
OUTPUT_NAME = "tokens"
IR_VERSION = 10  # onnxruntime 1.19 and TensorRT 10 load it
_TRACED_BATCH = 2  # torch.export takes sizes 0 and 1 for constants (pytorch#157621)
_TRACED_KEPT = 3


def export_float(frontend: nn.Module, input_shape: tuple[int, int, int], opset: int) -> ModelProto:
    """Float32 graph `images` (batch, 3, h, w) -> `tokens` (batch, T, d) with a symbolic batch.

    A MaskedFrontend's takes `keep` (batch, kept) int64 as well.
    Every linear layer's weight is an initializer `<path>.weight` (K, N) of its own, its bias `<path>.bias` (N,).

    Raises ExportError when torch cannot trace the frontend, or the graph lacks one of its linear layers.
    """
    with inference_mode(frontend):
        model = _trace(frontend, input_shape, opset)
    passes: tuple[Callable[[ModelProto], None], ...] = (
        strip_metadata,
        fold_weight_transposes,
        lambda traced: own_linear_weights(traced, linear_layers(frontend)),
        plain_reshapes,
        drop_empty_pads,
        drop_unused_initializers,
        name_nodes,
    )
    for each in passes:
        each(model)
    if isinstance(frontend, MaskedFrontend):
        state_patches(model, frontend.patches)
    return model


def _trace(frontend: nn.Module, input_shape: tuple[int, int, int], opset: int) -> ModelProto:
    batch = torch.export.Dim("batch")
    example, names, sizes = [torch.zeros(_TRACED_BATCH, *input_shape)], [INPUT_NAME], [{0: batch}]
    if isinstance(frontend, MaskedFrontend):
        example.append(torch.zeros(_TRACED_BATCH, _TRACED_KEPT, dtype=torch.int64))
        names.append(KEEP_NAME)
        sizes.append({0: batch, 1: torch.export.Dim("kept")})
    with warnings.catch_warnings(), _quiet("torch.onnx", "onnxscript"):
        warnings.simplefilter("ignore")
        try:
            program = torch.onnx.export(
                frontend, tuple(example), dynamo=True, opset_version=opset, verbose=False,
                input_names=names, output_names=[OUTPUT_NAME], dynamic_shapes=tuple(sizes),
            )  # fmt: skip
            return program.model_proto
        except (RuntimeError, TypeError, ValueError, torch.onnx.errors.OnnxExporterError) as error:
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ExportError(
                f"torch could not trace the frontend into ONNX opset {opset}: {first_line}",
                "run with CUTLAYER_DEBUG=1 for torch's own report, or choose another model or --opset",
            ) from error


@contextlib.contextmanager
def _quiet(*loggers: str) -> Iterator[None]:
    """Keep the exporter's notes about opset conversion off the terminal: the finished file is checked instead."""
    levels = [(logging.getLogger(name), logging.getLogger(name).level) for name in loggers]
    for logger, _ in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels:
            logger.setLevel(level)


def strip_metadata(model: ModelProto) -> None:
    """Drop stack traces, paths of the exporting machine and guessed inner shapes."""
    model.producer_name, model.producer_version, model.doc_string = "cutlayer", "", ""
    model.ir_version = IR_VERSION
    model.graph.name, model.graph.doc_string = "frontend", ""
    del model.metadata_props[:], model.graph.metadata_props[:], model.graph.value_info[:]
    for each in (*model.graph.node, *model.graph.initializer, *model.graph.input, *model.graph.output):
        each.doc_string = ""
        del each.metadata_props[:]


def fold_weight_transposes(model: ModelProto) -> None:
    """Apply Transpose to stored matrices, which the tracer leaves in the graph above some size."""
    stored = {each.name: each for each in model.graph.initializer}
    for node in list(model.graph.node):
        if node.op_type == "Transpose" and node.input[0] in stored and len(stored[node.input[0]].dims) == 2:
            values = numpy_helper.to_array(stored[node.input[0]]).T
            add_initializer(model.graph, node.output[0], np.ascontiguousarray(values))
            model.graph.node.remove(node)


def own_linear_weights(model: ModelProto, layers: Mapping[str, nn.Linear]) -> None:
    """Give every linear layer a weight and a bias of its own under its own name.

    The tracer stores equal arrays once (all-zero biases above all), while weight noise must change one layer alone.
    A MatMul is recognised by the values that it multiplies with, and layers are looked for in the order of definition.

    Raises ExportError when a linear layer of the model is not in the graph.
    """
    arrays = _Arrays(model.graph, {f"{name}.{part}" for name in layers for part in ("weight", "bias")})
    missing = dict(layers)
    for node in model.graph.node:
        if node.op_type != "MatMul" or node.input[1] not in arrays.stored:
            continue
        weight = numpy_helper.to_array(arrays.stored[node.input[1]])
        name = next((name for name, layer in missing.items() if _holds(layer, weight)), None)
        if name is None:
            continue
        node.name = name
        if missing.pop(name).bias is not None:
            addition, bias = _bias_addition(model.graph, node, arrays.stored)
            addition.input[:] = [node.output[0], arrays.own(bias, f"{name}.bias")]
        node.input[1] = arrays.own(node.input[1], f"{name}.weight")
    if missing:
        raise ExportError(
            f"the traced graph should hold every linear layer as MatMul and Add, but {next(iter(missing))} is missing",
            "choose another model; linear layers on single vectors are not supported in a frontend",
        )


class _Arrays:
    """The graph's stored arrays, which can be given to one user alone without copying those that have one user."""

    def __init__(self, graph: GraphProto, reserved: set[str]) -> None:
        self._graph = graph
        for each in graph.initializer:
            if each.name in reserved:
                _rename(graph, each, f"traced.{each.name}")
        self.stored = {each.name: each for each in graph.initializer}
        self._users = Counter(name for node in graph.node for name in node.input)

    def own(self, traced: str, name: str) -> str:
        if self._users[traced] == 1:
            self.stored[traced].name = name
        else:
            add_initializer(self._graph, name, numpy_helper.to_array(self.stored[traced]))
        return name


def _rename(graph: GraphProto, array: onnx.TensorProto, name: str) -> None:
    for node in graph.node:
        node.input[:] = [name if each == array.name else each for each in node.input]
    array.name = name


def _holds(layer: nn.Linear, weight: NDArray[np.float32]) -> bool:
    own = layer.weight.detach().numpy().T
    return own.shape == weight.shape and np.array_equal(own, weight)


def _bias_addition(
    graph: GraphProto, matmul: NodeProto, stored: Mapping[str, onnx.TensorProto]
) -> tuple[NodeProto, str]:
    """The Add behind a MatMul and the name of the bias that it adds."""
    users = [node for node in graph.node if matmul.output[0] in node.input]
    if len(users) == 1 and users[0].op_type == "Add":
        for name in users[0].input:
            if name in stored:
                return users[0], name
    raise ExportError(
        f"expected one Add of the bias behind {matmul.name}, found {[node.op_type for node in users]}",
        "choose another model: this layer's bias cannot be told apart in the graph",
    )


def plain_reshapes(model: ModelProto) -> None:
    """Drop `allowzero` where no size is zero: it says nothing there, and not every runtime knows it."""
    stored = {each.name: each for each in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Reshape" and node.input[1] in stored:
            sizes = numpy_helper.to_array(stored[node.input[1]])
            if 0 not in sizes:
                kept = [each for each in node.attribute if each.name != "allowzero"]
                del node.attribute[:]
                node.attribute.extend(kept)


def drop_empty_pads(model: ModelProto) -> None:
    """Take out Pad nodes that add nothing: Swin pads to whole windows, at sizes that mostly are whole."""
    stored = {each.name: each for each in model.graph.initializer}
    for node in list(model.graph.node):
        pads = stored.get(node.input[1]) if node.op_type == "Pad" else None
        if pads is not None and not numpy_helper.to_array(pads).any():
            for user in model.graph.node:
                user.input[:] = [node.input[0] if name == node.output[0] else name for name in user.input]
            model.graph.node.remove(node)


def drop_unused_initializers(model: ModelProto) -> None:
    """Remove stored arrays that no node reads: runtimes warn about them."""
    used = {name for node in model.graph.node for name in node.input}
    arrays = model.graph.initializer
    for place in reversed(range(len(arrays))):  # in place: putting the kept ones into a new list would copy them
        if arrays[place].name not in used:
            del arrays[place]


def name_nodes(model: ModelProto) -> None:
    """Give every node a name that is unique and says what it is: the layer's path, or operator and place."""
    taken = {node.name for node in model.graph.node if node.op_type == "MatMul" and f"{node.name}.weight" in node.input}
    for place, node in enumerate(model.graph.node):
        if node.name not in taken or node.op_type != "MatMul":
            node.name = f"{node.op_type}_{place}"


def add_initializer(graph: GraphProto, name: str, values: NDArray[np.generic]) -> None:
    """Store an array as raw little-endian bytes, so that its place in the file can be told."""
    kind = helper.np_dtype_to_tensor_dtype(values.dtype)
    raw = np.ascontiguousarray(values).tobytes()
    graph.initializer.append(helper.make_tensor(name, kind, values.shape, raw, raw=True))
