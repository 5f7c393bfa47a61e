"""A command's part of the rows of a study, as in --share 1/4: so that several commands may work on one folder.

Which rows there are, and where they are kept, is left to the commands.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

T = TypeVar("T")
Share = tuple[int, int]  # part i of n, i counting from 1
WHOLE: Share = (1, 1)


def read_share(text: str) -> Share:
    """I and N of I/N, 1 <= I <= N; for argparse."""
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"expected I/N with I from 1 to N, as in 1/4, found {text!r}")
    return int(part), int(parts)


def share_of(rows: Sequence[T], share: Share, together: Callable[[T], Hashable]) -> list[T]:
    """Part i of n of the rows. Those for which `together` is the same stay together, and such groups take turns."""
    groups: dict[Hashable, list[T]] = {}
    for row in rows:
        groups.setdefault(together(row), []).append(row)
    part, parts = share
    return [row for group in list(groups.values())[part - 1 :: parts] for row in group]
