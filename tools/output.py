"""The folder that a tool works in: made, and tried for writing, before anything takes time.

What is kept there, and whether what is there already may be used, is left to the tools.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from contract.errors import UsageError


def open_output(path: Path) -> Path:
    """The absolute path of the folder given with -o, made where it is missing.

    Raises: UsageError when it cannot be a folder that this user may write.
    """
    root = path.resolve()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise UsageError(
            f"-o {path} cannot be used as a folder: {error.strerror}",
            "give -o a folder that exists or can be made, and may be written",
        ) from error
    return root
