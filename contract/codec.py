"""Messages to bytes and back: the only door through which a peer's bytes become values.

When a message may be sent is `contract.session`'s part; what its fields may hold is `contract.messages`'s.

    frame  = header length (u32, little-endian) | header | body
    header = JSON object {ack, seq, type, v, the message's plain fields}, padded with spaces so that the body begins
             at a multiple of 8 bytes
    body   = nothing, or safetensors: length (u64, little-endian) | JSON {name: {dtype, shape, data_offsets}} | arrays

Rules that `decode` keeps, whatever the bytes:

* They become a valid message, or a ProtocolError is raised; nothing is allocated by a size that was only claimed.
* Arrays lie one after the other, cover the body to its last byte, and are aligned to their item size. They are
  views of the frame and read-only.
* Only a `hello` or a `refuse` of an unknown protocol version is read leniently, so that versions can be compared.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, TypeGuard

import numpy as np

from contract import canonical
from contract.canonical import INT_MAX, CanonicalError, from_json, shown, to_json
from contract.errors import LocalProtocolError, RemoteProtocolError
from contract.messages import (
    MESSAGES,
    PROTOCOL,
    PROTOCOL_MIN,
    TENSORS,
    Array,
    Ask,
    Chunk,
    Message,
    Update,
    tensors_of,
)


@dataclass(frozen=True)
class Limits:
    """What a peer may make this program hold."""

    frame_bytes: int = 1 << 20
    header_bytes: int = 64 << 10
    tensors_bytes: int = 256 << 10  # of the description of a message's arrays: a model has up to 2000
    object_bytes: int = 256 << 20  # of a message that travels in chunks


LIMITS = Limits()

_ALIGNMENT = 8
_AHEAD = 8
_CHUNK_OVERHEAD_BYTES = 1024  # header and body header of a chunk, with room
_DTYPES: Mapping[str, np.dtype[Any]] = {
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "U16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ARRAY_FIELDS: Mapping[str, frozenset[str]] = {
    Ask.TYPE: frozenset(("tensors",)),
    Update.TYPE: frozenset(("tensors",)),
    **{kind: frozenset(rules) for kind, rules in TENSORS.items()},
}
_VERSIONLESS = ("hello", "refuse")
_NUMBERS_BYTES = len(f'"ack":{INT_MAX},"seq":{INT_MAX},')  # at their longest
_NO_NUMBERS = b'{"ack":0,"seq":0,'
_RANK_MAX = 8
_CURE_LOCAL = "report this text: the program tried to send what it must not"
_CURE_REMOTE = "update both programs to one version; if it stays, the peer is faulty or hostile"


@dataclass(frozen=True)
class Envelope:
    """One received frame: its number (0: not numbered), the peer's acknowledgement, and the message."""

    seq: int
    ack: int
    message: Message


@dataclass(frozen=True)
class Payload:
    """A checked message whose frame lacks only its two numbers; `size_bytes` is the most that the frame can have."""

    kind: str
    header: bytes
    body: tuple[bytes | memoryview, ...]
    size_bytes: int

    def frame(self, seq: int, ack: int) -> bytes:
        """The frame; arrays are copied here, once."""
        return b"".join(self.parts(seq, ack))

    def parts(self, seq: int, ack: int) -> tuple[bytes | memoryview, ...]:
        """The frame in pieces, arrays not copied."""
        header = b'{"ack":%d,"seq":%d,%b' % (ack, seq, self.header[1:])
        header += b" " * (-(4 + len(header)) % _ALIGNMENT)
        return (struct.pack("<I", len(header)), header, *self.body)


def encode(message: Message, *, seq: int, ack: int) -> bytes:
    """Frame of a message. One longer than `Limits.frame_bytes` must go through `split`.

    Raises: LocalProtocolError if a field does not hold what it declares or a limit is passed.
    """
    return prepare(message).frame(seq, ack)


def prepare(message: Message) -> Payload:
    """Check a message for sending and do all of the encoding that does not depend on when it is sent.

    Raises: LocalProtocolError as `encode`.
    """
    try:
        plain = canonical.encode(message, omit=_ARRAY_FIELDS.get(message.TYPE, ()))
        header = to_json({"v": PROTOCOL, "type": message.TYPE, **plain})
    except CanonicalError as error:
        raise LocalProtocolError(f"{message.TYPE}: {error}", _CURE_LOCAL) from error
    tensors = tensors_of(message)
    _require_at_most(message.TYPE, LIMITS.object_bytes, sum(array.nbytes for array in tensors.values()))
    body = _write_body(tensors)
    _require_at_most(f"{message.TYPE}: description of its tensors", LIMITS.tensors_bytes, len(body[0]) if body else 0)
    header_bytes = len(header) + _NUMBERS_BYTES + _ALIGNMENT
    size_bytes = 4 + header_bytes + sum(memoryview(part).nbytes for part in body)
    _require_at_most(f"{message.TYPE}: header", LIMITS.header_bytes, header_bytes)
    _require_at_most(message.TYPE, LIMITS.object_bytes, size_bytes)
    return Payload(message.TYPE, header, body, size_bytes)


