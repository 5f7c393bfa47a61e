"""What a measured split point cost: figures with intervals, from moments and a trace of power. Pure.

Energy of one image has three parts. Computing is what the work took beyond idling, net and never clamped: below 0 it
says that the difference is smaller than what can be measured. Idle is what the device takes anyway in that time.
Communication is modelled, as bytes times the joules per byte of the profile, and unknown without that figure. Their
sum is unknown where a part is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from edge_runtime.meters import PowerTrace
from edge_runtime.profiling.measuring import Block, Measured, Point

BLOCKS_LEAST = 5  # below, an interval says nothing
IDLE_DRIFT = 0.05  # between the baselines before and after; more is thermal drift
AWAY_PARTS = ("upload", "wait", "download")
QUANTILES = 20  # steps of the distribution of power

# Student's t at 97.5 % for 1 to 30 degrees of freedom; beyond, the last one, which is a little too wide.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


T = TypeVar("T")


@dataclass(frozen=True)
class Estimate:
    """Mean over blocks, and half the width of its 95 % t-interval."""

    mean: float
    half_width: float
    blocks: int


@dataclass(frozen=True)
class PhaseCost:
    """One phase per image. Energy is measured where the phase is run alone, else the difference of two measured."""

    name: str
    seconds: Estimate
    compute_j: Estimate | None


@dataclass(frozen=True)
class PowerFacts:
    """Power while the whole of the work was repeated; a peak over `peak_window_s` is no peak over less."""

    mean_w: float
    peak_w: float
    peak_window_s: float
    quantiles_w: tuple[float, ...]  # from the lowest to the highest, equally likely steps apart


@dataclass(frozen=True)
class Energy:
    """Of one image. `measured_j` = `compute_j` + `idle_j`; `bound_j` is the meter's own bound of its error."""

    measured_j: Estimate
    compute_j: Estimate
    idle_j: float
    bound_j: float | None
    idle_before_w: float
    idle_after_w: float
    power: PowerFacts | None


@dataclass(frozen=True)
class AwayPart:
    """A part of the time away, per image. `energy_j` is all that the device took in it; None: unknown."""

    name: str  # one of `AWAY_PARTS`
    seconds: float
    energy_j: float | None
    bound_j: float | None


@dataclass(frozen=True)
class Away:
    """Of one image in a real run: from a batch's answer to the next ask, in whole and in its three parts.

    Upload ends when the server has the answer, download begins with the first byte of the ask. `energy_j` is all that
    the device took in the whole time; None when unknown, and then `reason` says why.
    """

    run: str
    images: int
    seconds: float
    energy_j: float | None
    bound_j: float | None
    reason: str | None
    parts: tuple[AwayPart, ...]


@dataclass(frozen=True)
class Row:
    """One split point. What is None is unknown, and a reason says why."""

    point: Point
    seconds_per_image: Estimate
    phases: tuple[PhaseCost, ...]
    energy: Energy | None
    energy_reason: str | None
    communication_j: float | None
    communication_reason: str  # measured, modelled, or why it is unknown
    away: Away | None  # None: no real run was joined
    total_j: float | None
    coverage: float | None  # of the time of all blocks, the least
    warm_up_s: float
    temperature_start_c: float | None
    temperature_end_c: float | None
    throttled: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Link:
    """Joules per byte that a profile gives; None: it gives none."""

    sent_j_per_byte: float | None = None
    received_j_per_byte: float | None = None
    source: str | None = None


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and interval of two values or more."""
    count = len(values)
    mean = math.fsum(values) / count
    deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in values) / (count - 1))
    return Estimate(mean, _T[min(count - 1, len(_T)) - 1] * deviation / math.sqrt(count), count)


def make_row(
    point: Point, phase_names: Sequence[str], measured: Measured, trace: PowerTrace | None, no_meter: str, link: Link
) -> Row:
    """The figures of one split point; `no_meter` says why there is no trace."""
    columns = list(zip(*measured.rounds, strict=True))  # of each phase, its blocks
    counted = _Counted(None, None, None, no_meter) if trace is None else _count(measured, columns, trace)
    net_j = counted.net_j(columns)
    phases = tuple(
        PhaseCost(
            name,
            estimate(_differences(columns, number, lambda block: block.seconds_per_image)),
            None if net_j is None else estimate(_differences(net_j, number, lambda each_j: each_j)),
        )
        for number, name in enumerate(phase_names)
    )
    seconds = estimate([block.seconds_per_image for block in columns[-1]])
    energy = None
    if net_j is not None and counted.idle_w is not None and trace is not None:
        energy = _energy(net_j[-1], columns[-1], seconds, counted.idle_w, trace)
    communication_j, communication_reason = communication(point, link)
    total_j = None if energy is None or communication_j is None else energy.measured_j.mean + communication_j
    return Row(
        point, seconds, phases, energy, counted.reason, communication_j, communication_reason, None, total_j,
        counted.coverage, measured.warm_up_s, *measured.temperatures_c, measured.throttled,
        tuple(_notes(measured, counted.idle_w)),
    )  # fmt: skip


def communication(point: Point, link: Link) -> tuple[float | None, str]:
    """Modelled joules of one image's bytes, and how they were come by or why they are unknown."""
    total_j = 0.0
    for what, count, each_j in (
        ("sent", point.sent_bytes_per_image, link.sent_j_per_byte),
        ("received", point.received_bytes_per_image, link.received_j_per_byte),
    ):
        if count and each_j is None:
            return None, f"no link was measured, and the profile gives no joules per byte {what}"
        total_j += count * (each_j or 0.0)
    return total_j, f"modelled, no link was measured: bytes times joules per byte ({link.source})"


