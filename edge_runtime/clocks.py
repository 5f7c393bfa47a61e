"""Clocks of CPU and GPU that stand below what they are set to, as the kernel's cpufreq and devfreq show them.

A governor lowers a clock that has little to do, and that is no fault. So a clock is below its target in three cases
only: its ceiling was lowered since the beginning, which is how the kernel cools; it runs below the floor that was set
at the beginning, to which `jetson_clocks` pins it; or, of a GPU, below what its own governor asks for. One look proves
little: a clock counts once it was below for `BELOW_S`, in `BELOW_LOOKS` looks in a row. What follows is left to
`throttle`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BELOW_S, BELOW_LOOKS = 3.0, 3
TOLERANCE = 0.05  # of the target: counters of a clock that is right differ by so much from one reading to the next

# Where clocks are, and what their files are called: now, floor, ceiling, and what a governor asks for just now.
_KINDS = (
    (
        "cpu", "sys/devices/system/cpu/cpufreq/policy*", 1e3,
        ("scaling_cur_freq", "scaling_min_freq", "scaling_max_freq", None),
    ),
    ("gpu", "sys/class/devfreq/*gpu*", 1.0, ("cur_freq", "min_freq", "max_freq", "target_freq")),
)  # fmt: skip


@dataclass(frozen=True)
class Clock:
    """One clock and what it was set to at the beginning, in Hz; None where it does not say."""

    name: str
    folder: Path
    unit_hz: float
    files: tuple[str, str, str, str | None]  # now, floor, ceiling, asked for
    floor_hz: float | None
    ceiling_hz: float | None

    def below(self) -> str | None:
        """In words how it is below its target just now; None where it is not, is off, or does not say."""
        now, _, ceiling, asked = self.files
        now_hz, ceiling_hz = self.read_hz(now), self.read_hz(ceiling)
        if ceiling_hz and self.ceiling_hz and ceiling_hz < (1.0 - TOLERANCE) * self.ceiling_hz:
            return f"its ceiling was lowered from {_in_mhz(self.ceiling_hz)} to {_in_mhz(ceiling_hz)}"
        asked_hz = None if asked is None else self.read_hz(asked)
        target_hz = max(self.floor_hz or 0.0, asked_hz or 0.0)
        if now_hz and now_hz < (1.0 - TOLERANCE) * target_hz:  # a GPU without power shows 0: it is off
            return f"it runs at {_in_mhz(now_hz)} where {_in_mhz(target_hz)} are set"
        return None

    def read_hz(self, name: str) -> float | None:
        """None where it cannot be read."""
        try:
            return int((self.folder / name).read_text()) * self.unit_hz
        except (OSError, ValueError):
            return None


def find_clocks(root: Path) -> Iterator[Clock]:
    """Every clock under `root`, with what it is set to now."""
    for kind, pattern, unit_hz, files in _KINDS:
        for folder in sorted(root.glob(pattern)):
            bare = Clock(f"{kind}-clock {folder.name}", folder, unit_hz, files, None, None)
            floor_hz, ceiling_hz = bare.read_hz(files[1]), bare.read_hz(files[2])
            # A turbo clock is nobody's promise, even where the floor is set to it: x86 says what it can hold.
            held_hz = bare.read_hz("base_frequency")
            if floor_hz and held_hz:
                floor_hz = min(floor_hz, held_hz)
            yield Clock(bare.name, folder, unit_hz, files, floor_hz, ceiling_hz)


class ClockWatch:
    """Looks at all clocks whenever it is asked to, and remembers those that stayed below their target."""

    def __init__(self, root: Path) -> None:
        self.seen: dict[str, str] = {}  # name of a clock that was below for long, and how it was
        self._clocks = tuple(find_clocks(root))
        self._since: dict[str, tuple[float, int]] = {}  # since when a clock is below, and in how many looks

    def look(self, now_s: float) -> None:
        """Called about once a second."""
        for clock in self._clocks:
            words = clock.below()
            if words is None:
                self._since.pop(clock.name, None)
                continue
            since_s, looks = self._since.get(clock.name, (now_s, 0))
            self._since[clock.name] = since_s, looks + 1
            if now_s - since_s >= BELOW_S and looks + 1 >= BELOW_LOOKS:
                self.seen.setdefault(clock.name, f"{words}, for {BELOW_S:g} s or more")


def _in_mhz(hertz: float) -> str:
    return f"{hertz / 1e6:.0f} MHz"
