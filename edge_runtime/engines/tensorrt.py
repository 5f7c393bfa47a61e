"""TensorRT on an NVIDIA GPU: a plan that was built on this very device (edge_runtime.plans), run batch by batch.

One engine over `tensorrt` 10 and 11, which JetPack brings, and `tensorrt_rtx` for GeForce and RTX cards: their Python
interfaces agree in all that is used here. Buffers and streams are pycuda's, in one thread (`_cuda`). Building a plan,
knowing it again and judging it are left to `plans`: a plan is machine code, and none is opened here that was not
checked there. No GPU this software has met so far can run one: docs/tensorrt.md says what was verified, and how.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.errors import EngineError
from edge_runtime.engines._cuda import Lane, Owner, load_driver
from edge_runtime.engines._streams import IMAGES, KEEP, checked_keep
from edge_runtime.int8_check import Kernels, PlanLayers, layers_of_plan

TOKENS = "tokens"
LIBRARIES = ("tensorrt", "tensorrt_rtx")  # of several the first that can be imported
GET = (
    "on a Jetson, make the environment with python3 -m venv --system-site-packages: JetPack installs TensorRT for the "
    "system's Python; elsewhere pip install tensorrt or tensorrt-rtx; see docs/tensorrt.md"
)


class PlanRefusedError(EngineError):
    """TensorRT does not take the plan at all: only another plan helps."""


def load_library() -> Any:
    """TensorRT's Python module. Raises: EngineError that says why there is none."""
    reasons = []
    for name in LIBRARIES:
        try:
            return importlib.import_module(name)
        except (ImportError, OSError) as error:  # OSError: its own libraries are missing
            reasons.append(f"{name}: {(str(error).splitlines() or ['?'])[0][:200]}")
    raise EngineError(f"TensorRT cannot be imported ({'; '.join(reasons)})", GET)


