"""Seconds and joules of each stage of a run, from one clock and one meter, both handed in.

Which stages there are is the caller's affair. The figures stay on the device: they go into its own report only.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from edge_runtime.meters import Meter, Piece
from edge_runtime.meters._trace import Seen, Span, Tally

UNHEARD_MOST_S = 1.0  # then the work itself reads the meter
RECENT_MOST = 256  # pieces before now that may still tell of a beginning
ENDED_MOST = 256  # spans that wait for what a meter has yet to tell


@dataclass(frozen=True)
class StageCost:
    """What one stage took; `energy_j` None when it could not be measured, else the truth is within +- `bound_j`."""

    seconds: float
    energy_j: float | None
    bound_j: float | None = None
    reason: str | None = None  # why energy is unknown, or in part
    mean_w: float | None = None
    peak_w: float | None = None
    peak_window_s: float | None = None  # a peak over so long, and no shorter


@dataclass
class _Stage:
    """The times that one stage ran: those of which nothing more will come are added up."""

    settled: Tally = field(default_factory=Tally)
    ended: list[Span] = field(default_factory=list)
    running: Span | None = None

    def spans(self) -> list[Span]:
        return [*self.ended, *([self.running] if self.running else [])]


class Stages:
    """Adds up the cost of named stages; a stage entered twice counts twice."""

    def __init__(self, meter: Meter, clock: Callable[[], float]) -> None:
        """`clock` is the one that the meter's samples are taken by."""
        self._meter, self._clock = meter, clock
        self._named: dict[str, _Stage] = {}  # in the order in which they ended first
        self._begun: dict[str, _Stage] = {}  # never ended so far
        self._any = _Stage()  # whenever one or more run
        self._running = 0
        self._seen, self._recent = Seen(), deque[Piece](maxlen=RECENT_MOST)
        self._lock = threading.Lock()  # stages begin and end on the worker and on the socket loop
        self._heard_s = clock()  # when the meter told something, or was last asked to
        meter.watch(self._take)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Count the time and energy of the block under `name`, however it ends."""
        self.begin(name)
        try:
            yield
        finally:
            self.end(name)

    def begin(self, name: str) -> None:
        """Count under `name` from now on; a stage that is running goes on."""
        with self._lock:
            now_s = self._clock()
            stage = self._named.get(name) or self._begun.setdefault(name, _Stage())
            if stage.running is not None:
                return
            stage.running = self._open(now_s)
            self._running += 1
            if self._any.running is None:
                self._any.running = self._open(now_s)

    def end(self, name: str) -> None:
        """Stop counting under `name`; nothing if it is not running."""
        with self._lock:
            now_s = self._clock()
            stage = self._named.get(name) or self._begun.pop(name, None)
            if stage is None or stage.running is None:
                return
            self._named[name] = stage
            self._running -= 1
            for each in (stage, self._any) if self._running == 0 else (stage,):
                self._close(each, now_s)

    def sample(self) -> None:
        """Called now and then by the work, in case that it leaves the meter's own thread no time."""
        now_s = self._clock()
        if now_s - self._heard_s >= UNHEARD_MOST_S:
            self._heard_s = now_s
            self._meter.read(now_s)

    def energy_now(self) -> tuple[float | None, str | None]:
        """What the meter has counted by now, of which differences are energy; None with the reason."""
        if self._meter.quality == "unknown":
            return None, self._meter.note
        last = self._meter.read(self._clock())
        return last.energy_j, None if last.energy_j is not None else last.reason or "the meter told nothing"

    def costs(self) -> dict[str, StageCost]:
        """The stages so far, in the order in which they ended first; `settle_s` after an end all is known of it."""
        with self._lock:
            return {name: self._cost(stage) for name, stage in self._named.items()}

    def total(self) -> StageCost:
        """The time in which any stage ran, however many did."""
        with self._lock:
            return self._cost(self._any)

    @property
    def meter(self) -> Meter:
        """What counts the joules."""
        return self._meter

    @property
    def settle_s(self) -> float:
        """How long after the end of a stage the meter has told of it."""
        return self._meter.settle_s

    @property
    def scope(self) -> str:
        """What the joules are those of, such as "ina: module input"; figures of two scopes are not compared."""
        return f"{self._meter.name}: {self._meter.scope}"

    def energy_reason(self) -> str | None:
        """Why energy is unknown, partial or not measured; None when it is measured."""
        return self.total().reason

    def _take(self, piece: Piece) -> None:
        """The next piece of power, on the meter's thread."""
        with self._lock:
            self._heard_s = self._clock()
            self._seen.add(piece)
            self._recent.append(piece)
            for stage in (self._any, *self._named.values(), *self._begun.values()):
                for span in stage.spans():
                    span.add(piece)
                if stage.ended:
                    stage.settled = sum((s.tally(self._seen) for s in stage.ended if s.is_settled), stage.settled)
                    stage.ended = [span for span in stage.ended if not span.is_settled]

    def _open(self, now_s: float) -> Span:
        return Span(now_s, self._meter.timing, self._recent)

    def _close(self, stage: _Stage, now_s: float) -> None:
        if stage.running is not None:
            stage.running.end(now_s, self._recent)
            stage.ended.append(stage.running)
            stage.running = None
        if len(stage.ended) > ENDED_MOST:  # of a meter that tells nothing
            stage.settled += stage.ended.pop(0).tally(self._seen)

    def _cost(self, stage: _Stage) -> StageCost:
        meter = self._meter
        tally = sum((span.tally(self._seen) for span in stage.ended), stage.settled)
        if tally.gap is None:  # the newest failures have made no gap yet
            tally = replace(tally, gap=meter.failure)
        window = tally.window(meter.timing, self._seen)
        if window.energy_j is None:
            why = meter.note if meter.quality == "unknown" else f"{meter.name}: {window.reason}"
            return StageCost(tally.seconds, None, reason=why)
        why = "; ".join(text for text in (window.reason, meter.note) if text) or None
        cost = StageCost(tally.seconds, window.energy_j, window.bound_j, why)
        if tally.covered_s <= 0.0:
            return cost
        return replace(
            cost,
            mean_w=tally.energy_j / tally.covered_s,
            peak_w=tally.peak_w,
            peak_window_s=tally.peak_window_s,
        )
