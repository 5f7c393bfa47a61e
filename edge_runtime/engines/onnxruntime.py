"""ONNX Runtime on the CPU: QDQ files at int8 speed, with memory that reaches a plateau (ER-01, ER-03).

It runs what it is given; verifying the file is left to `install`, the thread count to the caller, and what the counted
kernels mean to `int8_check`. The session is profiled during its first run, which warms it up as well: that is the only
report of what really ran, and it costs neither a second session nor the optimised file.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from contract.errors import EngineError
from contract.scratch import scratch_folder
from edge_runtime.cpus import has_vnni
from edge_runtime.engines._streams import PATCHES, Streams, patches_of, trial_feed
from edge_runtime.int8_check import Kernels, of_onnxruntime


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
    with scratch_folder("cutlayer-profile-") as folder:
        options = session_options()
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / "run")
        try:
            session = onnxruntime.InferenceSession(
                model if isinstance(model, bytes) else str(model), options, providers=["CPUExecutionProvider"]
            )
            patches = patches_of(session.get_modelmeta().custom_metadata_map.get(PATCHES))
            session.run(None, trial_feed(session.get_inputs()[0].shape, patches))
            profile = json.loads(Path(session.end_profiling()).read_text())
        except EngineError:
            raise
        except Exception as error:  # onnxruntime raises classes of its own that share no base but Exception
            raise EngineError(
                f"onnxruntime {onnxruntime.__version__} cannot run the frontend: {str(error).splitlines()[0][:300]}",
                "compare its version with engine.onnxruntime_min of the manifest, or export with --opset 17",
            ) from error
    return OnnxRuntimeEngine(session, threads, of_onnxruntime(profile, platform.machine()), patches)


class OnnxRuntimeEngine:
    """`threads` single-threaded runs side by side on one session."""

    name = "onnxruntime"

    def __init__(
        self, session: onnxruntime.InferenceSession, threads: int, kernels: Kernels, patches: int | None
    ) -> None:
        self.version: str = onnxruntime.__version__
        self.threads = threads
        self.kernels: Kernels | None = kernels
        self._session = session
        self._streams = Streams(self._run_one, threads, patches)

    def run(self, images: NDArray[np.float32], keep: NDArray[np.int64] | None = None) -> NDArray[np.float32]:
        """Tokens (B, T, d) of images (B, 3, h, w), each image a run of its own."""
        return self._streams.run(images, keep)

    def _run_one(self, feed: dict[str, NDArray[np.generic]]) -> NDArray[np.float32]:
        try:
            tokens: NDArray[np.float32] = self._session.run(None, feed)[0]
        except Exception as error:  # see open_model
            raise EngineError(
                f"onnxruntime failed: {str(error).splitlines()[0][:300]}",
                "check the memory that is free, then start again",
            ) from error
        return tokens