def reopen(frame: bytes | memoryview) -> Payload:
    """The payload of a frame that `encode` made with numbers 0, to be sent under others; nothing is copied.

    Only for bytes of this program's own, from its spool or its other process: the receiver checks them, not this.
    Raises: RemoteProtocolError when they are no such frame.
    """
    header, body_start = _read_header(frame)
    start = 4 + len(_NO_NUMBERS)
    if bytes(frame[4:start]) != _NO_NUMBERS:
        raise _refused("frame", "one with numbers 0", shown(bytes(frame[4:start])))
    rest = bytes(frame[start:body_start]).rstrip(b" ")
    kind = str(header.get("type"))
    return Payload(kind, b"{" + rest, (memoryview(frame)[body_start:],), len(frame) + _NUMBERS_BYTES)


def decode(frame: bytes | memoryview, max_bytes: int = LIMITS.frame_bytes) -> Envelope:
    """Message, number and acknowledgement in a frame of at most `max_bytes`; arrays are views of the frame.

    Raises: RemoteProtocolError if the bytes break a rule.
    """
    if len(frame) > max_bytes:
        raise _refused("frame", f"at most {max_bytes} bytes", str(len(frame)))
    header, body_start = _read_header(frame)
    kind = header.pop("type", None)
    if not isinstance(kind, str) or kind not in MESSAGES:
        raise _refused("header.type", f"one of {', '.join(MESSAGES)}", shown(kind))
    message_type = MESSAGES[kind]
    version, seq, ack = (_take_count(header, name) for name in ("v", "seq", "ack"))
    if not PROTOCOL_MIN <= version <= PROTOCOL:
        if kind not in _VERSIONLESS:
            raise _refused(f"{kind}.v", f"protocol {PROTOCOL_MIN} to {PROTOCOL}", str(version))
        known = {field.name for field in fields(message_type)}
        header = {name: value for name, value in header.items() if name in known}
    try:
        plain = canonical.decode_fields(message_type, header, kind, omit=_ARRAY_FIELDS.get(kind, ()))
        return Envelope(seq, ack, _build(message_type, plain, _read_body(frame, body_start)))
    except CanonicalError as error:
        raise RemoteProtocolError(str(error), _CURE_REMOTE) from error
    except LocalProtocolError as error:  # the message refuses its values, and here they are the peer's
        raise RemoteProtocolError(error.cause, error.cure) from error


def _build(message_type: Any, plain: dict[str, Any], arrays: dict[str, Array]) -> Message:
    if message_type in (Ask, Update):
        built: Message = message_type(**plain, tensors=arrays)
        return built
    declared = TENSORS.get(message_type.TYPE, {})
    unknown = sorted(arrays.keys() - declared.keys())
    if unknown:
        raise _refused(message_type.TYPE, f"no tensors but {', '.join(declared) or 'none'}", shown(unknown[0]))
    message: Message = message_type(**plain, **{name: arrays.get(name) for name in declared})
    return message


# --- header ------------------------------------------------------------------------------------------------------


def _read_header(frame: bytes | memoryview) -> tuple[dict[str, Any], int]:
    """Header fields of a frame, and where its body starts."""
    start, size = _counted(frame, 0, "<I", "header")
    if start + size > len(frame) or size > LIMITS.header_bytes:
        largest = min(LIMITS.header_bytes, len(frame) - start)
        raise _refused("header length", f"at most {largest}", str(size))
    if (start + size) % _ALIGNMENT:
        raise _refused("header length", f"a body that begins at a multiple of {_ALIGNMENT}", f"one at {start + size}")
    try:
        header = from_json(bytes(frame[start : start + size]), LIMITS.header_bytes)
    except CanonicalError as error:
        raise RemoteProtocolError(f"header: {error}", _CURE_REMOTE) from error
    if not isinstance(header, dict):
        raise _refused("header", "an object", type(header).__name__)
    return header, start + size


def _counted(frame: bytes | memoryview, start: int, form: str, what: str) -> tuple[int, int]:
    """Where the bytes begin whose length stands at `start`, and that length as claimed."""
    after = start + struct.calcsize(form)
    if after > len(frame):
        raise _refused(f"{what} length", f"{after - start} bytes", f"{len(frame) - start}")
    return after, struct.unpack_from(form, frame, start)[0]


