"""What a leakage table must hold to be one: figures in their ranges, every row it claims, curves that never rise. Pure.

Whether its curves follow from its rows is left to `server_runtime.leakage.check`, which draws them anew; how the table
is read, and which package it is of, to `leakage`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contract.leakage import Figures, Row, Settings, Table

_ROUNDING = 1e-6
_PSNR_MOST_DB = 200.0
_DIGEST = re.compile(r"[0-9a-f]{64}")


def faults(table: Table) -> Iterator[str]:
    """Where it contradicts itself or what a figure can be, each in words; none: it may be one."""
    yield from _of_settings(table.settings)
    yield from _of_rows(table)
    yield from _of_curves(table)
    for name, each in (("mean colour", table.baselines.mean_colour), ("unrelated", table.baselines.unrelated)):
        yield from _of_figures(f"baseline {name}", each)
        yield from _of_lpips(f"baseline {name}", each, table.lpips_unknown)
    threshold, chance = table.threshold, table.baselines.chance_right
    yield from _outside("baselines: chance_right", chance, 0.0, 0.5)
    yield from _outside("threshold: fsim", threshold.fsim, 0.0, 1.0)
    yield from _outside("threshold: classes", threshold.classes, 2)
    yield from _outside("threshold: classifier_accuracy", threshold.classifier_accuracy, 0.0, 1.0)
    yield from _outside("attacks_s", table.attacks_s, 0.0)


def _of_settings(settings: Settings) -> Iterator[str]:
    for name in ("package_digest", "public_digest"):
        if not _DIGEST.fullmatch(getattr(settings, name)):
            yield f"settings: {name} should be 64 digits of hex, found {getattr(settings, name)[:80]!r}"
    for name, lowest in (("images", 1), ("learn_images", 1), ("steps", 1), ("seed", 0)):
        yield from _outside(f"settings: {name}", getattr(settings, name), lowest)
    yield from _outside("settings: alpha", settings.alpha, 0.0, 1.0)
    if not settings.attacks or len(set(settings.attacks)) < len(settings.attacks):
        yield f"settings: attacks should be one or more, each once, found {', '.join(settings.attacks) or 'none'}"
    strengths = settings.strengths
    if not strengths or strengths[0] < 0 or any(later <= earlier for earlier, later in pairwise(strengths)):
        yield f"settings: strengths should be 0 or more and rise, found {_listed(strengths)}"


def _of_rows(table: Table) -> Iterator[str]:
    settings = table.settings
    unprotected: list[float] = []
    found: dict[int, list[float]] = {}
    for row in table.rows:
        (found.setdefault(row.split, []) if row.protected else unprotected).append(
            row.strength if row.protected else row.split
        )
        yield from _of_row(row, settings, table.lpips_unknown)
    if not found:
        yield "rows: there is none of a protected split"
    for split, strengths in found.items():
        yield from _outside("rows: split", split, 1)
        if sorted(strengths) != list(settings.strengths):
            yield (
                f"rows: split {split} should have one of each strength {_listed(settings.strengths)}, "
                f"found {_listed(sorted(strengths))}"
            )
    if len(set(unprotected)) < len(unprotected) or not set(unprotected) <= found.keys():
        yield f"rows: without protection there should be one of a split at most, found {_listed(unprotected)}"


def _of_row(row: Row, settings: Settings, lpips_unknown: str) -> Iterator[str]:
    place = f"split {row.split}, noise {row.strength:g}{'' if row.protected else ', unprotected'}"
    if not row.protected and row.strength:
        yield f"{place}: a row without protection has noise 0"
    if tuple(each.attack for each in row.attacks) != settings.attacks:
        yield f"{place}: attacks should be {', '.join(settings.attacks)}, found those of other settings"
    yield from _outside(f"{place}: images", row.images, 1, settings.images)
    yield from _outside(f"{place}: learnt_from", row.learnt_from, 1, settings.learn_images)
    for each in row.attacks:
        yield from _of_figures(f"{place}, {each.attack}", each.figures)
        yield from _of_lpips(f"{place}, {each.attack}", each.figures, lpips_unknown)
        yield from _outside(f"{place}, {each.attack}: right", each.right, 0, row.images)
        yield from _outside(f"{place}, {each.attack}: time_s", each.time_s, 0.0)


def _of_figures(place: str, figures: Figures) -> Iterator[str]:
    yield from _outside(f"{place}: psnr_db", figures.psnr_db, 0.0, _PSNR_MOST_DB)
    yield from _outside(f"{place}: ssim", figures.ssim, -1.0, 1.0)
    yield from _outside(f"{place}: fsim", figures.fsim, 0.0, 1.0)
    yield from _outside(f"{place}: lpips", figures.lpips, 0.0)


def _of_lpips(place: str, figures: Figures, unknown: str) -> Iterator[str]:
    if (figures.lpips is None) != bool(unknown):
        yield f"{place}: lpips is {'missing' if figures.lpips is None else 'there'}, and lpips_unknown says otherwise"


def _of_curves(table: Table) -> Iterator[str]:
    splits = {row.split for row in table.rows if row.protected}
    for what, found in (("curve", {each.split for each in table.curve}),
                        ("least_noise", {each.split for each in table.least_noise})):  # fmt: skip
        if found != splits:
            yield f"{what}: should be of splits {_listed(sorted(splits))}, found {_listed(sorted(found))}"
    for earlier, later in pairwise(table.curve):
        if earlier.split != later.split:
            continue
        place = f"curve: split {later.split}, noise {later.strength:g}"
        if not later.strength > earlier.strength:
            yield f"{place}: the noise should rise from point to point"
        for name in ("psnr_db", "ssim", "fsim"):
            before, after = getattr(earlier, name), getattr(later, name)
            if after > before + _ROUNDING:
                yield f"{place}: {name} rises from {before:g} to {after:g} under more noise"
    for each in table.least_noise:
        yield from _outside(f"least_noise: split {each.split}", each.strength, 0.0)


def _outside(what: str, value: float | None, lowest: float, highest: float = float("inf")) -> Iterator[str]:
    """A fault where a known value is not within these bounds."""
    if value is not None and not lowest - _ROUNDING <= value <= highest + _ROUNDING:
        wanted = f"{lowest:g} or more" if highest == float("inf") else f"{lowest:g} to {highest:g}"
        yield f"{what} should be {wanted}, found {value:g}"


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{each:g}" for each in values) or "none"
