"""How split points are measured: what is run when and for how long, on a clock and with work that are handed in.

It notes moments only. What a meter says of the time between them, and what that means, is left to `rows`;
opening packages to `frontends` and `parts`.

One split point (devices.md 2.1): the model is opened; idle baseline; warm-up until three blocks in a row agree within
2 %, or a time limit; rounds of blocks, each repeating one phase back to back; idle baseline again. Before the next one
the device cools down. The order of split points is drawn, so that a device that gets warmer favours none.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

STEADY_BLOCKS, STEADY_WITHIN = 3, 0.02
WARM_BLOCKS_MOST = 15  # in the time of the warm-up
COOL_WITHIN_C = 1.0

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """How long everything takes. The order of the split points follows from `seed`."""

    blocks: int
    block_s: float
    baseline_s: float
    warm_up_s: float
    cool_down_s: float
    seed: int

    def seconds(self, points: int, phases: int) -> float:
        """About how long all split points take, opening them not counted."""
        each_s = 2 * self.baseline_s + self.warm_up_s / 2 + self.blocks * phases * self.block_s
        return points * each_s + max(points - 1, 0) * self.cool_down_s / 2


@dataclass(frozen=True)
class Point:
    """One split point as it is run: the first `split` of `depth` layers, from which package, on what."""

    model: str
    package: str
    package_digest: str
    split: int
    depth: int
    precision: str
    engine: str
    threads: int
    batch: int  # images of one repetition
    sent_bytes_per_image: int
    received_bytes_per_image: int


@dataclass(frozen=True)
class Phase:
    """A piece of work. `run` does it once and returns for how many images."""

    name: str
    run: Callable[[], int]


@dataclass(frozen=True)
class Candidate:
    """A split point that `open` makes ready; each phase does what the one before it does, and more."""

    point: Point
    phase_names: tuple[str, ...]
    open: Callable[[], Sequence[Phase]]


@dataclass(frozen=True)
class Bench:
    """Where it is measured: a clock, a way to wait, what the device says of its heat, and who is told of progress."""

    clock: Callable[[], float]  # monotonic
    wait: Callable[[float], None]
    temperature_c: Callable[[], float | None]  # the hottest zone; None: unknown
    watch: Callable[[], Callable[[], tuple[str, ...]]]  # begins a watch, whose end names what slowed the device down
    advance: Callable[[float], object]  # so many seconds of the plan are over
    look: Callable[[], object]  # called after each repetition: time to see whether the device slows down


@dataclass(frozen=True)
class Block:
    """Repetitions of one phase back to back: the moments between them, and how many images they were."""

    marks_s: tuple[float, ...]
    images: int

    @property
    def seconds_per_image(self) -> float:
        return (self.marks_s[-1] - self.marks_s[0]) / self.images


@dataclass(frozen=True)
class Measured:
    """What happened at one split point, in moments of the clock; `rounds` hold one block of each phase."""

    before_s: tuple[float, float]  # idle baseline
    after_s: tuple[float, float]
    rounds: tuple[tuple[Block, ...], ...]
    warm_up_s: float
    is_steady: bool
    temperatures_c: tuple[float | None, float | None]
    throttled: tuple[str, ...]


def in_drawn_order(each: Sequence[T], seed: int) -> list[T]:
    """The same in an order that follows from the seed alone."""
    drawn = list(each)
    random.Random(seed).shuffle(drawn)  # noqa: S311 - an order, no secret
    return drawn


def measure(candidate: Candidate, plan: Plan, bench: Bench) -> Measured:
    """Measure one split point. Raises: whatever the work raises."""
    phases = candidate.open()
    before_s = _rest(plan.baseline_s, bench)
    start_c, slowed = bench.temperature_c(), bench.watch()
    warm_up_s, is_steady = _warm_up(phases[-1], plan, bench)
    rounds = []
    for _ in range(plan.blocks):
        blocks = []
        for phase in phases:
            blocks.append(run_block(phase, plan.block_s, bench))
            bench.advance(plan.block_s)
        rounds.append(tuple(blocks))
    throttled, end_c = slowed(), bench.temperature_c()
    after_s = _rest(plan.baseline_s, bench)
    return Measured(before_s, after_s, tuple(rounds), warm_up_s, is_steady, (start_c, end_c), throttled)


def run_block(phase: Phase, seconds: float, bench: Bench) -> Block:
    """Repeat a phase until the time is over, once at least."""
    marks_s, images = [bench.clock()], 0
    while len(marks_s) == 1 or marks_s[-1] - marks_s[0] < seconds:
        images += phase.run()
        marks_s.append(bench.clock())
        bench.look()
    return Block(tuple(marks_s), images)


def cool_down(most_s: float, bench: Bench, rest_c: float | None) -> float:
    """Wait until the device is about as cool as `rest_c`, or for the whole time; how long it took, in seconds."""
    began_s = bench.clock()
    while bench.clock() - began_s < most_s:
        found_c = bench.temperature_c()
        if rest_c is not None and found_c is not None and found_c <= rest_c + COOL_WITHIN_C:
            break
        bench.wait(min(1.0, most_s))
    bench.advance(most_s / 2)
    return bench.clock() - began_s


def _rest(seconds: float, bench: Bench) -> tuple[float, float]:
    began_s = bench.clock()
    bench.wait(seconds)
    bench.advance(seconds)
    return began_s, bench.clock()


def _warm_up(phase: Phase, plan: Plan, bench: Bench) -> tuple[float, bool]:
    """Seconds that it took, and whether the last blocks agreed."""
    began_s, times_s = bench.clock(), [0.0] * 0
    is_steady = False
    while not is_steady and bench.clock() - began_s < plan.warm_up_s:
        times_s.append(run_block(phase, plan.warm_up_s / WARM_BLOCKS_MOST, bench).seconds_per_image)
        last = times_s[-STEADY_BLOCKS:]
        is_steady = len(last) == STEADY_BLOCKS and max(last) <= min(last) * (1.0 + STEADY_WITHIN)
    bench.advance(plan.warm_up_s / 2)
    return bench.clock() - began_s, is_steady
