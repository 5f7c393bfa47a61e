"""The frames between the socket process and the torch process: length, small JSON header, message bytes.

Messages of devices travel as the contract's own codec bytes and are decoded by its strict rules again; nothing is
pickled. What a frame causes is left to `conductor` (torch process) and `server` (socket process).
"""

from __future__ import annotations

import contextlib
import fcntl
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from contract import canonical, codec
from contract.codec import Payload
from contract.errors import LocalProtocolError
from contract.messages import Message

_PIPE_BYTES = 1 << 20  # what an ordinary user may ask for
_LENGTHS = struct.Struct("<II")  # header bytes, message bytes


@dataclass(frozen=True)
class PipeLimits:
    """How large one frame may be."""

    header_bytes: int = 1 << 20
    message_bytes: int = codec.LIMITS.object_bytes


# socket process -> torch process
START = "start"  # values: the plan; always the first frame
JOINED = "joined"  # a device has an open session; values: purpose
LEFT = "left"  # it is gone
STORED = "stored"  # values: ask, batch, split, complete; its features are durable
PROGRESS = "progress"  # the device works: its heartbeat's step moved
MESSAGE = "message"  # both directions: one contract message
STOP = "stop"  # end now, cleanly
QUORUM = "quorum"  # in the torch process's journal only; values: ask, devices
# torch process -> socket process
READY = "ready"  # the backend is loaded
STATUS = "status"  # text: what a site is waiting for; values: busy, step
ENDED = "ended"  # the site's strategy has ended; values: its summary
SERVED = "served"  # values: pending: inference requests not answered yet
WARNING = "warning"  # text for the operator
FAILED = "failed"  # values: code, cause, cure

KINDS = frozenset(
    {START, JOINED, LEFT, STORED, PROGRESS, MESSAGE, STOP, QUORUM, READY, STATUS, ENDED, SERVED, WARNING, FAILED}
)

Value = str | int | float | bool | None


@dataclass(frozen=True)
class PipeFrame:
    """One frame. `message` holds codec bytes, or before it is sent what becomes them, and is empty for all kinds but
    MESSAGE; its numbers mean nothing here."""

    kind: str
    site: str = ""
    device: str = ""
    text: str = ""
    values: dict[str, Value] = field(default_factory=dict)
    message: bytes | memoryview | Payload = b""


def carry(site: str, device: str, message: Message) -> PipeFrame:
    """A MESSAGE frame; numbers are given when it is sent over the wire. Its arrays are not copied."""
    return PipeFrame(MESSAGE, site, device, message=codec.prepare(message))


def relay(site: str, device: str, frame: bytes | memoryview) -> PipeFrame:
    """A MESSAGE frame of codec bytes as they came over the wire."""
    return PipeFrame(MESSAGE, site, device, message=frame)


def carried(frame: PipeFrame) -> Message:
    """The message of a MESSAGE frame, checked like one from the wire."""
    data = frame.message.frame(0, 0) if isinstance(frame.message, Payload) else frame.message
    return codec.decode(data, codec.LIMITS.object_bytes).message


def widen(descriptor: int) -> None:
    """Let a pipe hold 1 MiB where the system knows how (Linux): a large message then wakes its reader less often."""
    with contextlib.suppress(OSError, AttributeError):  # not a pipe; not Linux
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def pack(frame: PipeFrame) -> bytes:
    """Frame -> bytes."""
    return b"".join(parts(frame))


def parts(frame: PipeFrame) -> tuple[bytes | memoryview, ...]:
    """Frame -> bytes in pieces; the message, which may be large, is not copied."""
    pieces = frame.message.parts(0, 0) if isinstance(frame.message, Payload) else (frame.message,)
    message = [memoryview(piece).cast("B") for piece in pieces]  # an array's own would be counted in items
    header = canonical.to_json(
        {"kind": frame.kind, "site": frame.site, "device": frame.device, "text": frame.text, "values": frame.values}
    )
    return _LENGTHS.pack(len(header), sum(map(len, message))) + header, *message


class Unpacker:
    """Bytes, in pieces of any size -> whole frames; a message is put where it stays, and not copied again."""

    def __init__(self, limits: PipeLimits | None = None) -> None:
        self._limits = limits or PipeLimits()
        self._follow = self._take_lengths  # what is done with the part that is being filled
        self._want(_LENGTHS.size)

    def feed(self, data: bytes) -> Iterator[PipeFrame]:
        """Yield each frame that `data` completes.

        Raises:
            LocalProtocolError: a length over the limit or a header that is no frame's (both ends are ours: a bug).
        """
        left = memoryview(data)
        while len(left):
            piece = left[: len(self._part) - self._filled]
            self._part[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            left = left[len(piece) :]
            if self._filled == len(self._part):
                frame = self._follow()
                if frame is not None:
                    yield frame

    def _want(self, size_bytes: int) -> None:
        self._part = np.empty(size_bytes, np.uint8).data  # numpy's memory is in large pages, which fill faster
        self._filled = 0

    def _take_lengths(self) -> None:
        header_bytes, self._message_bytes = _LENGTHS.unpack(self._part)
        if header_bytes > self._limits.header_bytes or self._message_bytes > self._limits.message_bytes:
            raise LocalProtocolError(
                f"a pipe frame of {header_bytes} + {self._message_bytes} bytes is over the limit "
                f"({self._limits.header_bytes} + {self._limits.message_bytes})",
                "report this as a bug",
            )
        self._want(header_bytes)
        self._follow = self._take_header

    def _take_header(self) -> PipeFrame | None:
        header = bytes(self._part)
        fields = canonical.from_json(header, self._limits.header_bytes)
        if not isinstance(fields, dict) or fields.get("kind") not in KINDS:
            raise LocalProtocolError(f"a pipe frame has the header {header[:80]!r}", "report this as a bug")
        self._frame = PipeFrame(**fields)
        self._want(self._message_bytes)
        self._follow = self._take_message
        return None if self._message_bytes else self._take_message()

    def _take_message(self) -> PipeFrame:
        message = self._part.toreadonly()
        self._want(_LENGTHS.size)
        self._follow = self._take_lengths
        return replace(self._frame, message=message)
