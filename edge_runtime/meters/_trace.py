"""Energy, power and the bound of their error between two moments, from a sensor's pieces of power. Pure.

How samples become pieces is `_pieces`' part; which moments matter is the caller's.

The bound adds up what can be wrong:
- at either end: the energy that the sensor may have counted on the wrong side of it, by its window and its lag's doubt;
- between samples: `RANDOM` standard errors of the samples' own scatter, and `UNSEEN` sampling intervals of the whole
  range of power that the sensor has shown, for what is too short and too rare to be met by a sample;
- half a step of the sensor's resolution; all of the highest power for time that is not covered; a model's share.
It leaves out the tolerance of the sensor itself, which no sample can show.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass

from edge_runtime.meters._pieces import Piece, Timing

COVERED_LEAST = 0.9  # of the time; below it a sum says nothing about the whole
RANDOM = 3.0  # standard errors
UNSEEN = 5.0  # of n samples none meets what fills 5/n of the time once in 150 cases
SEEN_LEAST = 30  # samples, before their range says anything
PIECES_MOST = 1 << 20  # that a trace keeps


@dataclass(frozen=True)
class Window:
    """Energy between two moments; None when unknown, and then `reason` says why. It may be given with a reason too."""

    energy_j: float | None
    coverage: float  # share of the time of which something is known
    reason: str | None
    bound_j: float | None  # the truth is within energy_j +- bound_j


@dataclass(frozen=True)
class Powers:
    """Power between two moments; a peak is one over `peak_window_s` and no shorter."""

    mean_w: float | None
    peak_w: float | None
    peak_window_s: float | None
    p999_w: float | None
    samples: int


@dataclass
class Seen:
    """What a sensor has shown so far, all told."""

    lowest_w: float = math.inf
    highest_w: float = 0.0
    samples: int = 0

    def add(self, piece: Piece) -> None:
        if piece.gap is None:
            self.samples += 1
            self.lowest_w = min(self.lowest_w, piece.begin_w, piece.end_w)
            self.highest_w = max(self.highest_w, piece.begin_w, piece.end_w)

    @property
    def spread_w(self) -> float:
        """Between which powers it has moved."""
        return self.highest_w - self.lowest_w if self.samples else 0.0

    @property
    def range_w(self) -> float:
        """Between which powers it may move: from 0 while too little is known."""
        return self.spread_w if self.samples >= SEEN_LEAST else self.highest_w


@dataclass(frozen=True)
class Tally:
    """What the pieces between two moments add up to; tallies of several spans add up too."""

    seconds: float = 0.0
    covered_s: float = 0.0
    energy_j: float = 0.0
    edges_j: float = 0.0  # may have been counted on the wrong side of an end
    blurred_s: float = 0.0  # around the ends, where two samples belong to different work
    unseen_s2: float = 0.0  # square of how long power may have been elsewhere in its range, between samples
    samples: int = 0
    peak_w: float = 0.0
    peak_window_s: float = 0.0
    gap: str | None = None  # why something is missing

    def __add__(self, other: Tally) -> Tally:
        higher = self if self.peak_w >= other.peak_w else other
        return Tally(
            self.seconds + other.seconds,
            self.covered_s + other.covered_s,
            self.energy_j + other.energy_j,
            self.edges_j + other.edges_j,
            self.blurred_s + other.blurred_s,
            self.unseen_s2 + other.unseen_s2,
            self.samples + other.samples,
            higher.peak_w,
            higher.peak_window_s,
            self.gap or other.gap,
        )

    def window(self, timing: Timing, seen: Seen) -> Window:
        """The energy and its bound."""
        coverage = min(self.covered_s / self.seconds, 1.0) if self.seconds > 0.0 else 1.0
        missing = f"measured for {coverage:.1%} of the time ({self.gap or 'too few samples'})"
        if coverage < COVERED_LEAST:
            return Window(None, coverage, missing, None)
        bound_j = (
            self.edges_j
            + seen.range_w * min(self.seconds, self.blurred_s + math.sqrt(self.unseen_s2))
            + timing.step_w / 2.0 * self.covered_s
            + seen.highest_w * max(self.seconds - self.covered_s, 0.0)
            + timing.share * self.energy_j
        )
        return Window(self.energy_j, coverage, None if coverage > 0.999 else f"partial: {missing}", bound_j)


class Span:
    """Adds up the pieces between two moments, the second of which may lie ahead. Pieces come in order."""

    def __init__(self, begin_s: float, timing: Timing, before: Iterable[Piece] = ()) -> None:
        """`before` are the newest pieces before it, which say what may have been counted on its side."""
        self._begin_s, self._end_s, self._timing = begin_s, math.inf, timing
        self._covered_s = self._energy_j = self._longest_s = self._peak_w = self._peak_window_s = 0.0
        self._samples = 0
        self._scatter_j2 = 0.0
        self._begin_j = self._end_j = 0.0  # energy around the ends that may lie on either side
        self._gap: str | None = None
        self._reached_s = -math.inf
        for piece in before:
            self._begin_j = self._around(begin_s, piece, self._begin_j)

    def end(self, end_s: float, before: Iterable[Piece] = ()) -> None:
        """It ends; `before` are the newest pieces that it was given."""
        self._end_s = end_s
        for piece in before:
            self._end_j = self._around(end_s, piece, self._end_j)

    def add(self, piece: Piece) -> None:
        """The next piece in time."""
        self._reached_s = piece.end_s
        self._begin_j = self._around(self._begin_s, piece, self._begin_j)
        self._end_j = self._around(self._end_s, piece, self._end_j)
        inside = piece.clipped(self._begin_s, self._end_s)
        if inside is None:
            return
        if piece.gap is not None:
            self._gap = self._gap or piece.gap
            return
        seconds, peak_w = inside.duration_s, max(inside.begin_w, inside.end_w)
        self._covered_s += seconds
        self._energy_j += inside.energy_j
        self._samples += 1
        self._scatter_j2 += (seconds * (piece.end_w - piece.begin_w)) ** 2 / 2.0
        self._longest_s = max(self._longest_s, piece.duration_s)
        if peak_w >= self._peak_w:
            self._peak_w = peak_w
            self._peak_window_s = max(self._timing.window_s, piece.duration_s if self._timing.counts else 0.0)

    @property
    def is_settled(self) -> bool:
        """Whether no later piece can change it."""
        return self._reached_s >= self._end_s + self._timing.reach_s

    def tally(self, seen: Seen) -> Tally:
        """What it adds up to so far, once it has an end."""
        seconds, blurred_s, unseen_s2 = self._end_s - self._begin_s, 0.0, 0.0
        if not self._timing.counts and self._longest_s > 0.0:  # a counter misses nothing
            blind_s = self._longest_s**2 / (self._longest_s + self._timing.window_s)
            scatter_s2 = self._scatter_j2 / (seen.spread_w or 1.0) ** 2  # without a spread there is no scatter either
            blurred_s = min(seconds, self._longest_s)
            unseen_s2 = min(seconds**2, RANDOM**2 * scatter_s2 + (UNSEEN * blind_s) ** 2)
        return Tally(
            seconds, self._covered_s, self._energy_j, self._begin_j + self._end_j, blurred_s, unseen_s2, self._samples,
            self._peak_w, self._peak_window_s, self._gap,
        )  # fmt: skip

    def _around(self, at_s: float, piece: Piece, energy_j: float) -> float:
        """Energy near one end that the sensor may have counted on the wrong side of it, after one more piece."""
        reach_s = self._timing.reach_s + piece.doubt_s
        if piece.gap is not None or not piece.begin_s - reach_s < at_s < piece.end_s + reach_s:
            return energy_j
        if self._timing.counts:  # each change may have been on either side
            return energy_j + piece.energy_j
        return max(energy_j, reach_s * max(piece.begin_w, piece.end_w))


class PowerTrace:
    """The pieces of one block, kept: `recording` in the door fills it, `energy_between` and `powers` ask it."""

    def __init__(self, timing: Timing) -> None:
        self.timing = timing
        self.seen = Seen()
        self._pieces: list[Piece] = []
        self._ends_s: list[float] = []
        self._doubt_s = 0.0  # the most of any piece

    def add(self, piece: Piece) -> None:
        """The next piece in time; what is beyond `PIECES_MOST` is left out, and is not covered."""
        if len(self._pieces) < PIECES_MOST:
            self.seen.add(piece)
            self._pieces.append(piece)
            self._ends_s.append(piece.end_s)
            self._doubt_s = max(self._doubt_s, piece.doubt_s)

    def energy_between(self, begin_s: float, end_s: float) -> Window:
        """Energy of all that happened between two moments of the monotonic clock."""
        return self._tally(begin_s, end_s).window(self.timing, self.seen)

    def energy_of_repeats(self, marks_s: list[float]) -> Window:
        """Energy of the work between the first and the last mark, of which every two neighbours enclose one repetition.

        Repetitions whose ends the sensor blurs with what was before and after are judged by those in the middle.
        """
        begin_s, end_s = marks_s[0], marks_s[-1]
        reach_s = self.timing.window_s if self.timing.counts else self.timing.reach_s
        inner = [at_s for at_s in marks_s if begin_s + reach_s <= at_s <= end_s - reach_s]
        whole = self.energy_between(begin_s, end_s)
        if len(inner) < 2:
            return whole
        middle = self.energy_between(inner[0], inner[-1])
        if middle.energy_j is None or middle.bound_j is None:
            return middle
        times = (end_s - begin_s) / (inner[-1] - inner[0])
        return Window(
            middle.energy_j * times, min(whole.coverage, middle.coverage), middle.reason, middle.bound_j * times
        )

    def powers(self, begin_s: float, end_s: float) -> Powers:
        """Mean, peak and 99.9th percentile; None where nothing is known."""
        tally = self._tally(begin_s, end_s)
        if tally.covered_s <= 0.0:
            return Powers(None, None, None, None, 0)
        shown_w = sorted(watts for _, watts in self.samples(begin_s, end_s))
        p999_w = shown_w[math.ceil(0.999 * len(shown_w)) - 1] if shown_w else tally.peak_w
        return Powers(tally.energy_j / tally.covered_s, tally.peak_w, tally.peak_window_s, p999_w, tally.samples)

    def samples(self, begin_s: float, end_s: float) -> list[tuple[float, float]]:
        """Moment and watts of each sample between two moments, for a plot or a distribution."""
        return [
            (piece.end_s, piece.end_w)
            for piece in self._pieces[bisect.bisect_left(self._ends_s, begin_s) : bisect.bisect(self._ends_s, end_s)]
            if piece.gap is None
        ]

    def _tally(self, begin_s: float, end_s: float) -> Tally:
        span = Span(begin_s, self.timing)
        span.end(end_s)
        around_s = self.timing.reach_s + self._doubt_s
        first = bisect.bisect_left(self._ends_s, begin_s - around_s)
        for piece in self._pieces[first : bisect.bisect_left(self._ends_s, end_s + around_s) + 1]:
            span.add(piece)
        return span.tally(self.seen)
