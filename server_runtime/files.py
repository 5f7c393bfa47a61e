"""Writes files whole or not at all, and sets unreadable ones aside.

What a file means is left to the callers. Keep run directories off FAT: rename is not atomic there.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

from contract.errors import TrainingError, why
from contract.output import naming

DISK_ERRORS = (OSError, sqlite3.Error)


def disk_refuses(root: Path | str, error: Exception) -> TrainingError:
    """One of `DISK_ERRORS` from the run directory, as an operator is told it."""
    return TrainingError(
        f"the run directory {root} cannot be read or written: {why(error, root)}",
        "free space or repair the disk, then start server-run again: nothing acknowledged is lost",
    )


def sync_directory(folder: Path) -> None:
    """Make the names inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: temporary file, fsync, rename, fsync of the folder.

    Raises: OSError, which names a file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    try:
        with naming(path), open(temporary, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError:
        with contextlib.suppress(OSError):  # a full disk needs what was written of it
            temporary.unlink()
        raise
    os.replace(temporary, path)
    sync_directory(path.parent)


def remove(path: Path) -> None:
    """Delete a file, if it is there, so that a power cut does not bring it back."""
    if path.exists():
        path.unlink()
        sync_directory(path.parent)


def set_aside(path: Path) -> Path:
    """Rename an unreadable file to `NAME.damaged-<n>`, so that it neither stops a start nor is lost to inspection."""
    number = 1
    while (target := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    os.replace(path, target)
    return target
