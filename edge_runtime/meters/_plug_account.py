"""The account of a plug's owner, which newer plugs want: FILE holds two lines, name and password, written by a person.

Once a plug has taken it, its hash is kept in FILE.hash (mode 0600), and FILE may go: the hash opens the owner's plugs
on the local network, and nothing else that the password opens. A renewed FILE comes before an old hash. Protocols hash
in different ways, so each has a hash of its own. Talking to plugs is left to `kasa`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from contract.canonical import CanonicalError, from_json, to_json
from contract.errors import ConfigError, why
from edge_runtime.state import write_durably

HASH_FILE_BYTES = 4096


@dataclass(frozen=True)
class Account:
    """`login` is name and password, None when only hashes are left; neither shows in a text of this object."""

    file: Path
    login: tuple[str, str] | None = field(repr=False)
    hashes: Mapping[str, str] = field(repr=False)  # by protocol

    @property
    def hash_file(self) -> Path:
        return hash_file_of(self.file)


def hash_file_of(file: Path) -> Path:
    return file.with_name(file.name + ".hash")


def read_account(file: Path) -> Account:
    """What is known of the account: `file`'s two lines, or where it is gone the hashes beside it.

    Raises: ConfigError when neither is there, or the one to use is not what it should be.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        hashes = _read_hashes(hash_file_of(file))
        if not hashes:
            raise ConfigError(
                f"the plug's account {file} does not exist, nor does {hash_file_of(file).name} beside it",
                "correct --plug-account, or write two lines into the file: a name and a password",
            ) from error
        return Account(file, None, hashes)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the plug's account {file} cannot be read: {why(error, file)}", "correct --plug-account"
        ) from error
    if len(lines) != 2 or not all(lines):
        raise ConfigError(f"{file} should be two lines, a name and a password", "correct the file of --plug-account")
    return Account(file, (lines[0], lines[1]), {})


def keep_hash(account: Account, protocol: str, digest: str) -> None:
    """Remember the hash that a plug took, where it is new. Raises: DeviceError when the disk refuses."""
    try:
        known = _read_hashes(account.hash_file)
    except ConfigError:  # spoiled: a fresh one replaces it
        known = {}
    if known.get(protocol) != digest:
        write_durably(account.hash_file, to_json({**known, protocol: digest}))


def _read_hashes(file: Path) -> dict[str, str]:
    try:
        found = from_json(file.read_bytes(), HASH_FILE_BYTES)
    except FileNotFoundError:
        return {}
    except (OSError, CanonicalError) as error:
        raise _spoiled(file, why(error, file)) from error
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise _spoiled(file, "it should be one hash for each protocol")
    return found


def _spoiled(file: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{file} cannot be used: {why}", "remove it, and write name and password into the file of --plug-account"
    )
