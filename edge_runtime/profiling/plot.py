"""A table of split points as a picture, by matplotlib, which the extra `plot` installs; what is drawn is decided in
`charts`."""

from __future__ import annotations

import importlib
from io import BytesIO
from typing import Any

from contract.errors import UsageError
from edge_runtime.profiling.charts import BarChart, cost_chart, power_curves
from edge_runtime.profiling.page import COLOURS
from edge_runtime.profiling.table import Table

SUFFIXES = ("png", "pdf", "svg")


def to_picture(table: Table, form: str) -> bytes:
    """The file's bytes, in a form of SUFFIXES. Raises: UsageError when matplotlib is not there."""
    try:
        figure_module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise UsageError(
            f"drawing a .{form} needs matplotlib, which cannot be imported",
            "pip install 'cutlayer[plot]', or give -o a name ending in .html, which needs nothing",
        ) from error
    curves = power_curves(table)
    figure = figure_module.Figure(figsize=(9.0, 4.0 if not curves else 7.5), layout="constrained")
    panels = figure.subplots(1 if not curves else 2, 1, squeeze=False)
    _draw_bars(panels[0][0], cost_chart(table))
    if curves:
        axes = panels[1][0]
        for curve in curves:
            axes.plot([watts for watts, _ in curve.points], [share for _, share in curve.points], label=curve.label)
        axes.set(xlabel="power while working, W", ylabel="share of the time", ylim=(0.0, 1.0))
        axes.legend(fontsize="small")
    labels = ", ".join(f"{key}={value}" for key, value in sorted(table.environment.items()))
    figure.suptitle(f"{table.profile or 'a device without a profile'} {f'({labels})' if labels else ''}")
    data = BytesIO()
    figure.savefig(data, format=form, dpi=150)
    return data.getvalue()


def _draw_bars(axes: Any, chart: BarChart) -> None:
    above, below = [0.0] * len(chart.bars), [0.0] * len(chart.bars)
    for number, name in enumerate(chart.names):
        values = [dict(bar.parts).get(name, 0.0) for bar in chart.bars]
        bases = [high if value >= 0.0 else low for value, high, low in zip(values, above, below, strict=True)]
        axes.bar(range(len(values)), values, bottom=bases, color=COLOURS[number % len(COLOURS)], label=name)
        above = [high + max(value, 0.0) for high, value in zip(above, values, strict=True)]
        below = [low + min(value, 0.0) for low, value in zip(below, values, strict=True)]
    for place, bar in enumerate(chart.bars):
        if bar.middle is None:
            axes.text(place, 0.0, "unknown", ha="center", va="bottom")
        else:
            axes.errorbar(place, bar.middle, yerr=bar.half_width, color="black", capsize=3)
    axes.set_xticks(range(len(chart.bars)), [bar.label for bar in chart.bars])
    axes.set(ylabel=f"{chart.title.lower()}, {chart.unit}", title=chart.note, xlabel="split")
    axes.title.set(fontsize="x-small", wrap=True)
    axes.legend(fontsize="small")
