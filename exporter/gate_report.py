"""How the outcome of a leakage-gated export is told: its document, its table for people, and the refusal.

What is in it was decided before, in exporter.gate_choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from contract.canonical import encode
from contract.errors import LimitsError
from contract.leakage import Baselines
from exporter.gate_choice import Judged, Limit, Point, nearest

GATE_NAME = "gate.json"
KIND = "leakage-gate"


@dataclass(frozen=True)
class Skipped:
    """A candidate that the export itself refused at every strength."""

    name: str
    reason: str


@dataclass(frozen=True)
class Outcome:
    """Every point that was measured, with what was chosen; None: nothing was within the limits.

    `baselines` are of guesses that see no token; `threads` those that the engine was timed with, on this machine.
    """

    limits: tuple[Limit, ...]
    max_energy_j: float | None
    attacks: tuple[str, ...]
    steps: int | None
    points: tuple[Judged, ...]
    chosen: Point | None
    skipped: tuple[Skipped, ...]
    baselines: Baselines | None
    threads: int
    total_s: float


def to_document(outcome: Outcome) -> dict[str, object]:
    """The JSON document."""
    return {"schema_version": 1, "kind": KIND, **encode(outcome)}


def to_text(outcome: Outcome) -> str:
    """For a person on a terminal."""
    head = [
        "",
        "split",
        "precision",
        "sent",
        "kappa",
        "top-1",
        "SSIM",
        "PSNR dB",
        "FSIM",
        "bare SSIM",
        "J",
        "bytes",
        "ms",
        "within",
    ]
    lines = [head, *(_cells(each, outcome.chosen) for each in outcome.points)]
    if outcome.baselines is not None:
        for name, each in (("mean colour", outcome.baselines.mean_colour), ("unrelated", outcome.baselines.unrelated)):
            leaks = [f"{each.ssim:.3f}", f"{each.psnr_db:.2f}", f"{each.fsim:.3f}", "-"]
            lines.append(["", "-", name, "-", "-", "-", *leaks, "-", "-", "-", "-"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    limits = ", ".join(map(str, outcome.limits))
    if outcome.max_energy_j is not None:
        limits += f", energy at most {outcome.max_energy_j:g} J"
    steps = "their own number of" if outcome.steps is None else f"{outcome.steps}"
    remarks = [
        f"limits {limits}; the strongest of {', '.join(outcome.attacks)} ({steps} steps)",
        "* chosen, + no other point beats it; top-1 with weight and feature noise on held-out public images; "
        f"ms an image on this machine, {outcome.threads} threads; bare: without noise, all patches sent",
        *_energy_remarks(outcome.points),
        *(f"left out: {each.name}: {each.reason}" for each in outcome.skipped),
    ]
    return "\n".join([*(line.rstrip() for line in text), "", *remarks]) + "\n"


def _cells(judged: Judged, chosen: Point | None) -> list[str]:
    point = judged.point
    leaks, bare, energy = point.leakage, point.unprotected, point.energy
    joules = "?" if energy.joules is None else f"{energy.joules:.3g}" + ("~" if energy.kind == "modelled" else "")
    marks = ("*" if point == chosen else " ") + ("+" if judged.on_front else " ")
    return [
        marks, str(point.split), point.precision, point.sent, f"{point.kappa:g}",
        "?" if point.accuracy is None else f"{point.accuracy:.1%}",
        f"{leaks.ssim:.3f}", f"{leaks.psnr_db:.2f}", f"{leaks.fsim:.3f}", "?" if bare is None else f"{bare.ssim:.3f}",
        joules, str(point.sent_bytes), f"{point.ms:.2f}", "no" if judged.faults else "yes",
    ]  # fmt: skip


def _energy_remarks(points: Sequence[Judged]) -> list[str]:
    """Whence the joules, or why they are unknown, each once."""
    found = [each.point.energy for each in points]
    remarks = []
    for kind, sign in (("measured", "J"), ("modelled", "J with ~"), ("unknown", "J of ?")):
        sources = dict.fromkeys(each.source for each in found if each.kind == kind)
        remarks += [f"{sign}: {kind}: {source}" for source in sources]
    return remarks


def refusal(outcome: Outcome) -> LimitsError:
    """What to say when nothing is within the limits."""
    closest, count = nearest(outcome.points), len(outcome.points)
    cause = f"none of {count} points is within the limits, nothing was written"
    if closest is not None:
        cause += f"; nearest is {closest.point.name}: {'; '.join(closest.faults)}"
    blind = [
        f"{limit} (the mean colour alone has {limit.of(outcome.baselines.mean_colour):.3f})"
        for limit in outcome.limits
        if outcome.baselines is not None and not limit.of(outcome.baselines.mean_colour) < limit.below
    ]
    if blind:
        return LimitsError(cause, f"no protection can reach {', '.join(blind)}: set a limit above that")
    return LimitsError(
        cause, "raise --kappa-max, leave cut, precision or patches open, choose deeper --cuts, or loosen a limit"
    )
