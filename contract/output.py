"""Where a command writes what it was asked for with -o: made and tried before anything takes time.

The one rule of all commands: folders that are missing are made, and a place that cannot be written is a mistake of the
command line, told at once. What is written there, and whether what is there already may be used, is left to the
commands.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from contract.errors import UsageError


def open_output(path: Path) -> Path:
    """The absolute path of the folder given with -o, made where it is missing.

    Raises: UsageError when it cannot be a folder that this user may write.
    """
    return _writable(path.resolve(), f"-o {path} cannot be used as a folder", "give -o a folder")


def check_output(path: Path) -> None:
    """Try whether what is given with -o can be made there later.

    Raises: UsageError when it lies in no folder that this user may write.
    """
    _writable(path.resolve().parent, f"-o {path} cannot be written", "give -o a place in a folder")


def check_output_file(path: Path, may_be_pipe: bool = False) -> None:
    """As `check_output`, for a file; a pipe or a device is never replaced. Raises: UsageError."""
    if path.is_dir() or not path.name:
        raise UsageError(f"-o should name a file, {str(path)!r} is a folder", "give -o the name of a file")
    if not path.exists() or path.is_file():
        check_output(path)
    elif not may_be_pipe:
        raise UsageError(f"-o should name a file, {str(path)!r} is a pipe or a device", "give -o the name of a file")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Around writing this file: where the disk refuses, Python's error names no file, and stdout would be blamed.

    Raises: OSError, which names one.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _writable(folder: Path, cause: str, cure: str) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = f"{folder} is no folder" if isinstance(error, FileExistsError) else error.strerror
        raise UsageError(f"{cause}: {reason}", f"{cure} that exists or can be made, and may be written") from error
    return folder
