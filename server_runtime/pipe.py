"""The frames between the socket process and the torch process: length, small JSON header, message bytes.

Messages of devices travel as the contract's own codec bytes and are decoded by its strict rules again; nothing is
pickled. What a frame causes is left to `conductor` (torch process) and `server` (socket process).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from contract import canonical, codec
from contract.errors import LocalProtocolError
from contract.messages import Message

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
    """One frame. `message` holds codec bytes and is empty for all kinds but MESSAGE."""

    kind: str
    site: str = ""
    device: str = ""
    text: str = ""
    values: dict[str, Value] = field(default_factory=dict)
    message: bytes = b""


def carry(site: str, device: str, message: Message) -> PipeFrame:
    """A MESSAGE frame; numbers are given when it is sent over the wire."""
    return PipeFrame(MESSAGE, site, device, message=codec.encode(message, seq=1, ack=0))


def carried(frame: PipeFrame) -> Message:
    """The message of a MESSAGE frame, checked like one from the wire."""
    return codec.decode(frame.message, codec.LIMITS.object_bytes).message


def pack(frame: PipeFrame) -> bytes:
    """Frame -> bytes."""
    header = canonical.to_json(
        {"kind": frame.kind, "site": frame.site, "device": frame.device, "text": frame.text, "values": frame.values}
    )
    return _LENGTHS.pack(len(header), len(frame.message)) + header + frame.message


class Unpacker:
    """Bytes, in pieces of any size -> whole frames."""

    def __init__(self, limits: PipeLimits | None = None) -> None:
        self._limits = limits or PipeLimits()
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[PipeFrame]:
        """Yield each frame that `data` completes.

        Raises:
            LocalProtocolError: a length over the limit or a header that is no frame's (both ends are ours: a bug).
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTHS.size:
            header_bytes, message_bytes = _LENGTHS.unpack_from(self._buffer)
            if header_bytes > self._limits.header_bytes or message_bytes > self._limits.message_bytes:
                raise LocalProtocolError(
                    f"a pipe frame of {header_bytes} + {message_bytes} bytes is over the limit "
                    f"({self._limits.header_bytes} + {self._limits.message_bytes})",
                    "report this as a bug",
                )
            end = _LENGTHS.size + header_bytes + message_bytes
            if len(self._buffer) < end:
                return
            header = bytes(self._buffer[_LENGTHS.size : _LENGTHS.size + header_bytes])
            message = bytes(self._buffer[_LENGTHS.size + header_bytes : end])
            del self._buffer[:end]
            yield self._frame(header, message)

    def _frame(self, header: bytes, message: bytes) -> PipeFrame:
        fields = canonical.from_json(header, self._limits.header_bytes)
        if not isinstance(fields, dict) or fields.get("kind") not in KINDS:
            raise LocalProtocolError(f"a pipe frame has the header {header[:80]!r}", "report this as a bug")
        return PipeFrame(message=message, **fields)
