"""CUDA through pycuda: one thread that owns the context, memory of fixed size, one stream.

A context belongs to the thread that pushed it (EN-02), so that everything here but `Owner` itself is called inside
`Owner.do`. CUDA is not touched at import. What is computed on the memory is left to the engine.
"""

from __future__ import annotations

import atexit
import importlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from contract.errors import EngineError

CLOSE_S = 5.0  # how long the end of the program waits for the owner to let go of the device
INSTALL = "pip install 'cutlayer[tensorrt]', which compiles pycuda with the CUDA toolkit's nvcc; see docs/tensorrt.md"

Result = TypeVar("Result")


@dataclass(frozen=True)
class Gpu:
    """The card that the first device is, and its driver; read without taking any of its memory."""

    name: str
    capability: str  # as in "8.7"
    processors: int
    driver: int  # CUDA version that the driver speaks, 12060 for 12.6

    @property
    def words(self) -> str:
        return f"{self.name} (compute capability {self.capability}, {self.processors} multiprocessors)"


def load_driver() -> Any:
    """pycuda's driver module, initialised. Raises: EngineError where it is missing or finds no device."""
    try:
        driver = importlib.import_module("pycuda.driver")
    except ImportError as error:
        raise EngineError(f"the Python package pycuda cannot be imported: {first_line(error)}", INSTALL) from error
    try:
        driver.init()
        count = driver.Device.count()
    except Exception as error:  # pycuda's errors share no base but Exception
        raise EngineError(
            f"CUDA does not start: {first_line(error)}", "check the driver with nvidia-smi, or run on onnxruntime"
        ) from error
    if not count:
        raise EngineError("CUDA finds no device", "check the driver with nvidia-smi, or run on onnxruntime")
    return driver


def read_gpu(driver: Any) -> Gpu:
    """What the first device is; no context is made."""
    device = driver.Device(0)
    major, minor = device.compute_capability()
    processors = int(device.get_attribute(driver.device_attribute.MULTIPROCESSOR_COUNT))
    return Gpu(str(device.name()), f"{major}.{minor}", processors, int(driver.get_driver_version()))


def first_line(error: Exception) -> str:
    """What an error says, in a line."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


class Owner:
    """A thread that pushes the device's context, does what it is given in order, and pops it at the end.

    It takes the primary context, the one that TensorRT's own runtime calls would take.
    """

    def __init__(self, driver: Any) -> None:
        """Raises: EngineError when the device gives no context."""
        self._driver = driver
        self._tasks: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._last: list[Callable[[], None]] = []
        self._door, self._closed = threading.Lock(), False
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._work, args=(opened,), name="cuda-owner", daemon=True)
        self._thread.start()
        opened.result()
        atexit.register(self.close)

    def do(self, function: Callable[[], Result]) -> Result:
        """The result of `function`, run in the owner's thread; what it raises is raised here."""
        future: Future[Result] = Future()
        with self._door:
            if self._closed:
                raise EngineError("the engine is closed", "report this: a closed engine was asked for tokens")
            self._tasks.put((function, future))
        return future.result()

    def at_end(self, function: Callable[[], None]) -> None:
        """Run `function` in the owner's thread before the context goes; the last one named runs first."""
        self._last.append(function)

    def close(self) -> None:
        """Free what `at_end` names and let go of the context; a second call does nothing."""
        atexit.unregister(self.close)
        with self._door:
            if not self._closed:
                self._tasks.put(None)  # behind all that was asked for
            self._closed = True
        self._thread.join(CLOSE_S)

    def _work(self, opened: Future[None]) -> None:
        try:
            context = self._driver.Device(0).retain_primary_context()
            context.push()
        except Exception as error:  # see load_driver
            opened.set_exception(
                EngineError(f"the GPU gives no context: {first_line(error)}", "free memory, then start again")
            )
            return
        opened.set_result(None)
        try:
            while (task := self._tasks.get()) is not None:
                function, future = task
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
                del task, function, future  # a result or a closure would keep device memory alive while it waits
        finally:
            for function in reversed(self._last):
                function()
            self._last.clear()
            context.pop()


class Memory:
    """One tensor's place on the device and its twin on the host, of a fixed size, in page-locked memory."""

    def __init__(self, driver: Any, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.host: NDArray[np.uint8] = driver.pagelocked_empty(size_bytes, np.uint8)
        self.device = driver.mem_alloc(size_bytes)

    def free(self) -> None:
        self.device.free()
        del self.host  # pycuda frees page-locked memory with the array's last reader

    def view(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """The host's first bytes as an array. Raises: EngineError when it would not fit."""
        wanted = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if wanted > self.size_bytes:
            raise EngineError(
                f"a tensor {shape} of {wanted} bytes does not fit into {self.size_bytes} bytes of the engine's memory",
                "report this: sizes come from the plan's profile",
            )
        return self.host[:wanted].view(dtype).reshape(shape)


class Lane:
    """A stream and the memory of some tensors: sends, work and receives happen in the order of the calls."""

    def __init__(self, driver: Any, sizes_bytes: dict[str, int]) -> None:
        self._driver = driver
        self.stream = driver.Stream()
        self.memory = {name: Memory(driver, size) for name, size in sizes_bytes.items()}

    def send(self, name: str, array: NDArray[Any]) -> None:
        """Queue a copy of `array` to the device. Only after `wait` may `name` be sent again."""
        memory = self.memory[name]
        place = memory.view(array.shape, array.dtype)
        place[...] = array
        self._driver.memcpy_htod_async(memory.device, place, self.stream)

    def receive(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Queue a copy from the device; the values are there after `wait`, until `name` is received again."""
        memory = self.memory[name]
        place = memory.view(shape, dtype)
        self._driver.memcpy_dtoh_async(place, memory.device, self.stream)
        return place

    def wait(self) -> None:
        """Until all that was queued is done."""
        self.stream.synchronize()

    def free(self) -> None:
        """Memory first, then the stream: pycuda cannot let go of either in a thread without the context."""
        self.wait()
        for memory in self.memory.values():
            memory.free()
        self.memory.clear()
        del self.stream
