"""Small pictures for reports as inline SVG: a matrix of distances, lines over places. Pure, and no library."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

import numpy as np

_COLOURS = ("#4a80d4", "#d4804a", "#4aa86c", "#a84a9c", "#8c8c3c", "#3c9ca8", "#c04a5a")
_CELL, _MARGIN = 16, 110
_WIDTH, _HEIGHT, _LEFT, _FOOT = 560, 220, 48, 28


def matrix_picture(names: Sequence[str], values: np.ndarray) -> str:
    """Values (N, N) of 0 or more as shades: the darker, the nearer. Each cell tells its pair and value."""
    side = _MARGIN + _CELL * len(names)
    most = float(values.max()) or 1.0
    cells = [
        f'<rect x="{_MARGIN + _CELL * x}" y="{_MARGIN + _CELL * y}" width="{_CELL - 1}" height="{_CELL - 1}" '
        f'fill="#4a80d4" fill-opacity="{1 - float(values[y, x]) / most:.3f}">'
        f"<title>{html.escape(f'{names[y]}, {names[x]}: {values[y, x]:.4f}')}</title></rect>"
        for y in range(len(names))
        for x in range(len(names))
    ]
    labels = []
    for place, name in enumerate(names):
        at, text = _MARGIN + _CELL * place + _CELL - 5, html.escape(name)
        labels.append(f'<text x="{_MARGIN - 4}" y="{at}" text-anchor="end">{text}</text>')
        labels.append(f'<text x="{at}" y="{_MARGIN - 4}" transform="rotate(-90 {at} {_MARGIN - 4})">{text}</text>')
    return _svg(side, side, [*cells, *labels])


def line_chart(lines: Mapping[str, Sequence[float]], axis: str) -> str:
    """Values of each name over places 1, 2, ... from 0 to the largest."""
    count = max(map(len, lines.values()), default=0)
    most = max((value for line in lines.values() for value in line), default=0.0) or 1.0
    step = (_WIDTH - _LEFT - 120) / max(count - 1, 1)

    def point(place: int, value: float) -> tuple[float, float]:
        return _LEFT + step * place, (_HEIGHT - _FOOT) * (1 - value / most) + 8

    shapes = [
        f'<text x="{point(place, 0)[0]:.0f}" y="{_HEIGHT}" text-anchor="middle">{place + 1}</text>'
        for place in range(count)
    ]
    shapes.append(f'<text x="4" y="{_HEIGHT}">{html.escape(axis)}</text>')
    shapes += [f'<text x="4" y="{point(0, value)[1] + 4:.0f}">{value:.3f}</text>' for value in (0.0, most)]
    for number, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (point(place, value) for place, value in enumerate(line)))
        shapes.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        shapes.append(f'<text x="{_WIDTH - 110}" y="{18 + 16 * number}" fill="{colour}">{html.escape(name)}</text>')
    return _svg(_WIDTH, max(_HEIGHT + 4, 18 + 16 * len(lines)), shapes)


def _svg(width: int, height: int, shapes: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-size="11" fill="currentColor" role="img">{"".join(shapes)}</svg>'
    )
