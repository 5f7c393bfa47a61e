"""A folder for work in hand: gone when the work is over, and when the work was killed, at the next start.

A folder in use is locked by the process that uses it, and the system drops the lock of a process that died. So one that
is not locked is a leftover: a copy of a package or of a model that nobody would ever remove. What lies in the folder is
left to the caller.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def scratch_folder(prefix: str, suffix: str = "", parent: Path | None = None) -> Iterator[Path]:
    """A new folder in `parent`, by default where temporary files go; what killed processes left there goes first.

    Raises: OSError when there can be none.
    """
    place = Path(tempfile.gettempdir()) if parent is None else parent
    remove_leftovers(place, prefix, suffix)
    folder, lock = _make(place, prefix, suffix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_leftovers(place: Path, prefix: str, suffix: str = "") -> None:
    """Remove this user's folders of such a name that no process has in use."""
    for folder in place.glob(f"{_literal(prefix)}*{_literal(suffix)}"):
        with suppress(OSError):  # somebody else's, or just gone
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = lock_folder(folder)
            try:
                shutil.rmtree(folder)
            finally:
                os.close(lock)


def _make(place: Path, prefix: str, suffix: str) -> tuple[Path, int]:
    """A folder and its lock; made again where another process took it for a leftover before it was locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=place))
        try:
            lock = lock_folder(folder)
        except (BlockingIOError, FileNotFoundError):  # it is being removed
            continue
        if folder.is_dir():
            return folder, lock
        os.close(lock)


def lock_folder(folder: Path) -> int:
    """Its descriptor, which holds the lock until it is closed. Raises: BlockingIOError when another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _literal(text: str) -> str:
    """As a pattern that stands for itself."""
    return "".join(f"[{each}]" if each in "*?[" else each for each in text)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock on this file. Raises: OSError where it cannot be opened."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
