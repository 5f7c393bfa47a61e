"""Rows of a reproduction on the disk: kept whole, read back where they answer the same question, claimed by one command
of several. What a row says is the reproduction's own.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from server_runtime.files import write_atomic

Row = dict[str, Any]


def finished(path: Path, head: Row, proof: str = "curve") -> Row | None:
    """The stored row, if it is whole (it has a `proof`) and answers the same question."""
    try:
        row = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    same = isinstance(row, dict) and all(row.get(name) == value for name, value in head.items())
    return row if same and row.get(proof) not in (None, [], {}) else None


def keep(path: Path, row: Row) -> Row:
    """The row as it is read back: one that was kept looks the same as one that was not."""
    write_atomic(path, (json.dumps(row, indent=2, allow_nan=False) + "\n").encode())
    kept: Row = json.loads(path.read_text())
    return kept


def claimed(path: Path, head: Row, compute: Callable[[], Row] | None, proof: str = "curve") -> Row | None:
    """The stored row, else computed and kept; None where it may not be computed, or another command is at it."""
    row = finished(path, head, proof)
    if compute is None:
        return row
    if row is not None:
        return row
    with claim(path) as is_mine:
        row = finished(path, head, proof)
        if row is None and is_mine:
            row = keep(path, {**head, **compute()})
    return row


@contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Whether this command may compute the row: no other is at it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
