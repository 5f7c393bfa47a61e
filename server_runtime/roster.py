"""The roster: which devices may join, with which key, and to which site each belongs.

A directory is the roster: `ROSTER/<site>/<device>.pub`, one PEM public key each. Checking a proof is
left to `admission`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from contract import signature
from contract.errors import ConfigError, CutlayerError

# Site and device names become folder names in the run directory: nothing that could leave it is accepted.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Device:
    """One enrolled device."""

    name: str
    site: str
    key_id: str
    public_key: Ed25519PublicKey


@dataclass(frozen=True)
class Roster:
    """All enrolled devices by name; names are unique over all sites, because a device says only its own name."""

    devices: Mapping[str, Device]

    @property
    def sites(self) -> dict[str, tuple[str, ...]]:
        """Site -> its device names, both sorted, so that nothing depends on the order on disk."""
        sites: dict[str, list[str]] = {}
        for device in self.devices.values():
            sites.setdefault(device.site, []).append(device.name)
        return {site: tuple(sorted(sites[site])) for site in sorted(sites)}


def check_name(name: str, what: str) -> str:
    """Return `name` when it is safe as a file name.

    Raises:
        ConfigError: another character than letters, digits, dot, dash and underscore, or longer than 64.
    """
    if NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{what} {name!r} is not a name: letters, digits, '.', '-' and '_' only, at most 64, no leading dot",
            "rename it",
        )
    return name


def read_roster(root: Path) -> Roster:
    """Read `ROOT/<site>/<device>.pub`.

    Raises:
        ConfigError: the folder is missing or holds no key, a name or key is unusable, or a device is enrolled twice.
    """
    if not root.is_dir():
        raise ConfigError(
            f"the roster {root} is not a folder",
            "make it, with one folder per site and one public key per device: ROSTER/<site>/<device>.pub",
        )
    devices: dict[str, Device] = {}
    for path in sorted(root.glob("*/*.pub")):
        if path.name.startswith(".") or path.parent.name.startswith("."):
            continue
        device = _read_device(path)
        known = devices.get(device.name)
        if known is not None:
            raise ConfigError(
                f"device {device.name!r} is enrolled at two sites: {known.site!r} and {device.site!r}",
                "delete one of the two keys: a device belongs to one site",
            )
        devices[device.name] = device
    if not devices:
        raise ConfigError(
            f"the roster {root} holds no device",
            "copy each device's public key to ROSTER/<site>/<device>.pub",
        )
    return Roster(devices)


def _read_device(path: Path) -> Device:
    site, name = check_name(path.parent.name, "site"), check_name(path.stem, "device")
    try:
        public_key = signature.load_public(path)
    except CutlayerError as error:
        raise ConfigError(f"the key {path} cannot be used: {error.cause}", error.cure) from error
    return Device(name, site, signature.key_id(public_key), public_key)
