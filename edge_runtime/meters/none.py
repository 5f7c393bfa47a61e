"""The meter of a device that has none: every reading is unknown, with the reasons why no other meter was usable."""

from __future__ import annotations

from collections.abc import Callable

from edge_runtime.meters._pieces import Piece, Timing
from edge_runtime.meters._reading import Quality, Reading


class NoMeter:
    """Answers unknown, for the reason given."""

    name = "none"
    scope = "nothing"
    quality: Quality = "unknown"
    timing = Timing()
    settle_s = 0.0
    failure: str | None = None

    def __init__(self, reason: str) -> None:
        self.note: str | None = reason

    def read(self, now_s: float) -> Reading:
        return Reading(None, self.note)

    def watch(self, sink: Callable[[Piece], None], fine: bool = False) -> Callable[[], None]:
        """Nothing will come."""
        return lambda: None
