"""ONNX Runtime on the CPU: QDQ files at int8 speed, with memory that reaches a plateau (ER-01, ER-03).

It runs what it is given; verifying the file is left to `install`, and the thread count is chosen by the caller.

Images run one at a time, `threads` of them side by side, each on one thread: int8 kernels lose a fifth per image at
batch 8, and barriers inside a layer cost a quarter (int8.md 2). One shape for ever also keeps the memory flat.
"""

from __future__ import annotations

import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from contract.errors import EngineError
from edge_runtime.cpus import has_vnni

INT8_KERNELS = frozenset({"QLinearMatMul", "MatMulIntegerToFloat", "QGemm", "MatMulInteger", "DynamicQuantizeMatMul"})


def session_options() -> onnxruntime.SessionOptions:
    """One thread per run, no spinning beside other programs, and no arena, which only ever grows."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # set explicitly: the default pins threads to cores that a cpuset may forbid
    options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not has_vnni():
        # Without VNNI u8 x s8 saturates and costs 3 dB; the u8 x u8 kernel is exact (int8.md 5).
        options.add_session_config_entry("session.x64quantprecision", "1")
    return options


def open_model(model: Path | bytes, threads: int) -> OnnxRuntimeEngine:
    """A session on the model, profiled once.

    Raises: EngineError with the runtime's own text.
    """
    with tempfile.TemporaryDirectory(prefix="cutlayer-profile-") as folder:
        options = session_options()
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "run")
        try:
            session = onnxruntime.InferenceSession(
                model if isinstance(model, bytes) else str(model), options, providers=["CPUExecutionProvider"]
            )
            shape = [axis if isinstance(axis, int) else 1 for axis in session.get_inputs()[0].shape]
            session.run(None, {session.get_inputs()[0].name: np.zeros(shape, np.float32)})
            profile = json.loads(Path(session.end_profiling()).read_text())
        except Exception as error:  # onnxruntime raises classes of its own that share no base but Exception
            raise EngineError(
                f"onnxruntime {onnxruntime.__version__} cannot run the frontend: {str(error).splitlines()[0][:300]}",
                "compare its version with engine.onnxruntime_min of the manifest, or export with --opset 17",
            ) from error
    return OnnxRuntimeEngine(session, threads, count_int8(profile))


def count_int8(profile: list[dict[str, object]]) -> int:
    """How many nodes of the profiled run were int8 matrix products."""
    nodes = (
        event for event in profile if event.get("cat") == "Node" and str(event.get("name")).endswith("_kernel_time")
    )
    operators = (arguments.get("op_name") for event in nodes if isinstance(arguments := event.get("args"), dict))
    return sum(operator in INT8_KERNELS for operator in operators)


class OnnxRuntimeEngine:
    """`threads` single-threaded runs side by side on one session."""

    name = "onnxruntime"

    def __init__(self, session: onnxruntime.InferenceSession, threads: int, int8_layers: int) -> None:
        self.version: str = onnxruntime.__version__
        self.threads = threads
        self.int8_layers: int | None = int8_layers
        self._session = session
        self._input = session.get_inputs()[0].name
        self._pool = ThreadPoolExecutor(threads, "engine") if threads > 1 else None

    def run(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """Tokens (B, T, d) of images (B, 3, h, w), each image a run of its own."""
        singles = [images[index : index + 1] for index in range(len(images))]
        rows = self._pool.map(self._run_one, singles) if self._pool else map(self._run_one, singles)
        return np.concatenate(list(rows))

    def _run_one(self, image: NDArray[np.float32]) -> NDArray[np.float32]:
        try:
            tokens: NDArray[np.float32] = self._session.run(None, {self._input: image})[0]
        except Exception as error:  # see open_model
            raise EngineError(
                f"onnxruntime failed: {str(error).splitlines()[0][:300]}",
                "check the memory that is free, then start again",
            ) from error
        return tokens
