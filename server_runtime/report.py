"""Results as one self-contained HTML page: facts, tables with bars, pictures, notes. One schema for all that report.

What the results are, and where the page is written, is left to the callers.
"""

from __future__ import annotations

import base64
import html
from dataclasses import dataclass

Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Rows under named columns. Columns named in `shares` hold fractions 0..1 and get a bar; None prints as unknown."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    shares: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """A PNG under a title, with lines below it."""

    title: str
    png: bytes
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Results:
    """One page. `facts` are (name, value) pairs shown first; `notes` are paragraphs shown last."""

    title: str
    facts: tuple[tuple[str, Cell], ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()


_STYLE = """
:root { color-scheme: light dark; --line: #8884; --bar: #4a80d4; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { text-align: left; }
.bar { height: .35rem; border-radius: .2rem; background: var(--line); }
.bar i { display: block; height: 100%; border-radius: inherit; background: var(--bar); }
.scroll { overflow-x: auto; } .note, dt { opacity: .75; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; } dd { margin: 0; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; }
"""


def to_html(results: Results) -> str:
    """The whole page; everything that comes from outside is escaped, nothing is loaded from elsewhere."""
    facts = "".join(f"<dt>{html.escape(name)}</dt><dd>{_text(value)}</dd>" for name, value in results.facts)
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in results.notes)
    title = html.escape(results.title)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style><h1>{title}</h1><dl>{facts}</dl>{''.join(map(_table, results.tables))}"
        f"{''.join(map(_figure, results.pictures))}{notes}</html>\n"
    )


def _figure(picture: Picture) -> str:
    lines = "<br>".join(map(html.escape, picture.lines))
    return (
        f"<figure><h2>{html.escape(picture.title)}</h2>"
        f'<img alt="{html.escape(picture.title)}" src="data:image/png;base64,{base64.b64encode(picture.png).decode()}">'
        f"<figcaption>{lines}</figcaption></figure>"
    )


def to_text(table: Table) -> str:
    """The table in aligned columns for a terminal."""
    cells = [list(table.columns)]
    for row in table.rows:
        cells.append([_plain(value, name in table.shares) for name, value in zip(table.columns, row, strict=True)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join([table.title, *lines])


def _table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
    body = "".join(
        "<tr>"
        + "".join(_cell(value, name in table.shares) for name, value in zip(table.columns, row, strict=True))
        + "</tr>"
        for row in table.rows
    )
    note = f'<p class="note">{html.escape(table.note)}</p>' if table.note else ""
    return f'<h2>{html.escape(table.title)}</h2><div class="scroll"><table><tr>{head}</tr>{body}</table></div>{note}'


def _cell(value: Cell, is_share: bool) -> str:
    bar = ""
    if is_share and isinstance(value, (int, float)):
        bar = f'<div class="bar"><i style="width:{100 * min(max(value, 0), 1):.1f}%"></i></div>'
    return f"<td>{html.escape(_plain(value, is_share))}{bar}</td>"


def _text(value: Cell) -> str:
    return html.escape(_plain(value, False))


def _plain(value: Cell, is_share: bool) -> str:
    if value is None:
        return "unknown"
    if is_share and isinstance(value, (int, float)):
        return f"{100 * value:.1f} %"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value
