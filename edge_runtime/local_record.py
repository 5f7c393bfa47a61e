"""What this device keeps to answer without a server: the head, what it learned from, and how right it was.

Values and bytes; the law of the head is `ridge_head`'s, reading and writing the file is left to `local_answers`. A file
that was torn, or whose middle never reached the disk, is told by its digest.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from contract.canonical import CanonicalError, decode, encode, from_json, to_json
from edge_runtime.head import Floats
from edge_runtime.ridge_head import FittedHead

FACTS_BYTES = 1 << 20
DIGEST_BYTES, WIRE_ID_BYTES = 32, 16


@dataclass(frozen=True)
class Basis:
    """Which frontend the features come from; those of another cannot be compared with them."""

    package_digest: str
    cut: int
    alpha: float


@dataclass(frozen=True)
class Compared:
    """How right the server and the head here were on the same images, of which this head had learned none."""

    images: int
    server: float
    local: float


@dataclass(frozen=True)
class Facts:
    """What of a record is no tensor."""

    basis: Basis
    classes: tuple[str, ...]
    held_out_accuracy: float | None
    held_out_images: int
    compared: Compared | None


@dataclass(frozen=True)
class LocalRecord:
    """A head and the images that it learned from: wire ids (n, 16) and pooled features (n, p)."""

    facts: Facts
    weight: Floats  # (C, p)
    bias: Floats  # (C,)
    sample_ids: NDArray[np.uint8]
    pooled: NDArray[np.float16]

    @property
    def head(self) -> FittedHead:
        """What answers."""
        return FittedHead(self.weight, self.bias, self.facts.held_out_accuracy, self.facts.held_out_images)

    def features(self) -> dict[bytes, NDArray[np.float16]]:
        """Pooled features (p,) by wire id."""
        return {sample_id.tobytes(): row for sample_id, row in zip(self.sample_ids, self.pooled, strict=True)}


def to_bytes(record: LocalRecord) -> bytes:
    """SHA-256 of what follows, then safetensors with the facts as JSON bytes."""
    tensors = {
        "facts": np.frombuffer(to_json(encode(record.facts)), np.uint8),
        "weight": record.weight,
        "bias": record.bias,
        "sample_ids": record.sample_ids,
        "pooled": record.pooled,
    }
    body = save({name: np.ascontiguousarray(each) for name, each in tensors.items()})  # others are written wrongly
    return hashlib.sha256(body).digest() + body


def from_bytes(data: bytes) -> LocalRecord:
    """Raises: ValueError when the bytes are no whole record."""
    digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        raise ValueError("not whole: its digest does not fit")
    try:
        tensors = load(body)
        facts = decode(Facts, from_json(tensors["facts"].tobytes(), FACTS_BYTES))
        weight, bias, sample_ids, pooled = (tensors[name] for name in ("weight", "bias", "sample_ids", "pooled"))
    except (SafetensorError, KeyError, CanonicalError) as error:
        raise ValueError(f"no head of this version: {error}") from error
    classes, images, width = len(facts.classes), len(sample_ids), weight.shape[-1]
    expected = ((classes, width), (classes,), (images, WIRE_ID_BYTES), (images, width))
    found = (weight.shape, bias.shape, sample_ids.shape, pooled.shape)
    if found != expected:
        raise ValueError(f"no head of this version: shapes {found}, expected {expected}")
    return LocalRecord(facts, weight, bias, sample_ids, pooled)
