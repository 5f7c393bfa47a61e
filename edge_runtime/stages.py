"""Seconds and joules of each stage of a run, from one clock and one meter, both handed in.

Which stages there are is the caller's affair. The figures stay on the device: they go into its own report only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from edge_runtime.meters import Meter


@dataclass(frozen=True)
class StageCost:
    """What one stage took; `energy_j` None when it could not be measured."""

    seconds: float
    energy_j: float | None


class Stages:
    """Adds up the cost of named stages; a stage entered twice counts twice."""

    def __init__(self, meter: Meter, clock: Callable[[], float]) -> None:
        self._meter, self._clock = meter, clock
        self._costs: dict[str, StageCost] = {}
        self._running: dict[str, tuple[float, float | None]] = {}
        self._reason: str | None = None
        self._lock = threading.Lock()  # the meter is read from the worker and from the socket loop
        self.sample()

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
        started = (self._clock(), self.sample())
        with self._lock:
            self._running.setdefault(name, started)

    def end(self, name: str) -> None:
        """Stop counting under `name`; nothing if it is not running."""
        ended_s, ended_j = self._clock(), self.sample()
        with self._lock:
            if name not in self._running:
                return
            started_s, started_j = self._running.pop(name)
            spent_j = None if started_j is None or ended_j is None else ended_j - started_j
            earlier = self._costs.get(name, StageCost(0.0, 0.0))
            total_j = None if spent_j is None or earlier.energy_j is None else earlier.energy_j + spent_j
            self._costs[name] = StageCost(earlier.seconds + ended_s - started_s, total_j)

    def sample(self) -> float | None:
        """Read the meter; called every few seconds, so that a wrapping counter is never missed."""
        with self._lock:
            reading = self._meter.read(self._clock())
            self._reason = reading.reason
            return reading.energy_j

    def costs(self) -> dict[str, StageCost]:
        """The stages so far, in the order in which they ended first."""
        with self._lock:
            return dict(self._costs)

    @property
    def scope(self) -> str:
        """What the joules are those of, such as "ina: module input"; figures of two scopes are not compared."""
        return f"{self._meter.name}: {self._meter.scope}"

    def energy_reason(self) -> str | None:
        """Why energy is unknown or partial; None when it is measured."""
        return self._reason
