"""What every meter answers: joules, or None with the reason; and in which words a meter says what it measures.

Figures of different scope are never compared: a wall plug counts the power supply's loss, a module's rail does not.
Nor is a modelled figure compared with anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

# derived: by a formula from what was measured; modelled: from constants; replayed: from a recording
Quality: TypeAlias = Literal["measured", "derived", "modelled", "replayed", "unknown"]


@dataclass(frozen=True)
class Reading:
    """`energy_j` since the meter was opened; None when unknown, and then `reason` says why."""

    energy_j: float | None
    reason: str | None = None


class CounterLostError(ValueError):
    """A counter that cannot be continued from what it showed before: what it counted in between is unknown."""
