"""What a build may use, attempt after attempt, and what it means when one fails. Pure.

A build that the system kills, or that finds "no implementation", ran out of memory far more often than out of kernels
(EN-03): the next attempt gets less workspace, and then fewer kernels to try.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Rung:
    """One attempt: share of the free memory for workspace, TensorRT's optimisation level, which kernels it tries."""

    workspace_share: float
    level: int
    few_tactics: bool


RUNGS = (Rung(0.5, 3, False), Rung(0.25, 2, False), Rung(0.125, 1, True), Rung(0.03, 0, True))

_MEMORY = re.compile(
    r"out of memory|OutOfMemory|insufficient memory|bad_alloc|memoryallocation|cannot allocate|"
    r"(no|any) implementation|requested amount of (GPU )?memory",
    re.IGNORECASE,
)
_PARSE = re.compile(r"UNSUPPORTED_NODE|unsupported|No importer|importer|parse", re.IGNORECASE)


@dataclass(frozen=True)
class Ended:
    """How a build's process ended: its exit code (negative: the signal that killed it), what it said, what it had."""

    code: int
    errors: tuple[str, ...]
    free_bytes: int | None
    workspace_bytes: int | None


@dataclass(frozen=True)
class Failure:
    """Why there is no plan; after a lack of memory a smaller attempt may do."""

    is_memory: bool
    cause: str
    cure: str


def explain(ended: Ended) -> Failure:
    """What a build that failed ran into, with figures."""
    words = next((line for line in ended.errors if _MEMORY.search(line)), None)
    traced = any(line.startswith("Traceback") for line in ended.errors)  # of Python, whose last line tells
    said = (words or next(iter(ended.errors[-1:] if traced else ended.errors), "it says nothing")).strip()[:300]
    if ended.code == -signal.SIGKILL or words is not None:
        how = "was killed" if ended.code < 0 else f"failed ({said})"
        return Failure(
            True,
            f"building the plan {how}: too little memory{_figures(ended)}",
            "stop the desktop and other programs, add swap for the part that is no GPU memory, or build fewer layers "
            "(a package with a smaller --split)",
        )
    if ended.code < 0:
        return Failure(
            False, f"building the plan ended by signal {-ended.code}: {said}", "report this with TensorRT's version"
        )
    if _PARSE.search(said):
        return Failure(
            False,
            f"TensorRT does not take the frontend: {said}",
            "compare its version with docs/tensorrt.md; TensorRT 10 takes packages of --opset 20",
        )
    return Failure(False, f"building the plan failed: {said}", "run on onnxruntime, and report this")


def _figures(ended: Ended) -> str:
    if ended.free_bytes is None or ended.workspace_bytes is None:
        return ""
    return f" ({ended.free_bytes / GIB:.1f} GiB were free, {ended.workspace_bytes / GIB:.1f} GiB given as workspace)"
