"""Changes of the roster, each by one rename: claims, enrolled keys, revocation and its undoing.

Who may ask for what is left to `admission` and the commands; what the files mean to `roster`.
"""

from __future__ import annotations

import json
from pathlib import Path

from contract import signature
from contract.errors import ConfigError, suggest
from contract.names import check_name

from .files import remove, sync_directory, write_atomic
from .roster import CLAIM, KEY, REVOKED, Device, Roster, read_roster


def issue_claim(root: Path, site: str, name: str, expires_s: float) -> str:
    """Let a device enrol a key, its first or another one; returns the token. An earlier claim of it is void.

    Raises:
        ConfigError: the device is at another site, or was revoked.
    """
    check_name(site, "site")
    check_name(name, "device")
    known = read_roster(root, may_be_empty=True).devices.get(name) if root.is_dir() else None
    if known is not None and known.site != site:
        raise ConfigError(
            f"device {name!r} is of site {known.site!r}", "give that site, or choose another name for the device"
        )
    if known is not None and known.revoked:
        raise ConfigError(f"device {name!r} is revoked", f"restore it first: server-run restore {name}")
    claim = signature.generate()
    fields = {"public_key": signature.raw_public(claim.public_key()).hex(), "expires_s": expires_s}
    write_atomic(root / site / (name + CLAIM), (json.dumps(fields) + "\n").encode())
    return signature.claim_token(claim)


def enrol(root: Path, device: Device, public_key: signature.PublicKey) -> None:
    """This key is the device's from now on, and its claim is spent. The key first: a device whose claim is gone and
    whose key is not there could never come back, and one that asks again with the same key is told yes."""
    write_atomic(root / device.site / (device.name + KEY), signature.public_pem(public_key))
    remove(root / device.site / (device.name + CLAIM))


def revoke(root: Path, name: str) -> Device:
    """Refuse a device, and drop its claim; its key is kept, to be restored. Gives it as it was before.

    Raises:
        ConfigError: no such device.
    """
    device = find(root, name)
    folder = root / device.site
    remove(folder / (name + CLAIM))
    if (folder / (name + KEY)).exists():
        (folder / (name + KEY)).replace(folder / (name + REVOKED))
        sync_directory(folder)
    return device


def restore(root: Path, name: str) -> Device:
    """Let a revoked device join again with the key that it had; gives it as it was before, also where it never was.

    Raises:
        ConfigError: no such device.
    """
    device = find(root, name)
    if not device.revoked:
        return device
    folder = root / device.site
    (folder / (name + REVOKED)).replace(folder / (name + KEY))
    sync_directory(folder)
    return device


def find(root: Path, name: str) -> Device:
    """Raises: ConfigError when no such device is in the roster."""
    roster: Roster = read_roster(root, may_be_empty=True)
    device = roster.devices.get(name)
    if device is None:
        raise ConfigError(
            f"device {name!r} is not in the roster {root}{suggest(name, roster.devices)}",
            "see server-run devices",
        )
    return device
