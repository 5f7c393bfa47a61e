"""OpenVINO on the CPU: the same ONNX file, faster than ONNX Runtime on x86 with VNNI, for more memory.

It is an extra (`pip install cutlayer[openvino]`) and imported only when chosen: `--engine DIR/front.openvino`. What the
counted kernels mean is left to `int8_check`. Where the CPU has no VNNI its int8 kernels saturate (int8.md 5) and cannot
be told not to: the golden vectors decide whether that is near enough.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.errors import EngineError
from edge_runtime.engines._streams import PATCHES, Streams, patches_of, trial_feed
from edge_runtime.int8_check import Kernels, of_openvino


def open_model(model: Path | bytes, threads: int) -> OpenVinoEngine:
    """The model compiled for `threads` streams of one thread each, which share its weights, and run once.

    Raises: EngineError when OpenVINO is missing or refuses the model.
    """
    openvino = load_openvino()
    if isinstance(model, bytes) and not model or isinstance(model, Path) and not model.stat().st_size:
        raise EngineError("the frontend's file is empty", "copy the package folder again from the server")
    try:
        core = openvino.Core()
        graph = core.read_model(model)
        patches = patches_of(metadata(graph, PATCHES))
        shape = [axis.get_length() if axis.is_static else 1 for axis in graph.inputs[0].get_partial_shape()]
        if patches is None:
            graph.reshape([1, *shape[1:]])  # one image a run; a fixed shape lets it choose kernels beforehand
        compiled = core.compile_model(graph, "CPU", compile_options(threads))
        requests = [compiled.create_infer_request() for _ in range(threads)]
        requests[0].infer(trial_feed(shape, patches))
        kernels = of_openvino(runtime_layers(compiled))
    except EngineError:
        raise
    except Exception as error:  # OpenVINO raises RuntimeError and others with its C++ text
        raise EngineError(
            f"OpenVINO {openvino.__version__} cannot run the frontend: {last_line(error)}",
            "use --engine with the package folder alone, which takes onnxruntime",
        ) from error
    return OpenVinoEngine(str(openvino.__version__), requests, kernels, patches)


def load_openvino() -> ModuleType:
    """OpenVINO without its telemetry. Raises: EngineError that says how to install it."""
    # Importing openvino 2026 sends an event to google-analytics.com and writes an id into ~/intel. A device reports to
    # nobody: without this package openvino takes a stub of its own.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    try:
        return importlib.import_module("openvino")
    except ImportError as error:
        raise EngineError(
            f"the Python package openvino cannot be imported: {str(error).splitlines()[0]}",
            "pip install 'cutlayer[openvino]' (x86), or use --engine with the package folder alone: onnxruntime",
        ) from error


def compile_options(threads: int) -> dict[str, object]:
    """One stream a thread, not pinned to cores that a cpuset may forbid, and float32 wherever it is not int8."""
    return {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": threads,
        "ENABLE_CPU_PINNING": False,
        "INFERENCE_PRECISION_HINT": "f32",  # the default is bf16 where the CPU has it: other tokens on other devices
    }


def metadata(graph: Any, key: str) -> object:
    """A value of the ONNX file's own metadata, None where it has none."""
    path = ["framework", key]
    return graph.get_rt_info(path).value if graph.has_rt_info(path) else None


def runtime_layers(compiled: Any) -> list[tuple[str, str, str, str]]:
    """(name, layer type, precision, kernel) of every node that was compiled."""
    layers = []
    for node in compiled.get_runtime_model().get_ordered_ops():
        facts = node.get_rt_info()
        kind, precision, kernel = (
            facts[key].astype(str) if key in facts else "" for key in ("layerType", "runtimePrecision", "primitiveType")
        )
        layers.append((node.get_friendly_name(), kind, precision, kernel))
    return layers


def last_line(error: Exception) -> str:
    """What OpenVINO says went wrong: the lines before are where in its source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__


class OpenVinoEngine:
    """One request for each stream; a run takes one that is free."""

    name = "openvino"

    def __init__(self, version: str, requests: list[Any], kernels: Kernels, patches: int | None) -> None:
        self.version = version.split("-")[0]  # the rest is the build's commit
        self.threads = len(requests)
        self.kernels: Kernels | None = kernels
        self._free: SimpleQueue[Any] = SimpleQueue()
        for request in requests:
            self._free.put(request)
        self._streams = Streams(self._run_one, self.threads, patches)

    def run(self, images: NDArray[np.float32], keep: NDArray[np.int64] | None = None) -> NDArray[np.float32]:
        """Tokens (B, T, d) of images (B, 3, h, w), each image a run of its own."""
        return self._streams.run(images, keep)

    def _run_one(self, feed: dict[str, NDArray[np.generic]]) -> NDArray[np.float32]:
        request = self._free.get()
        try:
            request.infer(feed)
            tokens: NDArray[np.float32] = np.array(request.get_output_tensor(0).data, np.float32)
        except Exception as error:  # see open_model
            raise EngineError(
                f"OpenVINO failed: {last_line(error)}", "check the memory that is free, then start again"
            ) from error
        finally:
            self._free.put(request)
        return tokens
