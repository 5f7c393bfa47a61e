"""A meter on a sensor that shows power and counts nothing: it is sampled at jittered intervals and integrated.

An even interval beats with an even workload: 1 Hz on a workload of 2 Hz was wrong by 87 %, jittered by 14 %
(devices.md 2.2). What a sensor shows is each sensor's file; the sum is `_integral`'s.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from edge_runtime.meters._integral import COVERED_LEAST, PowerIntegral, PowerSample
from edge_runtime.meters._reading import Quality, Reading


class PowerSensor(Protocol):
    """Something that shows power now."""

    name: str
    scope: str
    quality: Quality

    def read_w(self) -> float:
        """Watts. Raises: OSError or ValueError when it cannot be read just now."""


@dataclass(frozen=True)
class Sampling:
    """How a sensor is sampled: each wait is `interval_s`, up to half of it more or less.

    Where a read takes long, `at_reads` is False: then a sum ends with the newest sample, and no stage waits for one.
    """

    interval_s: float
    gap_most_s: float = 2.0
    jitter: float = 0.5
    at_reads: bool = True


class SampledMeter:
    """Joules since the first read. Sampling starts with it, on a thread of its own that ends with the process."""

    def __init__(
        self,
        sensor: PowerSensor,
        sampling: Sampling,
        clock: Callable[[], float] = time.monotonic,
        start: Callable[[SampledMeter], None] | None = None,
    ) -> None:
        """`start` sees to further samples; the default starts a thread."""
        self.name, self.scope, self.quality = sensor.name, sensor.scope, sensor.quality
        self._sensor, self._sampling, self._clock = sensor, sampling, clock
        self._integral = PowerIntegral(sampling.gap_most_s)
        self._sensor_lock, self._lock = threading.Lock(), threading.Lock()
        self._start = start or _start_thread
        self._is_running = False

    def read(self, now_s: float) -> Reading:
        """Joules up to the newest sample. `now_s` is not used, as samples carry their own time."""
        if self._sampling.at_reads or not self._is_running:
            self.sample()
        if not self._is_running:
            self._is_running = True
            self._start(self)
        with self._lock:
            failure, coverage = self._integral.failure, self._integral.coverage
            if not self._integral.has_power or coverage < COVERED_LEAST:
                return Reading(None, f"{self.name}: measured for {coverage:.0%} of the time ({failure or 'gaps'})")
            partial = None if coverage > 0.999 else f"partial: {self.name} measured for {coverage:.1%} of the time"
            return Reading(self._integral.energy_j, partial)

    def sample(self) -> None:
        """Read the sensor once; a failure is a sample too. The clock is read around it: some sensors convert for ms."""
        with self._sensor_lock:
            started_s = self._clock()
            try:
                watts, reason = self._sensor.read_w(), None
            except (OSError, ValueError) as error:
                watts, reason = None, str(error)
            sample = PowerSample((started_s + self._clock()) / 2.0, watts, reason)
            with self._lock:
                self._integral.add(sample)

    def waits_s(self, rng: random.Random) -> float:
        """The next wait between two samples."""
        spread = self._sampling.jitter
        return self._sampling.interval_s * rng.uniform(1.0 - spread, 1.0 + spread)


def _start_thread(meter: SampledMeter) -> None:
    threading.Thread(target=_keep_sampling, args=(meter,), name=f"meter {meter.name}", daemon=True).start()


def _keep_sampling(meter: SampledMeter) -> None:
    rng = random.Random()  # noqa: S311 - jitter, no secret
    while True:
        time.sleep(meter.waits_s(rng))
        meter.sample()
