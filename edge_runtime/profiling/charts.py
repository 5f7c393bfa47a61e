"""What a table of split points looks like as charts: bars of cost per split, and how often which power was taken. Pure.

Values only; drawing them is left to `page` (SVG in a page of HTML) and `plot` (matplotlib).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edge_runtime.profiling.rows import Row
from edge_runtime.profiling.table import Table, name_of, ordered

COMPUTE, IDLE, COMMUNICATION = "computing", "idle", "communication (modelled)"


@dataclass(frozen=True)
class Bar:
    """Parts stacked from 0, those below 0 downwards; `half_width` of the interval around `middle`. None: unknown."""

    label: str
    parts: tuple[tuple[str, float], ...]
    middle: float | None
    half_width: float


@dataclass(frozen=True)
class BarChart:
    title: str
    unit: str
    names: tuple[str, ...]  # of the parts, in their order
    bars: tuple[Bar, ...]
    note: str


@dataclass(frozen=True)
class Curve:
    """Watts, rising, and the share of the time in which power was at most that."""

    label: str
    points: tuple[tuple[float, float], ...]


def cost_chart(table: Table) -> BarChart:
    """Energy per image; time per image where no energy is known at all."""
    rows = ordered(table)
    if any(row.energy is not None for row in rows):
        names = [COMPUTE, IDLE, *([COMMUNICATION] if any(row.communication_j is not None for row in rows) else [])]
        elsewhere = "" if table.root == "/" else f", read under {table.root}: not the energy of this machine"
        scope = f"{table.meter.name}: {table.meter.scope}{elsewhere}"
        note = f"{scope}; whiskers: 95 % interval of what was measured. {_communication_note(rows)}"
        return BarChart("Energy per image", "mJ", tuple(names), tuple(map(_energy_bar, rows)), note)
    reasons = sorted({row.energy_reason for row in rows if row.energy_reason})
    names = [phase.name for phase in rows[0].phases] if rows else []
    note = f"Energy unknown: {'; '.join(reasons)}. Whiskers: 95 % interval."
    return BarChart("Time per image", "ms", tuple(names), tuple(map(_time_bar, rows)), note)


def power_curves(table: Table) -> tuple[Curve, ...]:
    """The distribution of power of each row that has one."""
    curves = []
    for row in ordered(table):
        power = None if row.energy is None else row.energy.power
        if power is not None:
            last = len(power.quantiles_w) - 1
            points = tuple((watts, step / last) for step, watts in enumerate(power.quantiles_w))
            curves.append(Curve(name_of(row), points))
    return tuple(curves)


def ticks(lowest: float, highest: float, most: int = 6) -> list[float]:
    """Round values, evenly apart, from at most `lowest` to at least `highest`; about `most` of them."""
    span = highest - lowest
    if span <= 0.0:
        return [lowest, lowest + 1.0]
    least = span / (most - 1)
    power = 10.0 ** math.floor(math.log10(least))
    step = next(times * power for times in (1.0, 2.0, 5.0, 10.0) if times * power >= least * 0.999)
    return [place * step for place in range(math.floor(lowest / step), math.ceil(highest / step) + 1)]


def _energy_bar(row: Row) -> Bar:
    if row.energy is None:
        return Bar(name_of(row), (), None, 0.0)
    parts = [(COMPUTE, 1e3 * row.energy.compute_j.mean), (IDLE, 1e3 * row.energy.idle_j)]
    if row.communication_j is not None:
        parts.append((COMMUNICATION, 1e3 * row.communication_j))
    measured = row.energy.measured_j
    return Bar(name_of(row), tuple(parts), 1e3 * measured.mean, 1e3 * measured.half_width)


def _time_bar(row: Row) -> Bar:
    parts = tuple((phase.name, 1e3 * phase.seconds.mean) for phase in row.phases)
    return Bar(name_of(row), parts, 1e3 * row.seconds_per_image.mean, 1e3 * row.seconds_per_image.half_width)


def _communication_note(rows: Sequence[Row]) -> str:
    reasons = sorted({row.communication_reason for row in rows})
    return f"Communication: {'; '.join(reasons)}."
