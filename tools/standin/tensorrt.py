"""Stands in for TensorRT on a GPU that it does not run on: an ONNX file run by torch, in the engine's own memory.

For `tools/bench_tensorrt --stand-in` alone. It takes the addresses and the stream that the engine gives, so that
buffers, copies, order and threads are exercised on a real GPU; it computes in float what TensorRT would compute in
INT8, and its times say nothing about TensorRT. What builds a plan is the tests' made-up builder.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnxruntime

from tests.edge_runtime.fake_gpu import tensorrt as made_up
from tests.edge_runtime.fake_gpu.tensorrt import *  # noqa: F403
from tests.edge_runtime.fake_gpu.tensorrt import MAGIC, Engine, ExecutionContext

__version__ = "stand-in"
made_up.__version__ = __version__
EXACT = ("LayerNormalization", "Softmax")


class Runtime:
    def __init__(self, log: Any) -> None:
        self._log = log

    def deserialize_cuda_engine(self, plan: bytes) -> TorchEngine:
        header, _, onnx = plan.removeprefix(MAGIC).partition(b"\n")
        return TorchEngine(json.loads(header), onnx)


class TorchEngine(Engine):
    """The file's own weights, on the device once."""

    def __init__(self, facts: dict, onnx: bytes) -> None:
        import onnx as onnx_package
        import torch
        from onnx import numpy_helper

        self.types, self.profile = facts["types"], facts["profile"]
        self.model = onnx_package.load_from_string(onnx)
        self.session = onnxruntime.InferenceSession(onnx)  # for names and shapes alone
        self.ends = [*self.session.get_inputs(), *self.session.get_outputs()]
        self.num_io_tensors = len(self.ends)
        self.stored = {}
        for each in self.model.graph.initializer:
            values = torch.from_numpy(numpy_helper.to_array(each).copy())
            self.stored[each.name] = values if values.dtype == torch.int64 else values.cuda()
        torch.cuda.synchronize()

    def create_execution_context(self) -> TorchContext:
        return TorchContext(self)

    def create_engine_inspector(self) -> Any:
        raise NotImplementedError


class At:
    """Device memory that belongs to somebody else, as torch takes it."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: type) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": np.dtype(dtype).str, "data": (address, False), "version": 3,
        }  # fmt: skip


class TorchContext(ExecutionContext):
    def set_tensor_address(self, name: str, address: int) -> bool:
        self._addresses[name] = address
        return address > 0

    def execute_async_v3(self, handle: int) -> bool:
        import torch

        with torch.no_grad(), torch.cuda.stream(torch.cuda.ExternalStream(handle)):
            half = torch.float16 if self._engine.types == "float16" else torch.float32
            values = dict(self._engine.stored)
            for each in self._engine.session.get_inputs():
                dtype = made_up.nptype(each.type)
                place = At(self._addresses[each.name], self._shapes[each.name], dtype)
                values[each.name] = torch.as_tensor(place, device="cuda")
            for node in self._engine.model.graph.node:
                run_node(torch, node, values, half)
            tokens = At(self._addresses["tokens"], self.get_tensor_shape("tokens"), np.float32)
            torch.as_tensor(tokens, device="cuda").copy_(values["tokens"])
        return True


def run_node(torch: Any, node: Any, values: dict[str, Any], half: Any) -> None:
    """One ONNX node, of those that the frontends of the model families have."""
    from onnx import helper

    have = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    kind, functional = node.op_type, torch.nn.functional
    ends = [values[name] if name else None for name in node.input]
    wanted = torch.float32 if kind in EXACT else half
    if kind not in ("QuantizeLinear", "DequantizeLinear"):
        ends = [
            each.to(wanted) if each is not None and each.dtype in (torch.float16, torch.float32) else each
            for each in ends
        ]
    if kind in ("Add", "Sub", "Mul", "MatMul"):
        work = {"Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "MatMul": torch.matmul}[kind]
        found = work(*ends)
    elif kind == "QuantizeLinear":
        found = torch.round(ends[0].float() / ends[1]).clamp(-128, 127).to(torch.int8)
    elif kind == "DequantizeLinear":
        shape = [1] * ends[0].ndim
        if ends[1].ndim:
            shape[have.get("axis", 1)] = -1
        found = (ends[0].float() * ends[1].reshape(shape)).to(half)
    elif kind == "Conv":
        pads, group = have.get("pads", [0] * 4), have.get("group", 1)
        found = functional.conv2d(
            functional.pad(ends[0], (pads[1], pads[3], pads[0], pads[2])), ends[1], ends[2] if len(ends) > 2 else None,
            stride=have.get("strides", [1, 1]), groups=group,
        )  # fmt: skip
    elif kind == "MaxPool":
        pads = have.get("pads", [0] * 4)
        padded = functional.pad(ends[0], (pads[1], pads[3], pads[0], pads[2]), value=-65504.0)
        found = functional.max_pool2d(padded, have["kernel_shape"], have.get("strides"))
    elif kind == "LayerNormalization":
        found = functional.layer_norm(ends[0], ends[0].shape[have.get("axis", -1) :], ends[1], ends[2], have["epsilon"])
    elif kind == "Softmax":
        found = torch.softmax(ends[0], have.get("axis", -1))
    elif kind in ("Gelu", "Relu"):
        found = functional.gelu(ends[0]) if kind == "Gelu" else torch.relu(ends[0])
    elif kind == "Reshape":
        sizes = [ends[0].shape[place] if size == 0 else int(size) for place, size in enumerate(ends[1].tolist())]
        found = ends[0].reshape(sizes)
    elif kind == "Transpose":
        found = ends[0].permute(have["perm"])
    elif kind == "Shape":
        found = torch.tensor(list(ends[0].shape)[have.get("start", 0) : have.get("end")], dtype=torch.int64)
    elif kind == "Expand":
        found = ends[0].expand(torch.broadcast_shapes(ends[0].shape, tuple(ends[1].tolist())))
    elif kind == "Squeeze":
        found = ends[0].squeeze(tuple(ends[1].tolist()))
    elif kind == "Concat":
        found = torch.cat(ends, have["axis"])
    elif kind == "Gather":
        found = torch.index_select(ends[0], have.get("axis", 0), ends[1].flatten().to(ends[0].device))
    elif kind == "Identity":
        found = ends[0]
    elif kind == "Slice":
        found = ends[0]
        axes = ends[3].tolist() if len(ends) > 3 else range(len(ends[1]))
        for start, stop, axis in zip(ends[1].tolist(), ends[2].tolist(), axes, strict=True):
            found = found[(slice(None),) * (axis % found.ndim) + (slice(start, stop),)]
    elif kind == "Split":
        parts = torch.split(ends[0], ends[1].tolist(), have.get("axis", 0))
        values.update(zip(node.output, parts, strict=True))
        return
    else:
        raise NotImplementedError(f"the stand-in has no {kind}")
    values[node.output[0]] = found
