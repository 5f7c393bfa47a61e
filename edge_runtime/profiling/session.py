"""A session of measuring on the real device: its clock, its meter and its heat around what `measuring` does.

What is measured, in which order, and what it comes to, are decided in `measuring`, `cap` and `rows`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from contract.console import Progress, progress, say
from contract.errors import UsageError
from edge_runtime.meters import Powers, PowerTrace, Probe, recording
from edge_runtime.profiling.cap import Cap, CapPlan, Held, Where, conclude, hold_splits
from edge_runtime.profiling.measuring import Bench, Candidate, Plan, cool_down, in_drawn_order, measure
from edge_runtime.profiling.rows import Link, Row, make_row
from edge_runtime.profiling.table import MeterFacts, Table, Work, in_points
from edge_runtime.throttle import SlowdownWatch, snapshot
from profiles import Profile


@dataclass(frozen=True)
class Place:
    """Where it is measured: device, labels of the environment, the file system that is read, and the meter there."""

    profile: Profile | None
    environment: dict[str, str]
    root: Path
    found: Probe

    @property
    def no_meter(self) -> str | None:
        """Why energy is unknown; None where something measures it."""
        meter = self.found.meter
        return f"no meter: {meter.note}" if meter.name == "none" else None

    @property
    def link(self) -> Link:
        """What the profile knows of the link."""
        if self.profile is None:
            return Link()
        power = self.profile.power
        return Link(power.sent_j_per_byte, power.received_j_per_byte, power.link_source)

    @property
    def where(self) -> Where:
        meter, name = self.found.meter, None if self.profile is None else self.profile.name
        return Where(name, self.environment, str(self.root), f"{meter.name}: {meter.scope}")

    @property
    def meter_facts(self) -> MeterFacts:
        meter = self.found.meter
        window_s = meter.timing.window_s or None
        return MeterFacts(meter.name, meter.scope, meter.quality, window_s, meter.note, self.found.reasons)


def measure_all(
    candidates: Sequence[Candidate], plan: Plan, work: Work, place: Place, keep: Callable[[Table], None]
) -> Table:
    """Measure every split point; `keep` is given the table as it grows. Raises: whatever the work raises."""
    status = "no profile fits this device" if place.profile is None else place.profile.status
    name = None if place.profile is None else place.profile.name
    table = Table(work, name, status, place.environment, str(place.root), place.meter_facts, plan, len(candidates), ())
    seconds = plan.seconds(len(candidates), len(candidates[0].phase_names))
    say(f"{in_points(len(candidates))} in an order drawn from seed {plan.seed}, about {in_minutes(seconds)}")
    began_s = time.monotonic()
    with progress_bar(seconds, "profiling") as advance:
        bench = bench_of(place, advance)
        rest_c = bench.temperature_c()
        for number, candidate in enumerate(in_drawn_order(candidates, plan.seed), start=1):
            if number > 1:
                cool_down(plan.cool_down_s, bench, rest_c)
            with recorded(place) as trace:
                measured = measure(candidate, plan, bench)
            row = make_row(candidate.point, candidate.phase_names, measured, trace, place.no_meter or "", place.link)
            table = replace(table, rows=(*table.rows, row))
            keep(table)
            left_s = (time.monotonic() - began_s) / number * (len(candidates) - number)
            say(f"{in_words(row)}; {number} of {len(candidates)}, about {in_minutes(left_s)} left")
    return table


def find_cap(candidates: Sequence[Candidate], plan: CapPlan, place: Place) -> Cap:
    """Hold ever deeper splits. Raises: UsageError where nothing would tell that the device cannot take them."""
    seconds = len(candidates) * plan.hold_s
    say(f"{in_points(len(candidates))} from the shallowest on, at most {in_minutes(seconds)} and the cooling down")
    with progress_bar(seconds, "holding") as advance, recorded(place) as trace:
        bench = bench_of(place, advance)
        refuse_blindness(place, plan, bench)

        def powers(began_s: float, ended_s: float) -> Powers | None:
            time.sleep(place.found.meter.settle_s)
            return None if trace is None else trace.powers(began_s, ended_s)

        held: list[Held] = hold_splits(candidates, plan, bench, powers)
    return conclude(held, plan, place.where, place.no_meter)


def refuse_blindness(place: Place, plan: CapPlan, bench: Bench) -> None:
    """Raises: UsageError where neither throttling nor a limit of the temperature can be seen."""
    counts_events = bool(snapshot(place.root).counted)
    if not counts_events and (plan.limit_c is None or bench.temperature_c() is None):
        raise UsageError(
            "nothing here tells whether the device slows down: no throttling counter, and no temperature with a limit",
            "give --limit-c on a device that shows its temperature under /sys/class/thermal",
        )


def bench_of(place: Place, advance: Callable[[float], object]) -> Bench:
    """The real device."""
    watching: list[SlowdownWatch] = []

    def watch() -> Callable[[], tuple[str, ...]]:
        watching[:] = [SlowdownWatch(place.root)]
        now = watching[0]
        return lambda: tuple(f"{flag.name}: {flag.words}" for flag in now.flags())

    def look() -> None:
        for each in watching:
            each.look()

    return Bench(time.monotonic, time.sleep, lambda: snapshot(place.root).hottest_c, watch, advance, look)


@contextmanager
def recorded(place: Place) -> Iterator[PowerTrace | None]:
    """The trace of what happens meanwhile, complete at the end; None where nothing measures."""
    if place.no_meter:
        yield None
        return
    with recording(place.found.meter) as trace:
        yield trace
        time.sleep(place.found.meter.settle_s)


@contextmanager
def progress_bar(seconds: float, description: str) -> Iterator[Callable[[float], None]]:
    """A bar over planned seconds, moved by whole ones."""
    done_s = [0.0]
    bar: Progress[None] = progress(total=round(seconds), description=description, unit="s of the plan")
    with bar:

        def advance(more_s: float) -> None:
            before_s, done_s[0] = done_s[0], done_s[0] + more_s
            bar.update(int(done_s[0]) - int(before_s))

        yield advance


def in_words(row: Row) -> str:
    """One line of a row."""
    energy = "energy unknown" if row.energy is None else f"{1e3 * row.energy.measured_j.mean:.4g} mJ"
    return f"split {row.point.split}: {1e3 * row.seconds_per_image.mean:.4g} ms and {energy} per image"


def in_minutes(seconds: float) -> str:
    """So long, for a person."""
    return f"{seconds:.0f} s" if seconds < 90.0 else f"{seconds / 60.0:.0f} minutes"
