"""What a row of a reproduction cost in energy, by this machine's meter, with its quality and its reason."""

from __future__ import annotations

import time

from edge_runtime.meters import Meter, probe


def open_meter() -> Meter:
    """The meter of this machine, or one that says why there is none."""
    return probe().meter


class RowEnergy:
    """From here to `facts`; `meter` is of the whole machine: None where others work on it at the same time."""

    def __init__(self, meter: Meter | None) -> None:
        self._meter = meter
        self._before = None if meter is None else meter.read(time.monotonic())

    def facts(self) -> dict[str, float | str | None]:
        """Energy, its quality and scope, and why it is unknown where it is."""
        energy_j: float | None = None
        reason: str | None = "other rows were computed on the machine at the same time"
        if self._meter is not None and self._before is not None:
            after = self._meter.read(time.monotonic())
            reason = after.reason or self._before.reason
            if after.energy_j is not None and self._before.energy_j is not None:
                energy_j = round(after.energy_j - self._before.energy_j, 3)
        return {
            "energy_j": energy_j,
            "energy_quality": "unknown" if self._meter is None or energy_j is None else self._meter.quality,
            "energy_scope": "nothing" if self._meter is None else self._meter.scope,
            "energy_reason": None if energy_j is not None else reason,
        }
