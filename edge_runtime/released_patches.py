"""Which patches of a picture a release shows: as a short text for the ledger, and what share several of them show.

A patch token holds some of its neighbours as well, because attention mixed them before the cut: the share counts
tokens, and is no bound on what an attacker draws of the rest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

ALL = "all"
UNKNOWN = ""  # of a line that an earlier version wrote; counts as every patch

_TEXT = re.compile(r"(\d{1,6})x(\d{1,6}):(all|[0-9a-f]+)", re.ASCII)


def to_text(grid: tuple[int, int], kept: NDArray[np.int64] | None = None) -> str:
    """`ROWSxCOLUMNS:all`, or the patches in hex, the first one in the highest bit; `kept` None is every patch."""
    rows, columns = grid
    shown = np.zeros(rows * columns, np.bool_)
    shown[slice(None) if kept is None else kept] = True
    return f"{rows}x{columns}:{ALL if shown.all() else np.packbits(shown).tobytes().hex()}"


def from_text(text: str) -> NDArray[np.bool_] | None:
    """Shown patches (rows, columns); None for a text that is unknown or no such text."""
    found = _TEXT.fullmatch(text)
    if found is None:
        return None
    rows, columns = int(found[1]), int(found[2])
    if found[3] == ALL:
        return np.ones((rows, columns), np.bool_)
    if len(found[3]) != 2 * -(-rows * columns // 8) or not rows * columns:
        return None
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(found[3]), np.uint8))
    return bits[: rows * columns].astype(np.bool_).reshape(rows, columns)


def share_shown(texts: Iterable[str]) -> float:
    """Share of the picture that these releases show together, 0 to 1; one that is unknown counts as all of it."""
    return _share(frozenset(texts))


@lru_cache(maxsize=4096)
def _share(texts: frozenset[str]) -> float:
    shown = [from_text(text) for text in texts]
    grids = [each for each in shown if each is not None]
    if len(grids) < len(shown) or any(each.all() for each in grids):
        return 1.0
    if not grids:
        return 0.0
    rows, columns = (math.lcm(*(each.shape[axis] for each in grids)) for axis in (0, 1))
    together = np.zeros((rows, columns), np.bool_)
    for each in grids:
        together |= each.repeat(rows // each.shape[0], axis=0).repeat(columns // each.shape[1], axis=1)
    return float(together.mean())
