"""Energy meters: one file each, and the door that finds the one that works here.

A meter counts joules since it was opened, so a stage is a subtraction; attributing them to stages is left to `stages`.
Unknown is None with a reason, never 0 (PW-01). The file's name is the meter's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edge_runtime.meters._reading import Reading
from edge_runtime.meters.none import NoMeter
from edge_runtime.meters.rapl import open_rapl

__all__ = ["Meter", "Probe", "Reading", "probe"]


class Meter(Protocol):
    """Cumulative energy of a declared scope."""

    name: str
    scope: str  # what is inside the figure, e.g. "cpu packages and dram"

    def read(self, now_s: float) -> Reading:
        """Joules since the meter was opened. Never raises for a transient fault; call it at least every few seconds."""


@dataclass(frozen=True)
class Probe:
    """The meter to use, and one line for each that was not usable or only in part."""

    meter: Meter
    reasons: tuple[str, ...]


def probe(root: Path = Path("/")) -> Probe:
    """Try each meter in the order of preference; the last, none, always answers.

    `root` is the file system to look in, so that a test can give a made-up one.
    """
    rapl, reasons = open_rapl(root)
    if rapl is not None:
        return Probe(rapl, tuple(reasons))
    return Probe(NoMeter("; ".join(reasons)), tuple(reasons))
