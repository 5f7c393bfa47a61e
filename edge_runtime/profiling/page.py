"""A table of split points as one self-contained page of HTML, its charts as SVG; nothing is loaded from elsewhere.

What is drawn is `charts`' part; everything that comes from outside is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from edge_runtime.profiling.charts import Bar, BarChart, Curve, cost_chart, power_curves, ticks
from edge_runtime.profiling.table import Table, facts, grid, remarks

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 320, 60, 40, 30
COLOURS = ("#3b6fb6", "#a9b8cf", "#e0a03c", "#5a9a5a", "#b05a8c", "#7a6fb0", "#8a8a3c", "#4aa0a8", "#c4574a", "#777777")
_STYLE = """
:root { color-scheme: light dark; } body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto;
padding: 0 1rem; } h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: .3rem .5rem; border-bottom: 1px solid #8884; text-align: right; } .scroll { overflow-x: auto; }
svg { max-width: 100%; height: auto; } svg text { fill: currentColor; font-size: 11px; } .note, pre { opacity: .8; }
line, polyline { stroke: currentColor; }
"""


def to_html(table: Table) -> str:
    """The whole page."""
    head, *lines = grid(table)
    title = f"edge-profile: {table.profile or 'a device without a profile'}"
    rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
    columns = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    curves = power_curves(table)
    power = f"<h2>Power while working</h2>{_curves_svg(curves)}" if curves else ""
    notes = "".join(f'<p class="note">{html.escape(text)}</p>' for text in remarks(table))
    chart = cost_chart(table)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1><pre>{html.escape(chr(10).join(facts(table)))}</pre>"
        f'<h2>{html.escape(chart.title)}</h2>{_bars_svg(chart)}<p class="note">{html.escape(chart.note)}</p>{power}'
        f'<h2>Figures</h2><div class="scroll"><table><tr>{columns}</tr>{rows}</table></div>{notes}</html>\n'
    )


def _bars_svg(chart: BarChart) -> str:
    lows = [sum(value for _, value in bar.parts if value < 0.0) for bar in chart.bars]
    highs = [_top(bar) for bar in chart.bars]
    marks = ticks(min(lows, default=0.0), max(highs, default=1.0))
    inner = [_axis(marks, chart.unit)]
    each = (WIDTH - LEFT - 10) / max(len(chart.bars), 1)
    for number, bar in enumerate(chart.bars):
        inner.append(_bar(bar, chart.names, LEFT + each * number, each, marks))
    for number, name in enumerate(chart.names):
        at = LEFT + 150 * number
        inner.append(f'<rect x="{at}" y="4" width="11" height="11" fill="{COLOURS[number % len(COLOURS)]}"/>')
        inner.append(f'<text x="{at + 16}" y="14">{html.escape(name)}</text>')
    return _svg(chart.title, inner)


def _top(bar: Bar) -> float:
    stacked = sum(value for _, value in bar.parts if value > 0.0)
    return max(stacked, 0.0 if bar.middle is None else bar.middle + bar.half_width)


def _bar(bar: Bar, names: Sequence[str], left: float, width: float, marks: Sequence[float]) -> str:
    inner, middle = [], left + width / 2
    above = below = 0.0
    for name, value in bar.parts:
        base = above if value >= 0.0 else below
        above, below = (base + value, below) if value >= 0.0 else (above, base + value)
        ends = sorted((_y(base, marks), _y(base + value, marks)))
        inner.append(
            f'<rect x="{left + width * 0.2:.1f}" y="{ends[0]:.1f}" width="{width * 0.6:.1f}" '
            f'height="{ends[1] - ends[0]:.1f}" fill="{COLOURS[names.index(name) % len(COLOURS)]}">'
            f"<title>{html.escape(name)}: {value:.4g}</title></rect>"
        )
    if bar.middle is None:
        inner.append(f'<text x="{middle:.1f}" y="{_y(0.0, marks) - 6:.1f}" text-anchor="middle">unknown</text>')
    else:
        high, low = _y(bar.middle + bar.half_width, marks), _y(bar.middle - bar.half_width, marks)
        inner.append(f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="{high:.1f}" y2="{low:.1f}"/>')
    label = f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{html.escape(bar.label)}</text>'
    return "".join([*inner, label])


def _curves_svg(curves: Sequence[Curve]) -> str:
    marks, shares = ticks(0.0, max(curve.points[-1][0] for curve in curves)), [0.0, 0.25, 0.5, 0.75, 1.0]
    wide = WIDTH - LEFT - 100
    inner = [_axis(shares, "share of the time")]
    for watts in marks:
        at = LEFT + wide * (watts - marks[0]) / (marks[-1] - marks[0])
        inner.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{watts:g} W</text>')
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(
            f"{LEFT + wide * (watts - marks[0]) / (marks[-1] - marks[0]):.1f},{_y(share, shares):.1f}"
            for watts, share in curve.points
        )
        inner.append(f'<polyline points="{points}" fill="none" style="stroke:{colour}" stroke-width="2"/>')
        high = TOP + 14 * number
        inner.append(f'<rect x="{WIDTH - 95}" y="{high}" width="10" height="10" fill="{colour}"/>')
        inner.append(f'<text x="{WIDTH - 80}" y="{high + 9}">{html.escape(curve.label)}</text>')
    return _svg("Power while working", inner)


def _axis(marks: Sequence[float], unit: str) -> str:
    lines = [f'<text x="2" y="{TOP - 4}">{html.escape(unit)}</text>']
    for mark in marks:
        at = _y(mark, marks)
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{at:.1f}" y2="{at:.1f}" opacity="0.2"/>')
        lines.append(f'<text x="{LEFT - 5}" y="{at + 4:.1f}" text-anchor="end">{mark:g}</text>')
    return "".join(lines)


def _y(value: float, marks: Sequence[float]) -> float:
    tall = HEIGHT - TOP - BOTTOM
    return TOP + tall * (1.0 - (value - marks[0]) / (marks[-1] - marks[0]))


def _svg(title: str, inner: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f"<title>{html.escape(title)}</title>{''.join(inner)}</svg>"
    )
