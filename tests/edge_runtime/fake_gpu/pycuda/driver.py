"""As much of pycuda.driver as the engine uses, over ordinary memory, which refuses every wrong use.

- A call needs a context on its own thread's stack (EN-02), and memory of that context.
- Copies and work are done when the stream is waited for, as late as CUDA may do them: whoever overwrites what is still
  to be copied, or reads before it came, gets wrong values.
- Sizes are checked against what was allocated, and host memory must be page-locked.
- `left()` names what was never freed, and contexts that were never popped.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from types import SimpleNamespace

import numpy as np

device_attribute = SimpleNamespace(MULTIPROCESSOR_COUNT="processors", INTEGRATED="integrated")
GPU = {"name": "Fake Orin", "capability": (8, 7), "processors": 8, "driver": 12060, "count": 1}
FREE_BYTES = 4 << 30

_local = threading.local()
_addresses = itertools.count(0x1000, 0x1000)
memory: dict[int, DeviceAllocation] = {}
contexts: list[Context] = []
pinned: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()
late: list[str] = []  # what was let go of where it could not be
calls: list[tuple[str, int]] = []  # name and thread of every call


class LogicError(Exception):
    """As pycuda's."""


def _stack() -> list[Context]:
    if not hasattr(_local, "stack"):
        _local.stack = []
    return _local.stack


def _called(name: str) -> Context:
    """The current context. Raises: LogicError where this thread has none."""
    calls.append((name, threading.get_ident()))
    if not _stack():
        raise LogicError(f"{name} failed: no currently active context on thread {threading.current_thread().name}")
    return _stack()[-1]


def init() -> None:
    if os.environ.get("FAKE_GPU") == "absent":
        raise LogicError("cuInit failed: no CUDA-capable device is detected")


def get_driver_version() -> int:
    return GPU["driver"]


class Context:
    def __init__(self) -> None:
        self.pushed = 0

    def push(self) -> None:
        self.pushed += 1
        _stack().append(self)

    def pop(self) -> None:
        if not _stack() or _stack()[-1] is not self:
            raise LogicError("cannot pop a context that is not on top of this thread's stack")
        _stack().pop()
        self.pushed -= 1


class Device:
    def __init__(self, number: int) -> None:
        assert number == 0

    @staticmethod
    def count() -> int:
        return GPU["count"]

    def name(self) -> str:
        return GPU["name"]

    def compute_capability(self) -> tuple[int, int]:
        return GPU["capability"]

    def get_attribute(self, name: str) -> int:
        return {"processors": GPU["processors"], "integrated": 1}[name]

    def retain_primary_context(self) -> Context:
        if not contexts:
            contexts.append(Context())
        return contexts[0]


def mem_get_info() -> tuple[int, int]:
    _called("mem_get_info")
    return FREE_BYTES, 8 << 30


class DeviceAllocation:
    def __init__(self, size_bytes: int) -> None:
        self.context = _called("mem_alloc")
        self.data = np.full(size_bytes, 0xA5, np.uint8)  # never zeros, which a forgotten copy would hide behind
        self.address = next(_addresses) << 32
        memory[self.address] = self

    def __int__(self) -> int:
        return self.address

    def free(self) -> None:
        if _called("free") is not self.context:
            raise LogicError("freed in another context")
        if memory.pop(self.address, None) is None:
            raise LogicError("freed twice")


def mem_alloc(size_bytes: int) -> DeviceAllocation:
    return DeviceAllocation(size_bytes)


class _PageLocked(np.ndarray):
    """Page-locked memory: what is made of it by slicing and viewing stays known as such."""


def _freed(what: str) -> None:
    """As pycuda, which can let go of nothing in a thread that has no context."""
    if not _stack():
        late.append(f"{what} in an out-of-thread context could not be cleaned up")


def pagelocked_empty(shape: int, dtype: type) -> np.ndarray:
    _called("pagelocked_empty")
    made = np.full(shape, 0x5A, dtype).view(_PageLocked)
    pinned[id(made)] = made
    weakref.finalize(made, _freed, "host memory").atexit = False
    return made


class Stream:
    def __init__(self) -> None:
        self.context = _called("Stream")
        self.queue: list = []
        self.handle = id(self)
        streams[self.handle] = self

    def synchronize(self) -> None:
        if _called("synchronize") is not self.context:
            raise LogicError("waited for in another context")
        queue, self.queue = self.queue, []
        for work in queue:
            work()

    def __del__(self) -> None:
        _freed("stream")

    def is_done(self) -> bool:
        _called("is_done")
        return not self.queue


streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()


def _checked(name: str, device: DeviceAllocation, host: np.ndarray, stream: Stream) -> None:
    context = _called(name)
    if memory.get(int(device)) is not device:
        raise LogicError(f"{name}: the device memory was freed")
    if not context is device.context is stream.context:
        raise LogicError(f"{name}: memory and stream of another context")
    if not isinstance(host, _PageLocked):
        raise LogicError(f"{name}: the host's memory is not page-locked")
    if host.nbytes > device.data.nbytes:
        raise LogicError(f"{name}: {host.nbytes} bytes into {device.data.nbytes}")


def memcpy_htod_async(device: DeviceAllocation, host: np.ndarray, stream: Stream) -> None:
    _checked("memcpy_htod_async", device, host, stream)

    def copy() -> None:
        device.data[: host.nbytes] = np.frombuffer(np.ascontiguousarray(host).tobytes(), np.uint8)

    stream.queue.append(copy)


def memcpy_dtoh_async(host: np.ndarray, device: DeviceAllocation, stream: Stream) -> None:
    _checked("memcpy_dtoh_async", device, host, stream)

    def copy() -> None:
        host[...] = np.frombuffer(device.data[: host.nbytes].tobytes(), host.dtype).reshape(host.shape)

    stream.queue.append(copy)


def memcpy_dtod_async(to: DeviceAllocation, of: DeviceAllocation, size_bytes: int, stream: Stream) -> None:
    _called("memcpy_dtod_async")
    if max(size_bytes - to.data.nbytes, size_bytes - of.data.nbytes) > 0:
        raise LogicError("memcpy_dtod_async: more bytes than there are")

    def copy() -> None:
        to.data[:size_bytes] = of.data[:size_bytes]

    stream.queue.append(copy)


def memset_d32_async(device: DeviceAllocation, value: int, count: int, stream: Stream) -> None:
    _called("memset_d32_async")
    stream.queue.append(lambda: device.data[: 4 * count].view(np.uint32).fill(value))


def left() -> list[str]:
    """What a clean end would not leave."""
    found = [f"{each.data.nbytes} bytes at {address:x} were not freed" for address, each in memory.items()]
    found += [f"{len(each.queue)} works were never waited for" for each in streams.values() if each.queue]
    found += [f"{len(streams)} streams are still held"] if streams else []
    found += [f"{len(pinned)} page-locked arrays are still held"] if pinned else []
    return found + late + [f"a context is on {each.pushed} stacks" for each in contexts if each.pushed]


def forget() -> None:
    """Start a test with nothing."""
    for each in (memory, streams, pinned):
        each.clear()
    contexts.clear()
    calls.clear()
    late.clear()
