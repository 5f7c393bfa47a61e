"""One ONNX graph of a client part in an onnxruntime session of its own, held against the cut that names it.

What the graphs are run for is left to `trainer`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from contract.errors import EngineError, PackageError
from contract.training import PROJECTION, TrainingCut

Floats: TypeAlias = NDArray[np.float32]
Values: TypeAlias = dict[str, Any]  # onnxruntime.OrtValue by name; its package has no types

AT_THE_CUT = ("z", "grad_z")
FETCH_AGAIN = (
    "get the package again from its publisher; if it fails again, export it anew with this version of Cutlayer"
)


@functools.cache
def share_arena() -> None:
    """One arena for all graphs of this process, so that backward reuses what forward has let go of.

    It grows to the largest step and stays there. ResNet-18's first part, batch 64 at 32 px, 1 thread: 1.79 s and 561 MB
    at most; an arena for each session 1.82 s and 765 MB; none 2.36 s and 551 MB.
    """
    place = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    onnxruntime.create_and_register_allocator(place, None)


def session_options(threads: int) -> onnxruntime.SessionOptions:
    """No spinning beside other programs, and memory from the arena that all graphs share."""
    share_arena()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads  # set explicitly: the default pins threads to cores that a cpuset may forbid
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


class Graph:
    """One session: names and shapes, and runs that leave their outputs inside onnxruntime."""

    def __init__(self, path: Path, threads: int) -> None:
        self.name = path.name
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), session_options(threads), providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime raises classes of its own that share no base but Exception
            raise EngineError(
                f"onnxruntime {onnxruntime.__version__} cannot open {path.name}: {_first_line(error)}",
                "install onnxruntime 1.19 or newer; if that does not help, get the package again",
            ) from error
        self.inputs: dict[str, list[int | str]] = {each.name: each.shape for each in self._session.get_inputs()}
        self.outputs: dict[str, list[int | str]] = {each.name: each.shape for each in self._session.get_outputs()}

    def run(self, outputs: list[str], feeds: Mapping[str, Any]) -> Values:
        missing = self.inputs.keys() - feeds.keys()
        if missing:
            raise ValueError(f"{self.name} needs {', '.join(sorted(missing))}")
        try:
            values = self._session.run_with_ort_values(outputs, {name: feeds[name] for name in self.inputs})
        except Exception as error:  # see __init__
            raise EngineError(
                f"onnxruntime failed in {self.name}: {_first_line(error)}",
                "check the memory that is free, or use smaller batches",
            ) from error
        return dict(zip(outputs, values, strict=True))


def check_graph(graph: Graph, role: str, cut: TrainingCut, tensors: Mapping[str, Floats]) -> None:
    """Raises: PackageError when a graph's names or shapes are not those of its cut."""
    saved = {f"saved:{number}" for number in range(cut.saved)}
    data = {
        "forward": {"x", "keep", "targets", "anchors"},
        "backward": {"x", "keep", "targets", "anchors", "pull", "grad_z", *saved},
        "evaluate": {"x"},
    }[role]
    unknown = graph.inputs.keys() - data - tensors.keys()
    if unknown:
        raise PackageError(f"{graph.name} asks for {min(unknown)}, which cut {cut.index} does not have", FETCH_AGAIN)
    new = {f"new:{name}" for name in cut.buffers}
    told = {"loss"} if cut.loss != "none" else {"embedding", "distance"} if PROJECTION[0] in cut.trainable else set()
    needed = {
        "forward": {"z", *saved, *told},
        "backward": {f"grad:{name}" for name in cut.trainable},
        "evaluate": {"z"},
    }[role]
    allowed = needed | new if role == "forward" else needed
    odd = (needed - graph.outputs.keys()) | (graph.outputs.keys() - allowed)
    if odd:
        raise PackageError(
            f"{graph.name} should give {len(needed)} outputs of cut {cut.index}; missing or unknown is {min(odd)}",
            FETCH_AGAIN,
        )
    for name, shape in (graph.inputs | graph.outputs).items():
        expected = _expected_shape(name, cut, tensors)
        found = shape[1:] if name in AT_THE_CUT else shape
        if role == "evaluate" and name in AT_THE_CUT:
            expected = cut.evaluated_shape
        elif name in AT_THE_CUT and cut.kept is not None:
            found = [*expected[:1], *found[1:]] if expected else found  # how many tokens is decided by `keep`
        if expected is not None and not fits(found, expected):
            raise PackageError(
                f"{graph.name}: {name} should have the shape {expected}, found {tuple(shape)}", FETCH_AGAIN
            )


def fits(shape: Sequence[int | str], expected: Sequence[int]) -> bool:
    """Are the axes those expected?"""
    return tuple(shape) == tuple(expected)


def _expected_shape(name: str, cut: TrainingCut, tensors: Mapping[str, Floats]) -> tuple[int, ...] | None:
    """Of a tensor all axes, of z those after the batch, None for what the graph alone decides."""
    if name in AT_THE_CUT:
        return cut.output_shape
    tensor = tensors.get(name.removeprefix("grad:").removeprefix("new:"))
    return None if tensor is None else tensor.shape


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__
