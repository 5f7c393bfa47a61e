"""The table that edge-profile writes: its document, read back and checked, and how it looks to a person.

Figures come from `rows`. Two tables make one only where both are of the same environment, meter and kind of
work: joules of a hot and a cold device, or of two meters that see different things, are not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from contract.canonical import CanonicalError, decode_document, encode
from contract.errors import ConfigError, UsageError
from edge_runtime.profiling.measuring import Plan
from edge_runtime.profiling.rows import AWAY_PARTS, Estimate, Row

KIND = "edge-profile"
TABLE_BYTES_MAX = 16 << 20
Work = Literal["frontend", "training"]


@dataclass(frozen=True)
class MeterFacts:
    """What measured. `window_s` None: unknown. `note` says what else is to be known, `not_used` why no other did."""

    name: str
    scope: str
    quality: str
    window_s: float | None
    note: str | None
    not_used: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """Split points of one device in one environment; `root` is where its meter was read, "/" on the device itself."""

    work: Work
    profile: str | None
    status: str  # what was ever run on such a device
    environment: dict[str, str]
    root: str
    meter: MeterFacts
    plan: Plan
    planned: int  # split points; fewer rows: it was stopped before the end
    rows: tuple[Row, ...]


def to_document(table: Table) -> dict[str, object]:
    """The fields of the JSON document."""
    return encode(table)


def read_table(path: Path) -> Table:
    """A table that edge-profile wrote. Raises: ConfigError."""
    try:
        with path.open("rb") as file:
            return decode_document(Table, file.read(TABLE_BYTES_MAX + 1), TABLE_BYTES_MAX, KIND)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", "correct the path") from error
    except CanonicalError as error:
        raise ConfigError(f"{path} is no table of this edge-profile: {error}", "measure again with -o") from error


def merge(tables: Sequence[Table]) -> Table:
    """One table of all rows. Raises: UsageError where they must not be compared."""
    first = tables[0]
    for other in tables[1:]:
        for what, mine, its in (
            ("environment", first.environment, other.environment),
            ("device", (first.profile, first.root), (other.profile, other.root)),
            ("meter", (first.meter.name, first.meter.scope), (other.meter.name, other.meter.scope)),
            ("work", first.work, other.work),
        ):
            if mine != its:
                raise UsageError(
                    f"tables of one plot should have the same {what}, found {mine} and {its}", "plot them one by one"
                )
    rows = tuple(row for table in tables for row in table.rows)
    return replace(first, rows=rows, planned=sum(table.planned for table in tables))


def ordered(table: Table) -> list[Row]:
    """Its rows by model, precision and depth of the split, in whatever order they were measured."""
    return sorted(table.rows, key=lambda row: (row.point.model, row.point.precision, row.point.split))


def name_of(row: Row) -> str:
    """A split and its precision, short."""
    return f"{row.point.split} {'int8' if row.point.precision == 'w8a8' else row.point.precision}"


def in_points(count: int) -> str:
    """So many split points, for a person."""
    return f"{count} split point{'' if count == 1 else 's'}"


def to_text(table: Table) -> str:
    """For a person on a terminal."""
    lines = grid(table)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([*facts(table), "", *text, "", *remarks(table)]) + "\n"


def grid(table: Table) -> list[list[str]]:
    """Heads and rows of cells; unknown figures are `?`, and `remarks` say why."""
    training = table.work == "training"
    phases = [f"{phase.name} ms" for phase in table.rows[0].phases] if training and table.rows else []
    phases += [*(f"{name} ms" for name in AWAY_PARTS), "upload mJ", "download mJ"] if training else []
    head = [
        "split", "precision", "ms/image", *phases, "bytes/image", "mJ/image", "bound", "compute", "idle", "comm.",
        "total", "mean W", "peak W", "coverage",
    ]  # fmt: skip
    return [head, *(_cells(row, training) for row in ordered(table))]


def facts(table: Table) -> list[str]:
    """What all rows have in common."""
    plan, meter = table.plan, table.meter
    labels = ", ".join(f"{key}={value}" for key, value in sorted(table.environment.items())) or "no label"
    window = "" if meter.window_s is None else f", averages over {meter.window_s:g} s"
    lines = [
        f"device       {table.profile or 'no profile'} ({table.status})",
        f"environment  {labels}",
        f"meter        {meter.name}: {meter.scope} ({meter.quality}{window})",
        f"plan         {plan.blocks} blocks of {plan.block_s:g} s, idle {plan.baseline_s:g} s before and after, "
        f"seed {plan.seed}",
    ]
    if meter.note is not None and meter.name != "none":
        lines.insert(3, f"             {meter.note}")
    if table.root != "/":
        lines.insert(3, f"             read under {table.root}: not the energy of this machine")
    return lines


def remarks(table: Table) -> list[str]:
    """Why figures are unknown, and what else is to be known of them; each once."""
    said: dict[str, list[str]] = {}
    if len(table.rows) < table.planned:
        said[f"stopped after {len(table.rows)} of {in_points(table.planned)}"] = [""] * len(table.rows)
    for row in ordered(table):
        texts = [
            *([f"energy unknown: {row.energy_reason}"] if row.energy_reason and row.energy is None else []),
            *([f"energy: {row.energy_reason}"] if row.energy_reason and row.energy is not None else []),
            f"communication {'unknown' if row.communication_j is None else 'energy'}: {row.communication_reason}",
            *([] if table.work == "frontend" or row.away else ["time away from the work: unknown, no run was joined"]),
            *_away_remarks(row),
            *(f"slowed down: {each}" for each in row.throttled),
            *row.notes,
        ]
        for text in texts:
            said.setdefault(text, []).append(name_of(row))
    return [
        text if len(splits) == len(table.rows) else f"split {', '.join(splits)}: {text}"
        for text, splits in said.items()
    ]


def _away_remarks(row: Row) -> list[str]:
    if row.away is None or row.away.reason is None:
        return []
    return [f"energy while away{' unknown' if row.away.energy_j is None else ''}: {row.away.reason}"]


def _away_cells(row: Row) -> list[str]:
    """Times of its parts, and the joules of those that use the link."""
    parts = {} if row.away is None else {part.name: part for part in row.away.parts}
    times = [_figure(1e3 * parts[name].seconds) if name in parts else "?" for name in AWAY_PARTS]
    joules = [parts[name].energy_j if name in parts else None for name in ("upload", "download")]
    return [*times, *(_figure(None if each is None else 1e3 * each) for each in joules)]


def _cells(row: Row, training: bool) -> list[str]:
    energy, power = row.energy, None if row.energy is None else row.energy.power
    phases = [_interval(phase.seconds, 1e3) for phase in row.phases] if training else []
    phases += _away_cells(row) if training else []
    return [
        f"{row.point.split}/{row.point.depth}",
        row.point.precision,
        _interval(row.seconds_per_image, 1e3),
        *phases,
        str(row.point.sent_bytes_per_image + row.point.received_bytes_per_image),
        "?" if energy is None else _interval(energy.measured_j, 1e3),
        _figure(None if energy is None or energy.bound_j is None else energy.bound_j * 1e3),
        "?" if energy is None else _interval(energy.compute_j, 1e3),
        _figure(None if energy is None else energy.idle_j * 1e3),
        _figure(None if row.communication_j is None else row.communication_j * 1e3),
        _figure(None if row.total_j is None else row.total_j * 1e3),
        _figure(None if power is None else power.mean_w),
        "?" if power is None else f"{power.peak_w:.2f} ({power.peak_window_s:g} s)",
        "?" if row.coverage is None else f"{row.coverage:.1%}",
    ]


def _interval(value: Estimate, scale: float) -> str:
    return f"{scale * value.mean:.4g} +- {scale * value.half_width:.2g}"


def _figure(value: float | None) -> str:
    return "?" if value is None else f"{value:.4g}"
