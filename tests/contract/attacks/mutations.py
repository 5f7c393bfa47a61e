"""A seeded mutator: honest bytes in, hostile bytes out, from single bits to rewritten JSON in well-formed frames."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Sequence
from typing import Any

from tests.contract.attacks.frames import body_of, frame_of

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63 - 1, 2**63, 10**300, 0.0, -0.0, 1e308, 0.5),
    *("", "a", "../..", "x" * 200, "\ud83d\ude00", "\x00", "collect_features", "hello", "chunk", "F32", "U8"),
    *([], {}, [[]], [1, 2, 3], [0.5], {"a": 1}, [0, 2**62], "0" * 64, "00" * 32),
)
_NUMBERS = (0, 1, 7, 8, 127, 128, 255, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1)


def mutated(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """`data` after one to three changes; `others` are bytes of the same kind, to splice in."""
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.5:
            data = _rewrite(data, rng)
        else:
            data = rng.choice(_CHANGES)(data, others, rng)
    return data


# --- changes that know nothing of the format ---------------------------------------------------------------------


def _flip_bit(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    if not data:
        return data
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]


def _cut_out(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    start = rng.randint(0, len(data))
    return data[:start] + data[start + rng.choice((1, 4, 8, 100, len(data))) :]


def _insert(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    start = rng.randint(0, len(data))
    return data[:start] + rng.randbytes(rng.choice((1, 4, 8, 64))) + data[start:]


def _repeat(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    start, stop = sorted(rng.randint(0, len(data)) for _ in range(2))
    return data[:stop] + data[start:stop] + data[stop:]


def _splice(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    other = rng.choice(others)
    return data[: rng.randint(0, len(data))] + other[rng.randint(0, len(other)) :]


def _overwrite_number(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    form = rng.choice(("<I", "<Q", "<H", "<f"))
    packed = struct.pack(form, float("nan") if form == "<f" else rng.choice(_NUMBERS) % 65536)
    place = 0 if rng.random() < 0.3 else rng.randint(0, len(data))
    return data[:place] + packed + data[place + len(packed) :]


_CHANGES = (_flip_bit, _cut_out, _insert, _repeat, _splice, _overwrite_number)


# --- changes that know JSON and the frame ------------------------------------------------------------------------


def _rewrite(data: bytes, rng: random.Random) -> bytes:
    """Change one value inside the JSON of a frame's header or body, or of a document; other bytes stay right."""
    try:
        (length,) = struct.unpack_from("<I", data)
        header, body = json.loads(data[4 : 4 + length]), data[4 + length :]
    except (ValueError, struct.error, RecursionError):
        try:
            return json.dumps(_spoil(json.loads(data), rng), separators=(",", ":"), sort_keys=True).encode()
        except (ValueError, TypeError, RecursionError):
            return data
    if body and rng.random() < 0.5:
        try:
            (length,) = struct.unpack_from("<Q", body)
            body = body_of(_spoil(json.loads(body[8 : 8 + length]), rng), body[8 + length :])
        except (ValueError, struct.error, RecursionError, OverflowError):
            return data
        return frame_of(header, body)
    return frame_of(_spoil(header, rng), body)


def _spoil(value: Any, rng: random.Random) -> Any:
    """The same JSON value with one part replaced, removed, doubled or moved by a little."""
    if isinstance(value, dict) and value:
        name = rng.choice(sorted(value))
        change = rng.random()
        if change < 0.1:
            return {key: item for key, item in value.items() if key != name}
        if change < 0.2:
            return {**value, rng.choice(("x", name + "x", "tensors", "__class__")): rng.choice(_VALUES)}
        return {**value, name: _spoil(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        return [*value[:place], _spoil(value[place], rng), *value[place + 1 :]]
    if type(value) is int and rng.random() < 0.5:
        return value + rng.choice((-1, 1, 8, -value, 2**32))
    return rng.choice(_VALUES)