def _take_count(header: dict[str, Any], name: str) -> int:
    value = header.pop(name, None)
    if type(value) is not int or not 0 <= value <= INT_MAX:
        raise _refused(f"header.{name}", "an int of 63 bits, 0 or more", shown(value))
    return value


# --- body: safetensors -------------------------------------------------------------------------------------------


# Descriptions are few and the same from message to message, so both ways are remembered; the arrays are checked anew.
_REMEMBERED = 32
_ENTRY_FIELDS = frozenset(("dtype", "shape", "data_offsets"))


@dataclass(frozen=True)
class _Entry:
    """How safetensors describes one array; offsets count from the end of the descriptions."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


def _write_body(tensors: Mapping[str, Array]) -> tuple[bytes | memoryview, ...]:
    """Parts of a safetensors body; wide items first, so that all of them are aligned."""
    if not tensors:
        return ()
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    arrays = [np.asarray(tensors[name], order="C") for name in names]  # one without axes stays so
    described = tuple((name, array.dtype, array.shape) for name, array in zip(names, arrays, strict=True))
    return _describe(described), *(array.data for array in arrays)


@lru_cache(maxsize=_REMEMBERED)
def _describe(arrays: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]) -> bytes:
    """The descriptions of arrays that lie one after the other, and their length."""
    entries: dict[str, object] = {}
    end = 0
    for name, dtype, shape in arrays:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    header = to_json(entries)
    header += b" " * (-len(header) % _ALIGNMENT)
    return struct.pack("<Q", len(header)) + header


def _read_body(frame: bytes | memoryview, start: int) -> dict[str, Array]:
    """Arrays of the body that begins at `start`, as views of the frame.

    Raises: RemoteProtocolError, CanonicalError.
    """
    if start == len(frame):
        return {}
    start, size = _counted(frame, start, "<Q", "body header")
    if size > min(LIMITS.tensors_bytes, len(frame) - start):
        raise _refused("body header length", f"at most {min(LIMITS.tensors_bytes, len(frame) - start)}", str(size))
    arrays: dict[str, Array] = {}
    entries = _read_entries(bytes(frame[start : start + size]))
    start = reached = start + size
    for entry in entries:
        arrays[entry.name] = array = _view(frame, start, reached, entry)
        reached += array.nbytes
    if reached != len(frame):
        raise _refused("body", f"tensors that cover it to its end ({len(frame)})", f"an end at {reached}")
    return arrays


@lru_cache(maxsize=_REMEMBERED)
def _read_entries(header: bytes) -> tuple[_Entry, ...]:
    """What a body's header describes, by offset; where the arrays lie is checked with the body.

    Raises: RemoteProtocolError, CanonicalError.
    """
    described = from_json(header, LIMITS.tensors_bytes)
    if not isinstance(described, dict) or not described:
        raise _refused("body header", "an object that describes tensors", shown(described))
    entries = [_read_entry(name, entry) for name, entry in described.items()]
    return tuple(sorted(entries, key=lambda entry: (entry.begin, entry.end)))


def _read_entry(name: str, described: object) -> _Entry:
    where = f"tensor {shown(name)}"
    if not isinstance(described, dict) or described.keys() != _ENTRY_FIELDS:
        raise _refused(where, f"an object of {', '.join(sorted(_ENTRY_FIELDS))}", shown(described))
    dtype, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise _refused(f"{where}.dtype", f"one of {', '.join(_DTYPES)}", shown(dtype))
    if not _are_counts(shape) or len(shape) > _RANK_MAX or 0 in shape:
        raise _refused(f"{where}.shape", f"at most {_RANK_MAX} sizes of 1 or more", shown(shape))
    if not _are_counts(offsets) or len(offsets) != 2:
        raise _refused(f"{where}.data_offsets", "two counts", shown(offsets))
    return _Entry(name, _DTYPES[dtype], tuple(shape), *offsets)


def _are_counts(value: object) -> TypeGuard[list[int]]:
    return type(value) is list and all(type(each) is int and 0 <= each <= INT_MAX for each in value)


def _view(frame: bytes | memoryview, start: int, reached: int, entry: _Entry) -> Array:
    """The array of one entry, which must begin where the one before it ended."""
    count = math.prod(entry.shape)
    size_bytes = count * entry.dtype.itemsize
    if start + entry.begin != reached or entry.end - entry.begin != size_bytes or start + entry.end > len(frame):
        where, found = f"tensor {shown(entry.name)}.data_offsets", f"{entry.begin} to {entry.end}"
        raise _refused(where, f"{size_bytes} bytes at {reached - start}, inside the body", found)
    if reached % entry.dtype.itemsize:
        where = f"tensor {shown(entry.name)}.data_offsets"
        raise _refused(where, f"a multiple of {entry.dtype.itemsize}", str(entry.begin))
    array = np.frombuffer(frame, entry.dtype, count, reached).reshape(entry.shape)
    array.flags.writeable = False
    return array


# --- messages larger than a frame --------------------------------------------------------------------------------


def split(parts: Iterable[bytes | memoryview], frame_bytes: int = LIMITS.frame_bytes) -> Iterator[Chunk]:
    """Chunks, each of which fits into a frame of `frame_bytes`, of an encoded message in pieces.

    They are made one at a time and hold no copy, but for those in which two pieces meet.
    """
    left = [memoryview(part).cast("B") for part in parts]
    digest = hashlib.sha256()
    for part in left:
        digest.update(part)
    size, whole_bytes = frame_bytes - _CHUNK_OVERHEAD_BYTES, sum(map(len, left))
    total = -(-whole_bytes // size)
    for index in range(total):
        data = np.frombuffer(_take_front(left, size), np.uint8)
        yield Chunk(digest.hexdigest(), index, total, whole_bytes, data)


def _take_front(left: list[memoryview], size: int) -> bytes | memoryview:
    """Take the first `size` bytes off `left`, or all that there are."""
    taken: list[memoryview] = []
    while left and size:
        taken.append(left[0][:size])
        left[0] = left[0][size:]
        size -= len(taken[-1])
        if not left[0]:
            del left[0]
    return taken[0] if len(taken) == 1 else b"".join(taken)


class Assembler:
    """Puts the chunks of one encoded message together; they must come in order, and no other object between them.

    Memory grows with the bytes that came, never with the size that was claimed.
    """

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._object: tuple[str, int, int] | None = None  # SHA-256, total, size: alike in all of its chunks
        self._next = 0
        self._data = _Growing()
        self._digest = hashlib.sha256()

    @property
    def unfinished(self) -> bool:
        """Whether chunks of an object were added and others are missing."""
        return self._object is not None

    @property
    def whole_bytes(self) -> int:
        """How large the object will be of which some chunks have come; 0 between objects."""
        return 0 if self._object is None else self._object[2]

    def add(self, chunk: Chunk) -> memoryview | None:
        """The whole object, read-only, once its last chunk is added; until then None.

        Raises: RemoteProtocolError if the chunk is too large, out of order, or the whole has another digest.
        """
        identity = (chunk.object, chunk.total, chunk.size)
        if chunk.size > self._limits.object_bytes:
            raise _refused("chunk.size", f"at most {self._limits.object_bytes}", str(chunk.size))
        expected = (self._object or identity, self._next)
        if (identity, chunk.index) != expected:
            wanted = f"number {self._next} of object {expected[0][0]}"
            raise _refused("chunk", wanted, f"number {chunk.index} of {chunk.object}")
        self._object = identity
        self._next += 1
        self._data.add(chunk.data, chunk.size)
        self._digest.update(chunk.data.data)
        last, come = self._next == chunk.total, self._data.size_bytes
        if come > chunk.size or (last and come < chunk.size):
            raise _refused("chunk", f"{chunk.size} bytes in all", f"{come} by number {chunk.index}")
        if not last:
            return None
        data, self._data, self._object, self._next = self._data, _Growing(), None, 0
        digest, self._digest = self._digest, hashlib.sha256()
        if digest.hexdigest() != chunk.object:
            raise _refused("chunk", f"an object with SHA-256 {chunk.object}", "another")
        return data.view()


class _Growing:
    """Bytes that come piece by piece. Room is asked for up to eight times ahead, and what is not filled takes none:
    systems give memory when it is written. So a byte is moved 1.2 times, where doubling would move it twice.

    The memory is numpy's, which asks for large pages: filling it takes a quarter of the time that a bytearray takes.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self._room: Array = np.empty(0, np.uint8)

    def add(self, piece: Array, most_bytes: int) -> None:
        """Append a piece; `most_bytes` is how many will come as far as one knows."""
        end = self.size_bytes + len(piece)
        if end > len(self._room):
            room = np.empty(max(end, min(most_bytes, _AHEAD * end)), np.uint8)
            room[: self.size_bytes] = self._room[: self.size_bytes]
            self._room = room
        self._room[self.size_bytes : end] = piece
        self.size_bytes = end

    def view(self) -> memoryview:
        """All of it, read-only."""
        return self._room[: self.size_bytes].data.toreadonly()


# --- errors ------------------------------------------------------------------------------------------------------


def _require_at_most(where: str, limit: int, found: int) -> None:
    if found > limit:
        raise LocalProtocolError(f"{where}: expected at most {limit} bytes, found {found}", _CURE_LOCAL)


def _refused(where: str, expected: str, found: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"{where}: expected {expected}, found {found}", _CURE_REMOTE)
