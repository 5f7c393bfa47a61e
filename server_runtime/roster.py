"""The roster: which devices may join, with which key, and to which site each belongs.

A directory is the roster, one file for each device under its site:

    ROSTER/<site>/<device>.pub       PEM public key: it may join
                  <device>.claim     a one-time claim: it may enrol a key with the token (JSON: public key, expiry)
                  <device>.revoked   its public key, which is refused until it is restored

Changing it is left to `enrolment`, checking a proof to `admission`. Whatever is changed counts at the next hello.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from contract import signature
from contract.errors import ConfigError, CutlayerError, why
from contract.names import check_name, is_name

CLAIM_BYTES = 4096
NO_DATE_S = 253402300800.0  # the year 10000
KEY, CLAIM, REVOKED = ".pub", ".claim", ".revoked"


@dataclass(frozen=True)
class Claim:
    """A key that may vouch once for a device's own; `expires_s` is of this server's clock, which also issued it."""

    public_key: signature.PublicKey
    expires_s: float

    @property
    def key_id(self) -> str:
        """Its name, by which a device says which claim it has."""
        return signature.key_id(self.public_key)


@dataclass(frozen=True)
class Device:
    """One device; without a public key it is still to enrol one, by its claim."""

    name: str
    site: str
    public_key: signature.PublicKey | None
    revoked: bool = False
    claim: Claim | None = None

    @property
    def key_id(self) -> str:
        """Name of its key; empty while it has none."""
        return "" if self.public_key is None else signature.key_id(self.public_key)

    @property
    def state(self) -> str:
        """What may become of it, in a word."""
        if self.revoked:
            return "revoked"
        return "enrolled" if self.public_key is not None else "claimed"


@dataclass(frozen=True)
class Roster:
    """The devices of a run by name, as they were at its start, and how each stands now (`current`).

    Names are unique over all sites, because a device says only its own name.
    """

    devices: Mapping[str, Device]
    root: Path

    @property
    def sites(self) -> dict[str, tuple[str, ...]]:
        """Site -> its device names, both sorted, so that nothing depends on the order on disk.

        A revoked device is of none; one that is still to enrol is waited for.
        """
        sites: dict[str, list[str]] = {}
        for device in self.devices.values():
            if not device.revoked:
                sites.setdefault(device.site, []).append(device.name)
        return {site: tuple(sorted(sites[site])) for site in sorted(sites)}

    def current(self, name: str) -> Device | None:
        """How a device stands on the disk at this moment; None when it is not there.

        Raises:
            ConfigError: its files cannot be used.
        """
        known = self.devices.get(name)
        folders = [self.root / known.site] if known else sorted(path for path in self.root.glob("*") if path.is_dir())
        for folder in folders:
            if is_name(name) and any((folder / (name + kind)).exists() for kind in (KEY, CLAIM, REVOKED)):
                return _read_device(folder, name)
        return None

    def version(self) -> tuple[int, ...]:
        """A value that changes when a file of the roster came, went or was replaced."""
        folders = (self.root, *(self.root / site for site in sorted({each.site for each in self.devices.values()})))
        return tuple(folder.stat().st_mtime_ns if folder.is_dir() else 0 for folder in folders)


def read_roster(root: Path, may_be_empty: bool = False) -> Roster:
    """Read `ROOT/<site>/<device>.{pub,claim,revoked}`.

    Raises:
        ConfigError: the folder is missing or holds no device that may join, a name or key is unusable, or a device is
            enrolled twice.
    """
    if not root.is_dir():
        raise ConfigError(
            f"the roster {root} is not a folder",
            "make it, with one folder per site and one public key per device: ROSTER/<site>/<device>.pub",
        )
    devices: dict[str, Device] = {}
    found = {
        (path.parent, path.stem)
        for kind in (KEY, CLAIM, REVOKED)
        for path in root.glob(f"*/*{kind}")
        if not path.name.startswith(".") and not path.parent.name.startswith(".")
    }
    for folder, name in sorted(found):
        device = _read_device(folder, name)
        known = devices.get(name)
        if known is not None:
            raise ConfigError(
                f"device {name!r} is enrolled at two sites: {known.site!r} and {device.site!r}",
                "delete one of the two keys: a device belongs to one site",
            )
        devices[name] = device
    if all(device.revoked for device in devices.values()) and not may_be_empty:
        raise ConfigError(
            f"the roster {root} holds no device",
            "copy each device's public key to ROSTER/<site>/<device>.pub, or let it enrol: server-run claim",
        )
    return Roster(devices, root)


def _read_device(folder: Path, name: str) -> Device:
    site, _ = check_name(folder.name, "site"), check_name(name, "device")
    revoked = folder / (name + REVOKED)
    key_path = revoked if revoked.exists() else folder / (name + KEY)
    claim_path = folder / (name + CLAIM)
    public_key = None
    if key_path.exists():
        try:
            public_key = signature.load_public(key_path)
        except CutlayerError as error:
            raise ConfigError(f"the key {key_path} cannot be used: {error.cause}", error.cure) from error
    claim = read_claim(claim_path) if claim_path.exists() else None
    return Device(name, site, public_key, revoked.exists(), claim)


def read_claim(path: Path) -> Claim:
    """Raises: ConfigError when the file is not as `enrolment` wrote it."""
    try:
        fields = json.loads(path.read_bytes()[:CLAIM_BYTES])
        expires_s = float(fields["expires_s"])
        if not 0 <= expires_s < NO_DATE_S:  # NaN, too, would hold for ever
            raise ValueError(f"it expires at {expires_s:g}")
        return Claim(signature.read_raw_public(bytes.fromhex(fields["public_key"])), expires_s)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"the claim {path} cannot be used: {why(error, path)}", "issue a new one: server-run claim"
        ) from error