@dataclass(frozen=True)
class _Counted:
    """What the meter told: joules of each phase's blocks, idle watts before and after, the least coverage.

    `gross_j` None: unknown, and `reason` says why; with a figure it says that a part is missing.
    """

    gross_j: list[list[float]] | None
    idle_w: tuple[float, float] | None
    coverage: float | None
    reason: str | None

    def net_j(self, columns: Sequence[Sequence[Block]]) -> list[list[float]] | None:
        """Joules per image beyond idling."""
        if self.gross_j is None or self.idle_w is None:
            return None
        mean_w = sum(self.idle_w) / 2.0
        return [
            [joules / block.images - mean_w * block.seconds_per_image for joules, block in zip(*pair, strict=True)]
            for pair in zip(self.gross_j, columns, strict=True)
        ]


def _count(measured: Measured, columns: Sequence[Sequence[Block]], trace: PowerTrace) -> _Counted:
    idle_w = []
    for began_s, ended_s in (measured.before_s, measured.after_s):
        window = trace.energy_between(began_s, ended_s)
        if window.energy_j is None:
            return _Counted(None, None, window.coverage, f"idle baseline: {window.reason}")
        idle_w.append(window.energy_j / (ended_s - began_s) / window.coverage)
    windows = [[trace.energy_of_repeats(list(block.marks_s)) for block in blocks] for blocks in columns]
    each = [window for column in windows for window in column]
    coverage = min(window.coverage for window in each)
    reason = next((window.reason for window in each if window.energy_j is None or window.coverage == coverage), None)
    gross_j = [[window.energy_j for window in column if window.energy_j is not None] for column in windows]
    is_whole = sum(map(len, gross_j)) == len(each)
    return _Counted(gross_j if is_whole else None, (idle_w[0], idle_w[1]), coverage, reason)


def _energy(
    net_j: Sequence[float],
    blocks: Sequence[Block],
    seconds: Estimate,
    idle_w: tuple[float, float],
    trace: PowerTrace,
) -> Energy:
    mean_w = sum(idle_w) / 2.0
    gross_j = [net + mean_w * block.seconds_per_image for net, block in zip(net_j, blocks, strict=True)]
    bounds_j = [trace.energy_of_repeats(list(block.marks_s)).bound_j for block in blocks]
    known_j = [bound / block.images for bound, block in zip(bounds_j, blocks, strict=True) if bound is not None]
    return Energy(
        estimate(gross_j), estimate(net_j), mean_w * seconds.mean,
        max(known_j) if len(known_j) == len(blocks) else None, *idle_w, _power(blocks, trace),
    )  # fmt: skip


def _power(blocks: Sequence[Block], trace: PowerTrace) -> PowerFacts | None:
    """Over all blocks; None where no sample fell into one."""
    found = [trace.powers(block.marks_s[0], block.marks_s[-1]) for block in blocks]
    known = [(each.mean_w, each.peak_w, each.peak_window_s) for each in found if each.samples]
    if not known or any(each is None for facts in known for each in facts):
        return None
    shown_w = sorted(watts for block in blocks for _, watts in trace.samples(block.marks_s[0], block.marks_s[-1]))
    if not shown_w:
        return None
    steps = [round(step * (len(shown_w) - 1) / QUANTILES) for step in range(QUANTILES + 1)]
    peak = max(known, key=lambda facts: facts[1] or 0.0)
    mean_w = math.fsum(facts[0] or 0.0 for facts in known) / len(known)
    return PowerFacts(mean_w, peak[1] or 0.0, peak[2] or 0.0, tuple(shown_w[step] for step in steps))


def _differences(columns: Sequence[Sequence[T]], number: int, value: Callable[[T], float]) -> list[float]:
    """What a phase adds to the one before it, round by round."""
    own = [value(each) for each in columns[number]]
    if number == 0:
        return own
    return [mine - value(other) for mine, other in zip(own, columns[number - 1], strict=True)]


def _notes(measured: Measured, idle_w: tuple[float, float] | None) -> list[str]:
    notes = []
    if not measured.is_steady:
        notes.append(f"no three blocks agreed within 2 % in {measured.warm_up_s:.0f} s of warm-up")
    if idle_w is not None and abs(idle_w[1] - idle_w[0]) > IDLE_DRIFT * max(map(abs, idle_w)):
        notes.append(f"idle power went from {idle_w[0]:.2f} to {idle_w[1]:.2f} W: let it cool down longer")
    return notes
