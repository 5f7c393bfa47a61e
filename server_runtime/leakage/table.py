"""The table that leakage-profile writes: its document, what is kept between its rows, and how it looks to a person.

Figures come from `profiler`, curves and thresholds from `curve`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from contract.canonical import CanonicalError, decode, decode_document, encode, from_json, to_json
from contract.errors import ConfigError, UsageError

from ..files import write_atomic
from .metrics import Figures

KIND = "leakage-profile"
TABLE_BYTES_MAX = 64 << 20


@dataclass(frozen=True)
class Settings:
    """What a table depends on besides the package; rows of other settings are never mixed in."""

    package_digest: str
    public_digest: str  # of the names and sizes of the public files
    attacks: tuple[str, ...]
    strengths: tuple[float, ...]
    alpha: float
    images: int
    learn_images: int
    steps: int | None
    seed: int


@dataclass(frozen=True)
class Attacked:
    """What one attack read. `right`: of how many of its pictures the classifier told the class, None without one."""

    attack: str
    figures: Figures
    right: int | None
    time_s: float


@dataclass(frozen=True)
class Row:
    """One split at one strength of noise. `protected` False: sent in full, without noise on weights or tokens."""

    split: int
    strength: float
    protected: bool
    images: int
    learnt_from: int
    attacks: tuple[Attacked, ...]


@dataclass(frozen=True)
class Baselines:
    """The same figures for guesses that see nothing of the picture: the public mean colour, and another picture."""

    mean_colour: Figures
    unrelated: Figures
    chance_right: float | None  # 1 / classes


@dataclass(frozen=True)
class Point:
    """The strongest attack's figures on the fine grid, levelled and interpolated."""

    split: int
    strength: float
    psnr_db: float
    ssim: float
    fsim: float


@dataclass(frozen=True)
class Threshold:
    """T_FSIM with its reason, and the accuracy of the classifier that found it on the pictures themselves."""

    fsim: float | None
    reason: str
    classes: int | None
    classifier_accuracy: float | None


@dataclass(frozen=True)
class Enough:
    """T_sigma: the least noise of a split whose FSIM is at most T_FSIM; None where none is, or T_FSIM is unknown."""

    split: int
    strength: float | None


@dataclass(frozen=True)
class Table:
    """The whole document; `attacks_s` is the time of all attacks, over all runs that it took."""

    package: str
    model: str
    unit: Literal["kappa", "sigma"]
    settings: Settings
    lpips_unknown: str  # why LPIPS is null; empty where it is not
    baselines: Baselines
    threshold: Threshold
    rows: tuple[Row, ...]
    curve: tuple[Point, ...]
    least_noise: tuple[Enough, ...]
    attacks_s: float


@dataclass(frozen=True)
class _Kept:
    """Rows that are done, between the first and the last."""

    settings: Settings
    rows: tuple[Row, ...]


def to_document(table: Table) -> dict[str, object]:
    """The JSON document."""
    return {"schema_version": 1, "kind": KIND, **encode(table)}


def write_table(path: Path, table: Table) -> None:
    """Whole or not at all."""
    write_atomic(path, to_json(to_document(table)) + b"\n")


def read_table(path: Path) -> Table:
    """A table that leakage-profile wrote. Raises: ConfigError."""
    try:
        return decode_document(Table, _head(path), TABLE_BYTES_MAX, KIND)
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
        raise UsageError(f"{path}, rows of an earlier run, cannot be read: {error}", cure) from error
    if kept.settings != settings:
        mine, its = encode(settings), encode(kept.settings)
        other = ", ".join(name for name in mine if mine[name] != its[name])
        raise UsageError(f"{path} has rows of an earlier run with other settings ({other})", cure)
    return kept.rows


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(TABLE_BYTES_MAX + 1)


def strongest(row: Row) -> Figures:
    """For each figure the attack that reads most."""
    figures = [each.figures for each in row.attacks]
    return Figures(
        max(each.psnr_db for each in figures),
        max(each.ssim for each in figures),
        max(each.fsim for each in figures),
        min((each.lpips for each in figures if each.lpips is not None), default=None),
    )


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
