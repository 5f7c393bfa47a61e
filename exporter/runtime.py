"""onnxruntime as the exporter uses it: one way to open a session, to run it and to see which kernels ran.

What the outputs should be is left to exporter.parity.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from contract.errors import ExportError, why
from exporter.masked_frontend import KEEP_NAME, PATCHES_KEY
from exporter.onnx_graph import INPUT_NAME, OUTPUT_NAME

INT8_KERNELS = ("MatMulIntegerToFloat", "QLinearMatMul", "QGemm", "MatMulInteger", "DynamicQuantizeMatMul")
_CPU_FACTS = Path("/proc/cpuinfo")


def open_session(
    model: str | bytes, threads: int, profile_prefix: Path | None = None, *,
    fault: str = "refuses the exported file", cure: str = "choose another --opset, or report the model",
) -> onnxruntime.InferenceSession:  # fmt: skip
    """CPU session of an ONNX file or its bytes; with `profile_prefix` it writes a profile when ended.

    x86 processors without VNNI add two products in 16 bits, which saturates (int8.md section 5): there the exact
    unsigned kernels are asked for, so that figures and golden vectors do not depend on this machine.

    Raises ExportError when onnxruntime refuses the file, with what else `fault` and `cure` say of it.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # it halves the speed on a shared machine
    if _saturates(_CPU_FACTS.read_text() if _CPU_FACTS.exists() else ""):
        options.add_session_config_entry("session.x64quantprecision", "1")
    if profile_prefix is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile_prefix)
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors share no base class
        raise ExportError(f"onnxruntime {onnxruntime.__version__} {fault}: {why(error)}", cure) from error


def _saturates(cpu_facts: str) -> bool:
    flags = cpu_facts.split()
    return "avx2" in flags and "avx512_vnni" not in flags and "avx_vnni" not in flags


def run_tokens(session: onnxruntime.InferenceSession, images: NDArray[np.float32]) -> NDArray[np.float32]:
    """Tokens (B, T, d) of normalised images (B, 3, h, w), of every patch where the file takes a choice."""
    feed: dict[str, NDArray[np.generic]] = {INPUT_NAME: images}
    patches = session.get_modelmeta().custom_metadata_map.get(PATCHES_KEY)
    if patches is not None:
        feed[KEEP_NAME] = np.tile(np.arange(int(patches)), (len(images), 1))
    return session.run([OUTPUT_NAME], feed)[0]


def executed_kernels(model: str | bytes, images: NDArray[np.float32], folder: Path) -> Mapping[str, int]:
    """How often each operator ran in one run, as onnxruntime's own profile tells it; `folder` is scratch space."""
    session = open_session(model, threads=1, profile_prefix=folder / "profile")
    run_tokens(session, images)
    profile = Path(session.end_profiling())
    try:
        events = json.loads(profile.read_text())
    finally:
        profile.unlink()
    return Counter(
        event["args"]["op_name"]
        for event in events
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
    )
