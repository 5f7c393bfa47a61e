"""Samples of a sensor -> pieces of power over time that follow one another: what was between two samples, or a gap.

Rules of devices.md 2.1: an averaging sensor is shifted by its lag and half its window, a counter is linear between its
changes and never continued beyond them, a gap is not bridged. What the pieces add up to is left to `_trace`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Timing:
    """When a sensor's figure was true, and how exact it is.

    A power sensor shows the mean over `window_s` that ended `lag_s` before the read; a counter changes at least every
    `window_s`. `doubt_s` is how far off these may be; `step_w` the distance between two figures that it can show;
    `share` the part of all energy by which a model may be wrong.
    """

    window_s: float = 0.0
    lag_s: float = 0.0
    doubt_s: float = 0.0
    step_w: float = 0.0
    share: float = 0.0
    counts: bool = False  # a counter of joules

    @property
    def centre_s(self) -> float:
        """How long before the read the middle of the window was."""
        return self.lag_s + (0.0 if self.counts else self.window_s / 2.0)

    @property
    def reach_s(self) -> float:
        """How far from a moment its energy may have been counted."""
        return self.doubt_s + (0.0 if self.counts else self.window_s / 2.0)


@dataclass(frozen=True)
class Sample:
    """One read: watts of a power sensor, joules of a counter; None when it failed, and then `reason` says why."""

    at_s: float  # monotonic, the middle of the read
    value: float | None
    reason: str | None = None
    took_s: float = 0.0  # the read may have happened anywhere in it
    restarts: bool = False  # a counter that cannot be continued from what it showed before


@dataclass(frozen=True)
class Piece:
    """Power from `begin_s` to `end_s`, straight between its ends; `gap` says why nothing is known of it."""

    begin_s: float
    end_s: float
    begin_w: float = 0.0
    end_w: float = 0.0
    gap: str | None = None
    doubt_s: float = 0.0  # how far off its ends may be in time, beyond the sensor's own

    def power_w(self, at_s: float) -> float:
        """At a moment within."""
        share = (at_s - self.begin_s) / (self.end_s - self.begin_s)
        return self.begin_w + share * (self.end_w - self.begin_w)

    def clipped(self, begin_s: float, end_s: float) -> Piece | None:
        """The part of it between two moments, None where there is none."""
        begin, end = max(self.begin_s, begin_s), min(self.end_s, end_s)
        if begin >= end:
            return None
        if begin == self.begin_s and end == self.end_s:
            return self
        return Piece(begin, end, self.power_w(begin), self.power_w(end), self.gap, self.doubt_s)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.begin_s

    @property
    def energy_j(self) -> float:
        """0 of a gap, of which nothing is known."""
        return self.duration_s * (self.begin_w + self.end_w) / 2.0


class Pieces(Protocol):
    """Turns samples, in the order of their time, into pieces, in the order of theirs."""

    failure: str | None

    def add(self, sample: Sample) -> Piece | None:
        """The piece that the sample completes, if it does."""


def pieces_of(timing: Timing, gap_most_s: float) -> Pieces:
    """Neighbours further apart than `gap_most_s` are not joined: what was between them is unknown."""
    return CounterPieces(timing, gap_most_s) if timing.counts else PowerPieces(timing, gap_most_s)


class PowerPieces:
    """Power straight between neighbouring samples."""

    def __init__(self, timing: Timing, gap_most_s: float) -> None:
        self._timing, self._gap_most_s = timing, gap_most_s
        self._at_s: float | None = None  # pieces reach so far
        self._last: Sample | None = None  # there, where it could be read
        self.failure: str | None = None  # why the newest failed sample failed

    def add(self, sample: Sample) -> Piece | None:
        """A sample older than the newest is left out."""
        at_s = sample.at_s - self._timing.centre_s
        began_s, last, failure = self._at_s, self._last, self.failure
        if began_s is not None and at_s <= began_s:
            return None
        if sample.value is None:
            failure = self.failure = sample.reason
        is_near = began_s is not None and last is not None and at_s - began_s <= self._gap_most_s
        if sample.value is None and is_near:
            return None  # the next may join it yet
        self._at_s, self._last = at_s, None if sample.value is None else sample
        if began_s is None:
            return None
        if is_near and last is not None and last.value is not None and sample.value is not None:
            doubt_s = max(last.took_s, sample.took_s) / 2.0
            return Piece(began_s, at_s, last.value, sample.value, None, doubt_s)
        return Piece(began_s, at_s, gap=failure or f"no sample for {at_s - began_s:.1f} s")


class CounterPieces:
    """Mean power between two changes of a counter; a change happened between the last old and the first new figure."""

    def __init__(self, timing: Timing, gap_most_s: float) -> None:
        self._timing, self._gap_most_s = timing, gap_most_s
        self._edge_s: float | None = None  # when it changed to `_counted_j`: pieces reach so far
        self._counted_j: float | None = None
        self._seen_s = float("-inf")  # when it last showed that
        self._doubt_s = 0.0  # of `_edge_s`
        self.failure: str | None = None

    def add(self, sample: Sample) -> Piece | None:
        """A sample older than the newest is left out."""
        at_s = sample.at_s - self._timing.lag_s
        if at_s <= self._seen_s:
            return None
        if sample.value is None:
            self.failure = sample.reason
            return self._lose(at_s, sample.reason or "") if sample.restarts or self._is_long_ago(at_s) else None
        if self._counted_j is not None and sample.value < self._counted_j:
            self.failure = "the counter went back"
            gap = self._lose(at_s, self.failure)
            self._change(at_s, sample)
            return gap
        if sample.value == self._counted_j:
            self._seen_s = at_s
            if not self._is_long_ago(at_s):
                return None
            self.failure = "the counter stands still"
            return self._lose(at_s, self.failure)
        return self._change(at_s, sample)

    def _is_long_ago(self, at_s: float) -> bool:
        return self._edge_s is None or at_s - self._edge_s > self._gap_most_s

    def _change(self, at_s: float, sample: Sample) -> Piece | None:
        earliest_s = max(self._seen_s, at_s - self._timing.window_s)
        edge_s, doubt_s = (earliest_s + at_s) / 2.0, (at_s - earliest_s + sample.took_s) / 2.0
        began_s, counted_j, doubt_before_s = self._edge_s, self._counted_j, self._doubt_s
        self._edge_s, self._counted_j, self._doubt_s, self._seen_s = edge_s, sample.value, doubt_s, at_s
        if began_s is None:
            return None
        self._edge_s = edge_s = max(edge_s, began_s + 1e-6)
        if counted_j is None or sample.value is None:
            return Piece(began_s, edge_s, gap=self.failure or "the counter was lost")
        if edge_s - began_s > self._gap_most_s:
            return Piece(began_s, edge_s, gap=self.failure or f"no sample for {edge_s - began_s:.1f} s")
        power_w = (sample.value - counted_j) / (edge_s - began_s)
        return Piece(began_s, edge_s, power_w, power_w, None, max(doubt_s, doubt_before_s))

    def _lose(self, at_s: float, reason: str) -> Piece | None:
        began_s = self._edge_s
        self._edge_s, self._counted_j, self._seen_s = at_s, None, at_s
        return None if began_s is None or at_s <= began_s else Piece(began_s, at_s, gap=reason)
