"""What reproductions do alike once their rows are to be had: gather them in time, say what they are about, show them.

What a row is, the tables of a page and what else a document tells are left to the studies.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from contract.console import print_document, say
from contract.errors import UsageError
from contract.output import open_output
from server_runtime.files import write_atomic
from server_runtime.report import Results, to_html, to_text
from tools.kept_rows import Row

Cell = TypeVar("Cell")


def open_study(options: argparse.Namespace) -> Path:
    """The folder of -o; with --table it must hold a row, before any world is made. Raises: UsageError."""
    root = open_output(options.output)
    if options.table and not any((root / "rows").glob("*.json")):
        raise _no_rows(root)
    return root


def gather(
    options: argparse.Namespace, root: Path, cells: Sequence[Cell], started_s: float,
    find: Callable[[Cell, bool, str], Row | None], line_of: Callable[[Row], str],
) -> list[Row]:  # fmt: skip
    """The rows of `cells` that are there, each said in a line. `find` is told whether a row may still be computed, and
    which of how many it is. Raises: UsageError where there is none."""
    rows, left = [], 0
    for number, cell in enumerate(cells, start=1):
        late = options.stop_after_s is not None and time.monotonic() - started_s > options.stop_after_s
        row = find(cell, not (late or options.table), f"{number} of {len(cells)}")
        if row is not None:
            say(line_of(row))
            rows.append(row)
        left += late and row is None
    if left:
        say(f"{left} rows are left, as --stop-after-s says")
    if rows:
        return rows
    if options.table or left:
        raise _no_rows(root)
    raise UsageError("another command is at every row of these", "wait for it, or ask for other rows")


def _no_rows(root: Path) -> UsageError:
    cure = "run the same command without --table, or with more time"
    return UsageError(f"{root} holds no finished row of these", cure)


def document_head(study: str, world: str, data: str, options: argparse.Namespace, *settings: str) -> Row:
    """What --format json begins with; `settings` are names of options."""
    head: Row = {"study": study, "world": world, "data": data, "engine": options.engine}
    return {**head, **{name: getattr(options, name) for name in settings}}


def report(
    options: argparse.Namespace, root: Path, document: Row, page: Results, tables: int | None = None,
    kind: str = "reproduce",
) -> None:  # fmt: skip
    """The study's rows (STUDY.jsonl, where it has any) and page (STUDY.html), and on stdout the document, or the facts
    and the first `tables` tables of the page (all: None)."""
    study, rows = document["study"], document.get("rows")
    if rows is not None:
        write_atomic(root / f"{study}.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    write_atomic(root / f"{study}.html", to_html(page).encode())
    if options.format == "json":
        print_document(kind, {**document, "report": str(root / f"{study}.html")})
        return
    print("\n\n".join(map(to_text, page.tables[:tables])))
    print("\n" + "\n".join(f"{name}: {value}" for name, value in page.facts))
    print(f"report: {root / f'{study}.html'}")
