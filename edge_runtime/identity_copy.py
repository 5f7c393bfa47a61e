"""What makes this device itself, as one file and back: its secrets, its key, and the record of what it released.

A device that lost these and made new ones would draw other noise for the same images, which is a second, independent
copy of each release: averaging the two tells more than either. So the copy is made before, and kept as safe as the key.
Two machines that run with one identity are one device with two voices; the server lets one in at a time.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path

from contract.canonical import CanonicalError, decode, encode, from_json, to_json
from contract.errors import ConfigError, DeviceError, why
from edge_runtime.state import State, write_durably

COPY_BYTES = 256 << 20
KEY = "device.key"
PARTS = ("identity/device_secret", "identity/site_secret", "release_ledger", "checkpoints/site.json")


@dataclass(frozen=True)
class Part:
    """One file of it."""

    name: str
    sha256: str
    base64: str


@dataclass(frozen=True)
class IdentityCopy:
    """All of it; `device` is the name that the server knows."""

    format: int
    device: str
    parts: tuple[Part, ...]


def write_copy(state: State, key: Path, device: str, target: Path) -> int:
    """Write the copy (mode 0600), whole or not at all; how many files are in it.

    Raises: ConfigError where there is no identity yet; DeviceError when the disk refuses.
    """
    if not state.device_secret.exists():
        raise ConfigError(f"{state.root} has no device secret yet", "it is made by the first run: copy it after that")
    sources = {name: state.root / name for name in PARTS} | {KEY: key}
    parts = []
    for name, path in sources.items():
        if path.exists():
            data = path.read_bytes()
            parts.append(Part(name, hashlib.sha256(data).hexdigest(), base64.b64encode(data).decode("ascii")))
    write_durably(target, to_json(encode(IdentityCopy(1, device, tuple(parts)))))
    return len(parts)


def read_copy(source: Path) -> IdentityCopy:
    """Raises: ConfigError where it is no such file, or damaged."""
    try:
        copy = decode(IdentityCopy, from_json(source.read_bytes(), COPY_BYTES))
        damaged = [part.name for part in copy.parts if hashlib.sha256(_bytes(part)).hexdigest() != part.sha256]
        if copy.format != 1 or damaged or any(part.name not in (*PARTS, KEY) for part in copy.parts):
            raise ValueError(f"damaged at {', '.join(damaged)}" if damaged else "another format")
    except (OSError, ValueError, CanonicalError) as error:
        raise ConfigError(
            f"the copy {source} cannot be used: {why(error, source)}", "give the file of edge-run backup"
        ) from error
    return copy


def put_back(copy: IdentityCopy, state: State, key: Path) -> None:
    """Into a state that has no identity of its own.

    Raises: DeviceError where it has one, or there is a key, and nothing was changed then.
    """
    for path in (state.device_secret, state.ledger, key):
        if path.exists():
            raise DeviceError(
                f"{path} exists already: this state has an identity", "give --state a new folder, and --key a new file"
            )
    for part in sorted(copy.parts, key=lambda part: part.name == "identity/device_secret"):  # without it: nothing is
        write_durably(key if part.name == KEY else state.root / part.name, _bytes(part))


def _bytes(part: Part) -> bytes:
    return base64.b64decode(part.base64, validate=True)
