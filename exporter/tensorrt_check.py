"""--tensorrt: builds TensorRT plans of the file that was just made, so that no device need be the first to try.

Nothing of it is shipped: a plan fits one GPU and one version, and devices build their own. The builder is the device's,
run as a command; with `tensorrt_rtx` it needs no GPU, and builds for one of compute capability 8.6.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from contract.console import say
from contract.errors import ExportError

TYPES = ("float16", "float32")
_BUILDER = "edge_runtime.plans.child"
_CAPABILITY = "SM86"  # of GeForce 30 cards; an Orin's 8.7 is not among those that can be named
_BUILD_S = 3600.0


def check_plans(onnx: Path, patches: int, scratch: Path) -> list[dict[str, object]]:
    """Figures of both plans: types, library, version, seconds, plan_bytes, layers of the network by type.

    Raises: ExportError with TensorRT's own words when it does not take the file, or is not installed here.
    """
    figures = []
    for types in TYPES:
        request = {
            "onnx": str(onnx), "plan": str(scratch / f"{types}.plan"), "types": types, "batch_usual": 4,
            "batch_most": 8, "patches": patches, "workspace_share": 0.25, "level": 3, "few_tactics": False,
            "timing_cache": None, "capability": _CAPABILITY,
        }  # fmt: skip
        words = [sys.executable, "-m", _BUILDER, json.dumps(request)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=_BUILD_S)
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["it says nothing"]
            said = lines[-1] if lines[0].startswith("Traceback") else lines[0]
            raise ExportError(
                f"--tensorrt: no {types} plan could be built here: {said[:300]}",
                "pip install tensorrt-rtx-cu13, which needs no GPU; or leave --tensorrt out: devices build their own",
            )
        outcome = json.loads(done.stdout.splitlines()[-1])["done"]
        kept = ("library", "version", "seconds", "plan_bytes", "layers", "peak_bytes")
        figures.append({"types": types} | {name: outcome[name] for name in kept})
        counts = ", ".join(f"{count} {name}" for name, count in outcome["layers"].items())
        say(
            f"{outcome['library']} {outcome['version']} built the {types} plan in {outcome['seconds']:.1f} s, "
            f"{outcome['plan_bytes']} bytes; layers by type: {counts}"
        )
    return figures