def make_log(library: Any) -> Any:
    """A logger that keeps what TensorRT calls errors, as `lines`, and prints nothing."""

    class Log(library.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.lines: list[str] = []

        def log(self, severity: Any, text: str) -> None:
            if severity in (library.Logger.INTERNAL_ERROR, library.Logger.ERROR):
                self.lines.append(text)

    return Log()


def open_model(model: Path | bytes, threads: int) -> TensorRtEngine:
    """The engine of a plan; `threads` of this machine's CPU do not matter to it.

    Raises: EngineError when TensorRT, pycuda or the GPU is missing, or the plan is refused.
    """
    plan = model if isinstance(model, bytes) else model.read_bytes()
    if not plan:
        raise EngineError("the plan is empty", "remove it: it is built again at the next start")
    library = load_library()
    owner = Owner(load_driver())
    try:
        return TensorRtEngine(library, owner, plan)
    except BaseException:
        owner.close()
        raise


class TensorRtEngine:
    """One execution context and one set of buffers, for the largest batch of the plan's profile."""

    name = "tensorrt"

    def __init__(self, library: Any, owner: Owner, plan: bytes) -> None:
        """Raises: EngineError when the plan cannot be run."""
        rtx = " for RTX" if library.__name__ == LIBRARIES[1] else ""
        self.version = f"{library.__version__}{rtx}"
        self._library, self._owner, self._log = library, owner, make_log(library)
        self._runtime: Any = None
        self._engine: Any = None
        self._context: Any = None
        self._lane: Lane | None = None
        owner.at_end(self._free)
        owner.do(lambda: self._open(plan))
        self.threads = self._batch_most  # images that run side by side
        self.layers: PlanLayers | None = layers_of_plan(owner.do(self._inspect))
        self.kernels: Kernels | None = None if self.layers is None else self.layers.kernels

    def run(self, images: NDArray[np.float32], keep: NDArray[np.int64] | None = None) -> NDArray[np.float32]:
        """Tokens (B, T, d) of images (B, 3, h, w); more images than the plan takes at once go one part after another.

        Raises: EngineError for images or patches that the plan's profile does not take, or when TensorRT fails.
        """
        if images.shape[1:] != self._image or not len(images):
            raise EngineError(
                f"images should be {('B', *self._image)}, found {images.shape}", "report this: sizes are the package's"
            )
        chosen = checked_keep(images, keep, self._patches)
        if chosen is not None and chosen.shape[1] > (self._patches or 0):
            raise EngineError(f"the plan takes {self._patches} patches at most, found {chosen.shape[1]}", "report this")
        most, parts = self._batch_most, []
        for start in range(0, len(images), most):
            feed: dict[str, NDArray[Any]] = {IMAGES: np.ascontiguousarray(images[start : start + most], np.float32)}
            if chosen is not None:
                feed[KEEP] = np.ascontiguousarray(chosen[start : start + most])
            parts.append(self._owner.do(lambda feed=feed: self._run_part(feed)))  # type: ignore[misc]
        return np.concatenate(parts)

    def close(self) -> None:
        """Give the device's memory back."""
        self._owner.close()

    def _open(self, plan: bytes) -> None:
        library = self._library
        self._runtime = library.Runtime(self._log)
        self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            failed = self._failed("refuses the plan", "build it again: remove it, or start once more")
            raise PlanRefusedError(failed.cause, failed.cure)
        self._context = self._engine.create_execution_context()
        if self._context is None:
            raise self._failed("has no memory for the plan", "stop other programs on the GPU, then start again")
        names = [self._engine.get_tensor_name(place) for place in range(self._engine.num_io_tensors)]
        if set(names) - {KEEP} != {IMAGES, TOKENS}:
            raise EngineError(f"the plan's tensors should be {IMAGES} and {TOKENS}, found {names}", "remove the plan")
        self._dtypes = {name: np.dtype(library.nptype(self._engine.get_tensor_dtype(name))) for name in names}
        largest = {name: tuple(self._engine.get_tensor_profile_shape(name, 0)[2]) for name in names if name != TOKENS}
        for name, shape in largest.items():
            self._take(self._context.set_input_shape(name, shape), f"takes no {name} {shape}")
        largest[TOKENS] = tuple(self._context.get_tensor_shape(TOKENS))
        if min(map(min, largest.values())) < 1:
            raise self._failed(f"cannot tell the size of {largest}", "report this with the package's manifest")
        self._batch_most, self._image = largest[IMAGES][0], largest[IMAGES][1:]
        self._patches = largest[KEEP][1] if KEEP in largest else None
        sizes = {name: int(np.prod(shape)) * self._dtypes[name].itemsize for name, shape in largest.items()}
        self._lane = Lane(load_driver(), sizes)
        for name, memory in self._lane.memory.items():
            self._take(self._context.set_tensor_address(name, int(memory.device)), f"takes no address of {name}")

    def _run_part(self, feed: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
        lane, context = self._lane, self._context
        assert lane is not None and context is not None
        try:
            for name, array in feed.items():
                self._take(context.set_input_shape(name, array.shape), f"takes no {name} {array.shape}")
                lane.send(name, array.astype(self._dtypes[name], copy=False))
            self._take(context.execute_async_v3(lane.stream.handle), "failed")
            tokens = lane.receive(TOKENS, tuple(context.get_tensor_shape(TOKENS)), self._dtypes[TOKENS])
            lane.wait()
        except EngineError:
            raise
        except Exception as error:  # pycuda's errors share no base but Exception
            raise EngineError(
                f"the GPU failed: {(str(error).splitlines() or ['?'])[0][:300]}",
                "check the memory that is free and the kernel's log (dmesg), then start again",
            ) from error
        return np.array(tokens, np.float32)  # a copy: the next part is received into the same memory

    def _inspect(self) -> str | None:
        """What the plan's layers are, as JSON; None where this version does not tell."""
        try:
            inspector = self._engine.create_engine_inspector()
            return str(inspector.get_engine_information(self._library.LayerInformationFormat.JSON))
        except Exception:  # it is for the report alone
            return None

    def _take(self, worked: bool, what: str) -> None:
        if not worked:
            raise self._failed(what, "check the memory that is free, then start again")

    def _failed(self, what: str, cure: str) -> EngineError:
        reason = self._log.lines[-1].strip().splitlines()[0][:300] if self._log.lines else "it gives no reason"
        return EngineError(f"TensorRT {self.version} {what}: {reason}", cure)

    def _free(self) -> None:
        """In this order, in the owner's thread: memory in use by a context may not go first."""
        if self._lane is not None:
            self._lane.wait()
        self._context = self._engine = self._runtime = None
        if self._lane is not None:
            self._lane.free()
