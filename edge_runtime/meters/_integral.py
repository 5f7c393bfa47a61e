"""Joules from power samples: the trapezoid between neighbours, and nothing across a gap (devices.md 2.1).

Which sensor is read, and when, is left to `_sampled`.
"""

from __future__ import annotations

from dataclasses import dataclass

COVERED_LEAST = 0.9  # of the time; below it a sum says nothing about the whole


@dataclass(frozen=True)
class PowerSample:
    """Power at the midpoint of one read; `watts` None when it failed, and then `reason` says why."""

    at_s: float  # monotonic
    watts: float | None
    reason: str | None = None


class PowerIntegral:
    """Adds up samples in the order of their time."""

    def __init__(self, gap_most_s: float) -> None:
        """Neighbours further apart than `gap_most_s` are not joined: what was between them is unknown."""
        self._gap_most_s = gap_most_s
        self._first_s: float | None = None
        self._last: PowerSample | None = None  # that could be read
        self._newest_s = 0.0
        self._failure: str | None = None
        self.energy_j = 0.0
        self.covered_s = 0.0

    def add(self, sample: PowerSample) -> None:
        """A failed sample lengthens the time and adds nothing; one that is older than the newest is left out."""
        if self._first_s is None:
            self._first_s = sample.at_s
        elif sample.at_s <= self._newest_s:
            return
        self._newest_s = sample.at_s
        if sample.watts is None:
            self._failure = sample.reason
            return
        if self._last is not None and self._last.watts is not None:
            apart_s = sample.at_s - self._last.at_s
            if apart_s <= self._gap_most_s:
                self.energy_j += apart_s * (sample.watts + self._last.watts) / 2.0
                self.covered_s += apart_s
        self._last = sample

    @property
    def coverage(self) -> float:
        """Share of the time since the first sample that lies between joined samples; 1 before any time has passed."""
        elapsed_s = 0.0 if self._first_s is None else self._newest_s - self._first_s
        return self.covered_s / elapsed_s if elapsed_s > 0.0 else 1.0

    @property
    def failure(self) -> str | None:
        """Why the newest failed sample failed; None where every sample could be read."""
        return self._failure

    @property
    def has_power(self) -> bool:
        """Whether any sample could be read."""
        return self._last is not None
