"""The meter of a device that has none: every reading is unknown, with the reasons why no other meter was usable."""

from __future__ import annotations

from edge_runtime.meters._reading import Quality, Reading


class NoMeter:
    """Answers unknown, for the reason given."""

    name = "none"
    scope = "nothing"
    quality: Quality = "unknown"

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def read(self, now_s: float) -> Reading:
        return Reading(None, self._reason)
