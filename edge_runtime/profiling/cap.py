"""How much a device can take for long: splits ever deeper, each held for minutes, until it slows down or gets too hot.

It decides when to stop and what that says; clock, heat and work are handed in, as in `measuring`. A cap holds for the
environment that it was found in (ambient temperature, fan, power mode), and for no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from edge_runtime.meters import Powers
from edge_runtime.profiling.measuring import Bench, Candidate, cool_down, run_block

KIND = "edge-profile-cap"
Outcome = Literal["held", "throttled", "too hot"]


@dataclass(frozen=True)
class CapPlan:
    """Each split is repeated for `hold_s`, looked after every `block_s`; `limit_c` None: throttling alone ends it."""

    block_s: float
    hold_s: float
    cool_down_s: float
    limit_c: float | None


@dataclass(frozen=True)
class Held:
    """What one split did to the device; watts None where nothing measures them."""

    model: str
    split: int
    outcome: Outcome
    seconds: float
    temperature_end_c: float | None
    throttled: tuple[str, ...]
    mean_w: float | None
    peak_w: float | None
    peak_window_s: float | None
    seconds_per_image: float


@dataclass(frozen=True)
class Where:
    """The device and its environment; `root` is the file system that was read, "/" on the device itself."""

    profile: str | None
    environment: dict[str, str]
    root: str
    meter: str


@dataclass(frozen=True)
class Cap:
    """`p_max_w` is the highest peak of the splits that were held: what a split may take here.

    Where no split failed, the device can take more than what was tried: `is_reached` is False, and the figure a least.
    """

    where: Where
    plan: CapPlan
    is_reached: bool
    deepest_safe_split: int | None
    p_max_w: float | None
    p_max_reason: str | None
    splits: tuple[Held, ...]


def hold_splits(
    candidates: Sequence[Candidate], plan: CapPlan, bench: Bench, powers: Callable[[float, float], Powers | None]
) -> list[Held]:
    """From the shallowest split on, until one does not hold. `powers` tells of the time between two moments."""
    held: list[Held] = []
    rest_c = bench.temperature_c()
    for candidate in sorted(candidates, key=lambda each: each.point.split):
        if held:
            cool_down(plan.cool_down_s, bench, rest_c)
        held.append(hold(candidate, plan, bench, powers))
        if held[-1].outcome != "held":
            break
    return held


def hold(candidate: Candidate, plan: CapPlan, bench: Bench, powers: Callable[[float, float], Powers | None]) -> Held:
    """Repeat the whole work of one split until the time is over or the device cannot take it."""
    phase = candidate.open()[-1]
    outcome: Outcome = "held"
    slowed, began_s = bench.watch(), bench.clock()
    throttled: tuple[str, ...] = ()
    images, found_c = 0, None
    while outcome == "held" and bench.clock() - began_s < plan.hold_s:
        images += run_block(phase, plan.block_s, bench).images
        bench.advance(plan.block_s)
        throttled, found_c = slowed(), bench.temperature_c()
        if throttled:
            outcome = "throttled"
        elif plan.limit_c is not None and found_c is not None and found_c >= plan.limit_c:
            outcome = "too hot"
    ended_s = bench.clock()
    seen = powers(began_s, ended_s)
    return Held(
        candidate.point.model, candidate.point.split, outcome, ended_s - began_s, found_c, throttled,
        *((None, None, None) if seen is None else (seen.mean_w, seen.peak_w, seen.peak_window_s)),
        (ended_s - began_s) / images,
    )  # fmt: skip


def conclude(held: Sequence[Held], plan: CapPlan, where: Where, no_meter: str | None) -> Cap:
    """What the splits that were tried say of the device."""
    safe = [each for each in held if each.outcome == "held"]
    peaks_w = [each.peak_w for each in safe if each.peak_w is not None]
    p_max_w = max(peaks_w) if peaks_w and len(peaks_w) == len(safe) else None
    is_reached = len(safe) < len(held)
    reason = None
    if p_max_w is None:
        reason = no_meter or ("not even the shallowest split was held" if not safe else "power was not measured")
    elif not is_reached:
        reason = "every split was held: the device can take at least this"
    deepest = max((each.split for each in safe), default=None)
    return Cap(where, plan, is_reached, deepest, p_max_w, reason, tuple(held))


def to_text(cap: Cap) -> str:
    """For a person on a terminal."""
    labels = ", ".join(f"{key}={value}" for key, value in sorted(cap.where.environment.items())) or "no label"
    lines = [f"environment  {labels}", f"meter        {cap.where.meter}"]
    if cap.where.root != "/":
        lines.append(f"             read under {cap.where.root}: not this machine's")
    for each in cap.splits:
        heat = "temperature unknown" if each.temperature_end_c is None else f"{each.temperature_end_c:.1f} C"
        power = "power unknown" if each.peak_w is None else f"{each.mean_w:.2f} W, peak {each.peak_w:.2f} W"
        why = f" ({', '.join(each.throttled)})" if each.throttled else ""
        lines.append(f"split {each.split}: {each.outcome}{why} after {each.seconds:.0f} s, {heat}, {power}")
    deepest = "none" if cap.deepest_safe_split is None else str(cap.deepest_safe_split)
    p_max = "unknown" if cap.p_max_w is None else f"{cap.p_max_w:.2f} W"
    lines.append(f"deepest safe split: {deepest}; P_max: {p_max}{f' ({cap.p_max_reason})' if cap.p_max_reason else ''}")
    return "\n".join(lines) + "\n"
