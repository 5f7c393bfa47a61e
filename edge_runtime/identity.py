"""Who this device is to its server, and the key that proves it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from contract.signature import key_id, load_private, sign_raw


@dataclass(frozen=True)
class Identity:
    """A name, and a signature that only the holder of the enrolled key can make."""

    device: str
    key_id: str
    sign: Callable[[bytes], bytes]


def read_identity(device: str, key: Path) -> Identity:
    """The identity under this name with the private key (PEM) of a file. Raises: as `load_private`."""
    private = load_private(key)
    return Identity(device, key_id(private.public_key()), lambda data: sign_raw(private, data))
