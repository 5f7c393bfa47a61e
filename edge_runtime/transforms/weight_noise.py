"""Weight noise: the device's own copy of the frontend, drawn once per package and alpha, and kept (SA Eq. 12).

The law is contract.onnx_weights; here it is keyed by the device secret and applied to the file layer by layer, so that
memory does not grow with the model.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from contract.canonical import decode, encode, from_json, to_json
from contract.errors import DeviceError
from contract.keyed_noise import derive_key
from contract.manifest import WeightRecord
from contract.onnx_weights import noised_onnx
from edge_runtime.state import PARTIAL_SUFFIX, read_or_set_aside, sync_folder, write_durably

HASH_BLOCK_BYTES = 1 << 20
RECORD_BYTES = 4096


@dataclass(frozen=True)
class WeightNoise:
    """What the noised file is (SHA-256 in hex) and what the noise did to its int8 codes."""

    sha256: str
    changed_share: float
    saturated: int


def noise_frontend(
    source: Path,
    weights: Sequence[WeightRecord],
    alpha: float,
    package_key: Callable[..., bytes],
    engines: Path,
    say: Callable[[str], None],
) -> tuple[Path, WeightNoise]:
    """The noised copy of `source` in the folder `engines`, and its figures; made only if it is not there whole.

    `package_key(*parts)` derives keys that belong to this device and this package (see `keys_of`).
    Raises: DeviceError when the file cannot be written.
    """
    name = package_key("noised frontend", float(alpha)).hex()[:32]
    path, record_path = engines / f"{name}.onnx", engines / f"{name}.json"
    known = read_or_set_aside(record_path, lambda data: decode(WeightNoise, from_json(data, RECORD_BYTES)), say)
    if known is not None and path.exists() and file_sha256(path) == known.sha256:
        return path, known
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        changed_share, saturated = noise_file(
            source, partial, weights, alpha, lambda layer: package_key("weight noise", float(alpha), layer)
        )
        os.replace(partial, path)
        sync_folder(engines)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DeviceError(
            f"the noised frontend {path} cannot be written: {error.strerror}", "make room on the disk and start again"
        ) from error
    noise = WeightNoise(file_sha256(path), changed_share, saturated)
    write_durably(record_path, to_json(encode(noise)))
    for other in engines.iterdir():  # of other packages or alphas: one frontend can fill a small card
        if other.stem != name:
            other.unlink(missing_ok=True)
    return path, noise


def keys_of(secret: bytes, package_digest: bytes) -> Callable[..., bytes]:
    """Keys of this device for this package: a function of further parts."""
    return lambda *parts: derive_key(secret, "package", package_digest, *parts)


def noise_file(
    source: Path, target: Path, weights: Sequence[WeightRecord], alpha: float, key_for: Callable[[str], bytes]
) -> tuple[float, int]:
    """Copy `source` to `target` (mode 0600, synced) with noise on its weights: the bytes that `noised_onnx` makes.

    Returns the share of changed codes and the number of saturated ones. Raises: OSError.
    """
    changed, saturated, total = 0.0, 0, 0
    shutil.copyfile(source, target)
    os.chmod(target, 0o600)
    with target.open("r+b") as stream:
        for record in weights:
            layer, near = read_layer(stream, record)
            noised, share, clipped = noised_onnx(layer, [near], alpha, key_for)
            write_layer(stream, record, near, noised)
            codes = math.prod(record.shape)
            changed, saturated, total = changed + share * codes, saturated + clipped, total + codes
        stream.flush()
        os.fsync(stream.fileno())
    return changed / total if total else 0.0, saturated


def read_layer(stream: BinaryIO, record: WeightRecord) -> tuple[bytes, WeightRecord]:
    """One layer's arrays put end to end, and the record that finds them there."""
    codes, channels = math.prod(record.shape), record.shape[record.channel_axis]
    sizes = {
        "codes_offset": codes,
        "scales_offset": 4 * channels,
        "shift_offset": 4 * (codes // channels),
        "bias_offset": 4 * channels,
    }
    parts: list[bytes] = []
    near: dict[str, int | None] = {}
    for field, size in sizes.items():
        offset = getattr(record, field)
        near[field] = None if offset is None else sum(map(len, parts))
        if offset is not None:
            stream.seek(offset)
            parts.append(stream.read(size))
    return b"".join(parts), replace(record, **near)  # type: ignore[arg-type]


def write_layer(stream: BinaryIO, record: WeightRecord, near: WeightRecord, noised: bytearray) -> None:
    """Put the arrays that noise changes, codes and bias, back to where they belong."""
    codes = math.prod(record.shape)
    stream.seek(record.codes_offset)
    stream.write(noised[near.codes_offset : near.codes_offset + codes])
    if record.bias_offset is not None and near.bias_offset is not None:
        stream.seek(record.bias_offset)
        stream.write(noised[near.bias_offset : near.bias_offset + 4 * record.shape[record.channel_axis]])


def file_sha256(path: Path) -> str:
    """SHA-256 of a file in hex, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
