"""The device's state directory: where each thing lies, written whole or not at all, under one lock.

What the files mean is left to the rooms that own them (spool, release ledger, installed packages, head).
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from contract.errors import CutlayerError, DeviceError, UsageError, why

SECRET_BYTES = 32
PARTIAL_SUFFIX = ".partial"

Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class State:
    """Paths of one device's state, and the lock that keeps a second edge-run out of it."""

    root: Path
    lock: int  # file descriptor; the lock lasts as long as it is open

    @property
    def device_secret(self) -> Path:
        return self.root / "identity" / "device_secret"

    @property
    def site_secret(self) -> Path:
        return self.root / "identity" / "site_secret"

    @property
    def packages(self) -> Path:
        return self.root / "packages"

    @property
    def engines(self) -> Path:
        return self.root / "engines"

    @property
    def plans(self) -> Path:
        return self.root / "plans"

    @property
    def spool(self) -> Path:
        return self.root / "spool"

    @property
    def features(self) -> Path:
        return self.root / "features"

    @property
    def ledger(self) -> Path:
        return self.root / "release_ledger"

    @property
    def head(self) -> Path:
        return self.root / "checkpoints" / "head.safetensors"

    @property
    def parts(self) -> Path:
        """Checkpoints of a client part that is trained here."""
        return self.root / "parts"

    @property
    def local_head(self) -> Path:
        """What answers here without a server, and the pooled features that it learned from."""
        return self.root / "checkpoints" / "local_head"

    @property
    def site(self) -> Path:
        """What inference needs to know of the adaptation: class list and label mode."""
        return self.root / "checkpoints" / "site.json"

    def close(self) -> None:
        os.close(self.lock)


def open_state(root: Path) -> State:
    """Make the directory if it is missing, take its lock, and drop what an interrupted write left behind.

    Raises: DeviceError when the directory cannot be used, or another edge-run holds it.
    """
    try:
        for folder in ("identity", "packages", "engines", "plans", "spool", "features", "checkpoints", "parts"):
            (root / folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DeviceError(
            f"the state directory {root} cannot be used: {error.strerror}",
            "give --state a directory on a local disk that this user may write",
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise DeviceError(
            f"the state directory {root} is in use by another edge-run",
            "stop the other one, or give this one its own --state and --name",
        ) from error
    state = State(root, lock)
    drop_leftovers(state)
    return state


def drop_leftovers(state: State) -> None:
    """Remove what a killed run left: half-written files, and clean features, which show the images to any reader."""
    places = (state.root, *(entry for entry in state.root.iterdir() if entry.is_dir()))
    leftovers = [file for place in places for file in place.glob(f"*{PARTIAL_SUFFIX}")]
    for leftover in (*leftovers, *state.features.iterdir()):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)  # nothing of ours is a folder there, and a stray one must not stop the start
        else:
            leftover.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames and removals inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes | bytearray | memoryview, mode: int = 0o600) -> None:
    """Replace `path` by `data`, whole or not at all: temporary file, fsync, rename, fsync of the folder.

    Raises: DeviceError when the disk refuses (full, read-only).
    """
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as stream:
            os.fchmod(stream.fileno(), mode)
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise DeviceError(
            f"{path} cannot be written: {error.strerror}", "make room on the disk and start again"
        ) from error


def write_output(path: Path, data: bytes) -> None:
    """What -o asked for: a file whole or not at all; a pipe or a device is written to, never replaced.

    Raises: UsageError when it cannot be written.
    """
    if path.exists() and not path.is_file():
        try:
            path.write_bytes(data)
        except BrokenPipeError:
            raise  # its reader has had enough, as one of stdout's may
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}", "give -o another place") from error
        return
    try:
        write_durably(path.resolve(), data, mode=0o644)  # a link keeps its place
    except DeviceError as error:
        raise UsageError(error.cause, "give -o another place") from error


def read_or_set_aside(path: Path, parse: Callable[[bytes], Parsed], say: Callable[[str], None]) -> Parsed | None:
    """Read a small state file; None when it is missing, or unreadable, in which case it is kept as NAME.bad and said.

    A state file that a power cut or a bad card spoiled must not stop the device from starting.
    """
    try:
        return parse(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, CutlayerError) as error:
        aside = path.with_name(path.name + ".bad")
        os.replace(path, aside)
        say(f"{path.name} was unreadable ({why(error, path)}); kept as {aside} and started afresh")
        return None


def open_secret(path: Path, what: str) -> tuple[bytes, bool]:
    """The 32 bytes of a secret, made on first use (mode 0600); the flag says whether it was made now.

    A spoiled secret is never replaced in silence: new noise for the same images would be another release of them.
    Raises: DeviceError when the file is there but is not 32 bytes.
    """
    if not path.exists():
        write_durably(path, secrets.token_bytes(SECRET_BYTES))
        return path.read_bytes(), True
    return read_secret(path, what), False


def read_secret(path: Path, what: str) -> bytes:
    """The 32 bytes of a secret that must exist.

    Raises: DeviceError when it is missing, unreadable or not 32 bytes.
    """
    try:
        secret = path.read_bytes()
    except OSError as error:
        raise DeviceError(
            f"the {what} {path} cannot be read: {error.strerror}", "check the path and its permissions"
        ) from error
    if len(secret) != SECRET_BYTES:
        raise DeviceError(
            f"the {what} {path} should hold {SECRET_BYTES} bytes, found {len(secret)}",
            "restore it from a copy; removing it makes a new one, whose noise counts as another release of every image",
        )
    return secret
