"""A meter on a sensor: it is sampled at jittered intervals, and whoever watches gets the pieces of power in order.

An even interval beats with an even workload: 1 Hz on a workload of 2 Hz was wrong by 87 %, jittered by 14 %
(devices.md 2.2). What a sensor shows is each sensor's file; `_pieces` says what samples mean, `_trace` what they add up
to.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from contract.errors import why
from edge_runtime.meters._pieces import Piece, Sample, Timing, pieces_of
from edge_runtime.meters._reading import CounterLostError, Quality, Reading
from edge_runtime.meters._trace import COVERED_LEAST

SETTLE_MOST_S = 5.0
READ_WAIT_MOST_S = 1.0  # for a sensor that another thread is reading

Sink = Callable[[Piece], None]


@runtime_checkable
class PowerSensor(Protocol):
    """Something that shows power now."""

    name: str
    scope: str
    quality: Quality

    def read_w(self) -> float:
        """Watts. Raises: OSError or ValueError when it cannot be read just now."""


@runtime_checkable
class CounterSensor(Protocol):
    """Something that counts energy."""

    name: str
    scope: str
    quality: Quality

    def read_j(self) -> float:
        """Joules since some moment. Raises: OSError or ValueError when it cannot be read just now, CounterLostError."""


@dataclass(frozen=True)
class Sampling:
    """How a sensor is sampled: each wait is `interval_s`, up to half of it more or less; finer while someone asks so.

    Where a read takes long, `at_reads` is False: then a sum ends with the newest sample, and no stage waits for one.
    """

    interval_s: float
    gap_most_s: float = 2.0
    jitter: float = 0.5
    at_reads: bool = True
    fine_interval_s: float | None = None
    timing: Timing = Timing()


class SampledMeter:
    """Joules since the first read. Sampling starts with it, on a thread of its own that ends with the process."""

    def __init__(
        self,
        sensor: PowerSensor | CounterSensor,
        sampling: Sampling,
        clock: Callable[[], float] = time.monotonic,
        start: Callable[[SampledMeter], None] | None = None,
        note: str | None = None,
    ) -> None:
        """`start` sees to further samples; the default starts a thread. `note` says what the meter leaves out."""
        self.name, self.scope, self.quality = sensor.name, sensor.scope, sensor.quality
        self.timing, self.note = sampling.timing, note
        self._read = sensor.read_j if isinstance(sensor, CounterSensor) else sensor.read_w
        self._sampling, self._clock, self._start = sampling, clock, start or _start_thread
        self._pieces = pieces_of(sampling.timing, sampling.gap_most_s)
        self._sensor_lock, self._lock = threading.Lock(), threading.Lock()
        self._sinks: dict[Sink, bool] = {}  # whether it asks for fine sampling
        self._is_running, self._woken = False, threading.Event()
        self._first_s: float | None = None
        self._newest_s = self._energy_j = self._covered_s = 0.0
        self._has_answered = False
        self.failure: str | None = None  # why the newest sample failed, None where it did not
        self._untold: str | None = None  # why somebody who watched is told no more

    def read(self, now_s: float) -> Reading:
        """Joules up to the newest sample; unknown where that is longer before `now_s` than a gap may be."""
        if self._sampling.at_reads or not self._is_running:
            self._sample(READ_WAIT_MOST_S)
        self._run()
        with self._lock:
            silent_s = 0.0 if self._first_s is None else now_s - self._newest_s
            if silent_s > self._sampling.gap_most_s:
                before = f" after one that failed ({self.failure})" if self.failure else ""
                return Reading(None, f"{self.name}: no sample for {silent_s:.1f} s{before}")
            coverage = self._coverage()
            if not self._has_answered or coverage < COVERED_LEAST:
                why = self._pieces.failure or ("the counter stands still" if self.timing.counts else "gaps")
                return Reading(None, f"{self.name}: measured for {coverage:.0%} of the time ({why})")
            partial = None if coverage > 0.999 else f"partial: {self.name} measured for {coverage:.1%} of the time"
            return Reading(self._energy_j, partial or self.note)

    def watch(self, sink: Sink, fine: bool = False) -> Callable[[], None]:
        """Hand every further piece of power to `sink`, from the sampling thread, until the returned function is called.

        The first sample is taken at once.
        """
        self._sinks[sink] = fine
        self.sample()
        self._run()
        self._woken.set()

        def stop() -> None:
            self._sinks.pop(sink, None)

        return stop

    @property
    def settle_s(self) -> float:
        """How long after a moment the samples have told of it."""
        timing = self.timing
        tells_s = timing.centre_s + timing.reach_s + (timing.window_s if timing.counts else 0.0)
        return min(tells_s + (1.0 + self._sampling.jitter) * self._interval_s, SETTLE_MOST_S)

    def sample(self) -> None:
        """Read the sensor once; a failure is a sample too. The clock is read around it: some sensors convert for ms."""
        self._sample(-1.0)

    def _sample(self, wait_most_s: float) -> None:
        """Leaves it at what is known where another thread is still reading after so long; -1 waits for ever."""
        if not self._sensor_lock.acquire(timeout=wait_most_s):
            return
        try:
            sample = self._take()
            piece = self._pieces.add(sample)
            with self._lock:
                self.failure = sample.reason or self._untold
                self._first_s = sample.at_s if self._first_s is None else self._first_s
                self._newest_s = max(self._newest_s, sample.at_s)
                self._has_answered = self._has_answered or sample.value is not None
                if piece is not None and piece.gap is None:
                    self._energy_j += piece.energy_j
                    self._covered_s += piece.duration_s
            if piece is not None:
                for sink in tuple(self._sinks):
                    self._tell(sink, piece)
        finally:
            self._sensor_lock.release()

    def _tell(self, sink: Sink, piece: Piece) -> None:
        try:
            sink(piece)
        except Exception as error:  # one that cannot take it is told no more; the others and the sum are
            self._sinks.pop(sink, None)
            self.failure = self._untold = f"what it showed could not be taken ({_said(error)})"

    def wait_s(self, rng: random.Random) -> float:
        """The next wait between two samples."""
        spread = self._sampling.jitter
        return self._interval_s * rng.uniform(1.0 - spread, 1.0 + spread)

    def keep_sampling(self, rng: random.Random) -> None:
        """Sample for ever; whoever starts to watch finely is not kept waiting."""
        while True:
            self._woken.wait(self.wait_s(rng))
            self._woken.clear()
            self.sample()

    @property
    def _interval_s(self) -> float:
        fine_s = self._sampling.fine_interval_s
        return fine_s if fine_s is not None and any(self._sinks.copy().values()) else self._sampling.interval_s

    def _take(self) -> Sample:
        value, reason, restarts = None, None, False
        began_s = self._clock()
        try:
            value = self._read()
            if not math.isfinite(value):
                value, reason = None, f"it shows {value}"
        except CounterLostError as error:
            reason, restarts = why(error), True
        except (OSError, ValueError) as error:
            reason = why(error)
        except Exception as error:  # else it would end the thread, and energy would stand still without a word
            reason = _said(error)
        ended_s = self._clock()
        return Sample((began_s + ended_s) / 2.0, value, reason, ended_s - began_s, restarts)

    def _coverage(self) -> float:
        """Share of the time since the first sample; the newest change of a counter is always a little ago."""
        elapsed_s = 0.0 if self._first_s is None else self._newest_s - self._first_s
        late_s = 2.0 * self.timing.window_s if self.timing.counts else 0.0
        return 1.0 - max(elapsed_s - self._covered_s - late_s, 0.0) / elapsed_s if elapsed_s > 0.0 else 1.0

    def _run(self) -> None:
        if not self._is_running:
            self._is_running = True
            self._start(self)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _start_thread(meter: SampledMeter) -> None:
    rng = random.Random()  # noqa: S311 - jitter, no secret
    threading.Thread(target=meter.keep_sampling, args=(rng,), name=f"meter {meter.name}", daemon=True).start()
