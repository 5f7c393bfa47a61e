"""As much of TensorRT's Python interface as engine and builder use; a plan is an ONNX file that onnxruntime runs.

A plan works on the fake device memory of `pycuda.driver`, in stream order. FAKE_TRT (NAME=VALUE, with commas between)
says what a build or a plan does: kill=L and memory=L at optimisation level L and above, refuse=1 in the parser, hang=1,
nan=TYPES, version=V of the plans that are built, none=TYPES (deserialises to None).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from enum import IntEnum
from types import SimpleNamespace

import numpy as np
import onnxruntime
from pycuda import driver

from edge_runtime.engines.onnxruntime import session_options

__version__ = os.environ.get("FAKE_TRT_VERSION", "10.3.0")
MAGIC = b"FAKE-TENSORRT\n"

float16, float32 = "HALF", "FLOAT"
LayerInformationFormat = SimpleNamespace(JSON="json")
NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1)
BuilderFlag = SimpleNamespace(TF32="tf32")
MemoryPoolType = SimpleNamespace(WORKSPACE="workspace")
ProfilingVerbosity = SimpleNamespace(DETAILED="detailed")


def orders() -> dict[str, str]:
    return dict(each.split("=") for each in os.environ.get("FAKE_TRT", "").split(",") if each)


class ILogger:
    def log(self, severity: int, text: str) -> None:
        raise NotImplementedError


class Severity(IntEnum):
    INTERNAL_ERROR, ERROR, WARNING = range(3)


class Logger(ILogger):
    INTERNAL_ERROR, ERROR, WARNING = Severity.INTERNAL_ERROR, Severity.ERROR, Severity.WARNING

    def __init__(self, severity: int) -> None:
        pass

    def log(self, severity: int, text: str) -> None:
        print(f"[TRT] [E] {text}", file=sys.stderr)


class IProgressMonitor:
    pass


def nptype(dtype: str) -> type:
    return {"tensor(float)": np.float32, "tensor(int64)": np.int64}[dtype]


class Builder:
    def __init__(self, log: ILogger) -> None:
        self._log = log

    def create_network(self, flags: int) -> Network:
        assert flags == 1 << 1
        return Network()

    def create_builder_config(self) -> Config:
        return Config()

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network(self, network: Network, config: Config) -> memoryview | None:
        asked, level = orders(), config.builder_optimization_level
        config.progress_monitor.phase_start("build", None, 2)
        config.progress_monitor.step_complete("build", 0)
        if level >= int(asked.get("kill", 9)):
            os.kill(os.getpid(), signal.SIGKILL)
        if level >= int(asked.get("memory", 9)):
            self._log.log(Logger.ERROR, "Error Code 10: Could not find any implementation for node MatMul_7.")
            return None
        if "hang" in asked:
            time.sleep(600)
        config.progress_monitor.phase_finish("build")
        header = {
            "version": asked.get("version", __version__),
            "types": network.types,
            "profile": config.profile.shapes,
        }
        plan = np.frombuffer(MAGIC + json.dumps(header).encode() + b"\n" + network.data, np.uint8)
        return memoryview(plan)


class Network:
    """No layers are told of; the types are known by the file that the plan goes to, as `to_half` adds no casts here."""

    num_layers = num_outputs = 0
    data = b""
    types = ""

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    def get_input(self, number: int) -> SimpleNamespace:
        return self.inputs[number]


class OnnxParser:
    num_errors = 1

    def __init__(self, network: Network, log: ILogger) -> None:
        self._network = network

    def parse_from_file(self, path: str) -> bool:
        if "refuse" in orders():
            return False
        with open(path, "rb") as stream:
            self._network.data = stream.read()
        session = onnxruntime.InferenceSession(self._network.data)
        self._network.inputs = [
            SimpleNamespace(name=each.name, shape=[size if isinstance(size, int) else -1 for size in each.shape])
            for each in session.get_inputs()
        ]
        self._network.types = json.loads(sys.argv[1])["types"]
        return True

    def get_error(self, number: int) -> str:
        return "In node 12 with name: Gelu_5 and operator: Gelu (importer): UNSUPPORTED_NODE: no such plugin"


class Config:
    builder_optimization_level = 3
    profiling_verbosity = progress_monitor = None

    def set_memory_pool_limit(self, pool: str, size_bytes: int) -> None:
        assert size_bytes > 0

    def clear_flag(self, flag: str) -> None:
        assert flag == "tf32"

    def set_tactic_sources(self, sources: int) -> None:
        assert sources == 0

    def create_timing_cache(self, data: bytes) -> SimpleNamespace:
        return SimpleNamespace(serialize=lambda: data + b"timed")

    def set_timing_cache(self, cache: SimpleNamespace, ignore_mismatch: bool) -> None:
        self.cache = cache

    def get_timing_cache(self) -> SimpleNamespace:
        return self.cache

    def add_optimization_profile(self, profile: Profile) -> None:
        self.profile = profile


class Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, list[list[int]]] = {}

    def set_shape(self, name: str, *shapes: tuple[int, ...]) -> None:
        assert len(shapes) == 3
        self.shapes[name] = [list(shape) for shape in shapes]


class Runtime:
    def __init__(self, log: ILogger) -> None:
        driver._called("Runtime")
        self._log = log

    def deserialize_cuda_engine(self, plan: bytes) -> Engine | None:
        driver._called("deserialize_cuda_engine")
        header, _, onnx = plan.removeprefix(MAGIC).partition(b"\n")
        if not plan.startswith(MAGIC):
            self._log.log(Logger.ERROR, "Error Code 1: Serialization (magic tag does not match)")
            return None
        facts = json.loads(header)
        if facts["version"] != __version__ or facts["types"] == orders().get("none"):
            self._log.log(Logger.ERROR, f"The engine plan file is of version {facts['version']}, not {__version__}")
            return None
        return Engine(facts, onnx)


class Engine:
    def __init__(self, facts: dict, onnx: bytes) -> None:
        self.types, self.profile = facts["types"], facts["profile"]
        self.session = onnxruntime.InferenceSession(onnx, session_options())  # as the engine that it is compared with
        self.ends = [*self.session.get_inputs(), *self.session.get_outputs()]
        self.num_io_tensors = len(self.ends)

    def get_tensor_name(self, number: int) -> str:
        return self.ends[number].name

    def get_tensor_dtype(self, name: str) -> str:
        return next(each.type for each in self.ends if each.name == name)

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        return [tuple(shape) for shape in self.profile[name]]

    def create_execution_context(self) -> ExecutionContext:
        driver._called("create_execution_context")
        return ExecutionContext(self)

    def create_engine_inspector(self) -> SimpleNamespace:
        reads = {"Format/Datatype": "Row major Int8 format"}
        layers = [{"Name": "linear", "LayerType": "CaskGemmMatrixMultiply", "Inputs": [reads], "Outputs": []}]
        return SimpleNamespace(get_engine_information=lambda form: json.dumps({"Layers": layers}))


class ExecutionContext:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, most = self._engine.get_tensor_profile_shape(name, 0)
        self._shapes[name] = tuple(shape)
        return len(shape) == len(most) and all(
            low <= size <= high for low, size, high in zip(least, shape, most, strict=True)
        )

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self._shapes:
            return self._shapes[name]
        tokens = self._engine.session.get_outputs()[0].shape
        count = self._shapes["keep"][1] if "keep" in self._shapes else tokens[1]
        return (self._shapes["images"][0], count, tokens[2])

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._addresses[name] = address
        return address in driver.memory

    def execute_async_v3(self, handle: int) -> bool:
        driver._called("execute_async_v3")
        shapes = dict(self._shapes)
        shapes["tokens"] = self.get_tensor_shape("tokens")

        def work() -> None:
            feeds = {}
            for each in self._engine.session.get_inputs():
                data = driver.memory[self._addresses[each.name]].data
                dtype = np.dtype(nptype(each.type))
                size_bytes = int(np.prod(shapes[each.name])) * dtype.itemsize
                feeds[each.name] = np.frombuffer(data[:size_bytes].tobytes(), dtype).reshape(shapes[each.name])
            rows = [
                self._engine.session.run(None, {name: value[row : row + 1] for name, value in feeds.items()})[0]
                for row in range(shapes["images"][0])
            ]
            tokens = np.concatenate(rows)
            if self._engine.types == "float16":
                tokens = tokens.astype(np.float16).astype(np.float32)
            if self._engine.types == orders().get("nan"):
                tokens[...] = np.nan
            place = driver.memory[self._addresses["tokens"]].data
            place[: tokens.nbytes] = np.frombuffer(tokens.tobytes(), np.uint8)

        driver.streams[handle].queue.append(work)
        return True
