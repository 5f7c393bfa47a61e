"""Frames that no honest program writes, made from honest ones."""

from __future__ import annotations

import json
import struct
from typing import Any

from contract.codec import encode
from contract.messages import Message


def frame_of(header: object, body: bytes = b"") -> bytes:
    """A frame with any header (bytes as they are, other values as JSON), padded as the format wants."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-(4 + len(text)) % 8)
    return struct.pack("<I", len(text)) + text + body


def body_of(entries: object, data: bytes = b"") -> bytes:
    """A safetensors body with any description."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def opened(message: Message, seq: int = 0, ack: int = 0) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Header, tensor description and tensor data of a message's honest frame."""
    frame = encode(message, seq=seq, ack=ack)
    (length,) = struct.unpack_from("<I", frame)
    header, body = json.loads(frame[4 : 4 + length]), frame[4 + length :]
    if not body:
        return header, {}, b""
    (length,) = struct.unpack_from("<Q", body)
    return header, json.loads(body[8 : 8 + length]), body[8 + length :]
