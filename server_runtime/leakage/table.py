"""The table that leakage-profile writes: its file, what is kept between its rows, and how it looks to a person.

What it consists of is `contract.leakage`'s, since packages carry it; figures come from `profiler`, curves and
thresholds from `curve`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from contract.canonical import CanonicalError, decode, encode, from_json, to_json
from contract.errors import ConfigError, UsageError, why
from contract.leakage import (
    TABLE_BYTES_MAX,
    Attacked,
    Baselines,
    Enough,
    Figures,
    Point,
    Row,
    Settings,
    Table,
    Threshold,
    from_bytes,
    strongest,
    to_bytes,
    to_document,
)

from ..files import write_atomic

__all__ = [
    "Attacked", "Baselines", "Enough", "Point", "Row", "Settings", "Table", "Threshold", "keep_rows", "kept_path",
    "read_rows", "read_table", "strongest", "to_document", "to_text", "write_table",
]  # fmt: skip


@dataclass(frozen=True)
class _Kept:
    """Rows that are done, between the first and the last."""

    settings: Settings
    rows: tuple[Row, ...]


def write_table(path: Path, table: Table) -> None:
    """Whole or not at all."""
    write_atomic(path, to_bytes(table))


def read_table(path: Path) -> Table:
    """A table that leakage-profile wrote. Raises: ConfigError."""
    try:
        return from_bytes(_head(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", "correct the path") from error
    except CanonicalError as error:
        raise ConfigError(f"{path} is no table of this leakage-profile: {error}", "measure again with -o") from error


def kept_path(output: Path) -> Path:
    """Where rows wait while the table is not whole."""
    return output.with_name(output.name + ".rows")


def keep_rows(output: Path, settings: Settings, rows: Sequence[Row]) -> None:
    """Write what is done so far."""
    write_atomic(kept_path(output), to_json(encode(_Kept(settings, tuple(rows)))))


def read_rows(output: Path, settings: Settings) -> tuple[Row, ...]:
    """Rows of an earlier run that stopped. Raises: UsageError when they were measured with other settings."""
    path = kept_path(output)
    cure = f"give the same package, public images and flags again, or remove {path} to begin anew"
    try:
        kept = decode(_Kept, from_json(_head(path), TABLE_BYTES_MAX))
    except FileNotFoundError:
        return ()
    except (OSError, CanonicalError) as error:
        raise UsageError(f"{path}, rows of an earlier run, cannot be read: {why(error, path)}", cure) from error
    if kept.settings != settings:
        mine, its = encode(settings), encode(kept.settings)
        other = ", ".join(name for name in mine if mine[name] != its[name])
        raise UsageError(f"{path} has rows of an earlier run with other settings ({other})", cure)
    return kept.rows


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(TABLE_BYTES_MAX + 1)


def to_text(table: Table) -> str:
    """For a person on a terminal."""
    settings, base = table.settings, table.baselines
    head = ["split", table.unit, "attack", "PSNR dB", "SSIM", "FSIM", "LPIPS", "class told", "s"]
    lines = [head]
    for row in table.rows:
        strength = f"{row.strength:g}" if row.protected else "unprotected"
        for each in row.attacks:
            told = None if each.right is None else f"{100 * each.right / row.images:.1f} %"
            lines.append(
                [str(row.split), strength, each.attack, *_cells(each.figures), told or "?", f"{each.time_s:.0f}"]
            )
    chance = "?" if base.chance_right is None else f"{100 * base.chance_right:.1f} %"
    lines.append(["-", "-", "mean colour", *_cells(base.mean_colour), chance, ""])
    lines.append(["-", "-", "unrelated image", *_cells(base.unrelated), chance, ""])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    threshold = table.threshold
    found = "unknown" if threshold.fsim is None else f"{threshold.fsim:.3f}"
    remarks = [f"T_FSIM {found}: {threshold.reason}"]
    if threshold.classifier_accuracy is not None:
        remarks.append(f"the classifier tells {100 * threshold.classifier_accuracy:.1f} % of the true pictures")
    if threshold.fsim is not None:
        for least in table.least_noise:
            enough = "none measured is enough" if least.strength is None else f"{table.unit} {least.strength:g}"
            remarks.append(f"least noise at split {least.split}: {enough}")
    if table.lpips_unknown:
        remarks.append(f"LPIPS is unknown: {table.lpips_unknown}")
    first = table.rows[0]
    facts = (
        f"{table.package} ({table.model}): {first.images} images attacked, {first.learnt_from} learnt from, "
        f"weight noise {settings.alpha:g}, seed {settings.seed}, {table.attacks_s:.0f} s of attacks"
    )
    return "\n".join([facts, "", *text, "", *remarks]) + "\n"


def _cells(figures: Figures) -> list[str]:
    def shown(value: float | None) -> str:
        return "?" if value is None else f"{value:.3f}"

    return [f"{figures.psnr_db:.2f}", shown(figures.ssim), shown(figures.fsim), shown(figures.lpips)]
