"""What every meter answers: joules, or None with the reason; and in which words a meter says what it measures.

Figures of different scope are never compared: a wall plug counts the power supply's loss, a module's rail does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Quality: TypeAlias = Literal["measured", "derived", "unknown"]  # derived: by a formula from what was measured


@dataclass(frozen=True)
class Reading:
    """`energy_j` since the meter was opened; None when unknown, and then `reason` says why."""

    energy_j: float | None
    reason: str | None = None
