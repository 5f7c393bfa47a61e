"""What every meter answers: joules, or None with the reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """`energy_j` since the meter was opened; None when unknown, and then `reason` says why."""

    energy_j: float | None
    reason: str | None = None
