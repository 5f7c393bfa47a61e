"""Whether the device slowed itself down: under-voltage, over-current, heat or a low clock (PW-04).

Its kernel and firmware say so. A figure of energy or time from such a run is not comparable. What follows from a flag
is left to the caller.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.clocks import ClockWatch
from edge_runtime.meters._vcgencmd import Ask, vcgencmd_of

LOOK_EVERY_S, CLOCKS_EVERY_S = 10.0, 1.0
TEMPERATURES_C = (-40.0, 150.0)  # a zone that is off shows anything

WORDS = {
    "under-voltage": "the supply's voltage fell too low: use the board's own supply and a short, thick cable",
    "frequency-capped": "the firmware capped the clock",
    "throttled": "the firmware slowed the clock down",
    "soft-temperature-limit": "the firmware's soft temperature limit was reached: cool the board",
    "oc1": "under-voltage at the module: use a stronger supply",
    "oc2": "average current over the module's limit: choose a lower power mode or a stronger supply",
    "oc3": "peak current over the module's limit: choose a lower power mode or a stronger supply",
    "package-throttle": "the CPU package slowed itself down for its heat",
    "core-throttle": "a CPU core slowed itself down for its heat",
}
_PI_BITS = {0: "under-voltage", 1: "frequency-capped", 2: "throttled", 3: "soft-temperature-limit"}
_PI_SINCE_BOOT = 16  # each bit again, so many higher


@dataclass(frozen=True)
class Flag:
    """Something that slowed the device down, or was about to."""

    name: str
    words: str


@dataclass(frozen=True)
class Snapshot:
    """What is known at one moment; a source that the device lacks is simply missing."""

    counted: Mapping[str, int]  # events since boot
    active: Mapping[str, str]  # what holds just now, and its words
    temperatures_c: Mapping[str, float]  # of each thermal zone that can be read

    @property
    def hottest_c(self) -> float | None:
        """None where no zone can be read."""
        return max(self.temperatures_c.values(), default=None)


def snapshot(root: Path = Path("/"), ask: Ask | None = None) -> Snapshot:
    """Look under `root`; a Raspberry Pi's firmware is asked through `ask`, by default as `root` says."""
    counted, active = dict(_soctherm(root)), dict(_alerts(root))
    active.update(_ina_alarms(root))
    for level in ("package", "core"):
        counts = [
            _number(path) for path in root.glob(f"sys/devices/system/cpu/cpu*/thermal_throttle/{level}_throttle_count")
        ]
        known = [count for count in counts if count is not None]
        if known:
            counted[f"{level}-throttle"] = sum(known)
    bits = _pi_bits(root, ask)
    if bits is not None:
        active.update({name: WORDS[name] for bit, name in _PI_BITS.items() if bits >> bit & 1})
        counted.update({name: bits >> bit + _PI_SINCE_BOOT & 1 for bit, name in _PI_BITS.items()})
    return Snapshot(counted, active, dict(_temperatures(root)))


class SlowdownWatch:
    """Looks at the beginning, now and then, and at the end; in between without asking a firmware, which takes long.

    Clocks are looked at once a second: one that fell counts only if it stays down.
    """

    def __init__(
        self, root: Path = Path("/"), ask: Ask | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._root, self._ask, self._clock = root, ask or vcgencmd_of(root), clock
        self._began, self._clocks = snapshot(root, self._ask), ClockWatch(root)
        self._looked_s = self._looked_at_clocks_s = clock()
        self._seen: dict[str, Flag] = {}

    def look(self) -> None:
        """Called often; looks every `LOOK_EVERY_S`, at clocks every `CLOCKS_EVERY_S`."""
        now_s = self._clock()
        if now_s - self._looked_at_clocks_s >= CLOCKS_EVERY_S:
            self._looked_at_clocks_s = now_s
            self._clocks.look(now_s)
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            self._take(snapshot(self._root, _ask_nobody))

    def flags(self) -> tuple[Flag, ...]:
        """All that happened since the beginning."""
        self._take(snapshot(self._root, self._ask))
        for name, words in self._clocks.seen.items():
            self._seen.setdefault(name, Flag(name, words))
        return tuple(self._seen[name] for name in sorted(self._seen))

    def _take(self, seen: Snapshot) -> None:
        for flag in flags(self._began, seen):
            self._seen.setdefault(flag.name, flag)


def _ask_nobody(question: str) -> str:
    raise OSError("not asked")


def flags(*snapshots: Snapshot) -> tuple[Flag, ...]:
    """What happened from the first snapshot to the last, in the order of time: counted between, or seen in any."""
    found: dict[str, str] = {}
    for before, after in zip(snapshots, snapshots[1:], strict=False):
        for name, count in after.counted.items():
            if count > before.counted.get(name, count):
                found.setdefault(name, WORDS[name])
    for each in snapshots:
        for name, words in each.active.items():
            found.setdefault(name, words)
    return tuple(Flag(name, words) for name, words in sorted(found.items()))


def _soctherm(root: Path) -> Iterator[tuple[str, int]]:
    """Over-current events of Jetson Orin and Thor."""
    for device in root.glob("sys/class/hwmon/hwmon*"):
        if _text(device / "name") == "soctherm_oc":
            for name in ("oc1", "oc2", "oc3"):
                count = _number(device / f"{name}_event_cnt")
                if count is not None:
                    yield name, count


def _alerts(root: Path) -> Iterator[tuple[str, str]]:
    """Cooling devices of Jetson boards that are alarms; a fan that turns is none."""
    for device in root.glob("sys/class/thermal/cooling_device*"):
        kind = _text(device / "type")
        if (kind.endswith("-throttle-alert") or kind == "hot-surface-alert") and (
            _number(device / "cur_state") or 0
        ) > 0:
            yield kind, f"the kernel's cooling device {kind} is on: cool the board"


def _ina_alarms(root: Path) -> Iterator[tuple[str, str]]:
    for path in root.glob("sys/bus/i2c/drivers/ina3221/*/hwmon/hwmon*/curr*_alarm"):
        channel = re.fullmatch(r"curr(\d+)_(crit|max)_alarm", path.name)
        if channel and _number(path) == 1:
            rail = _text(path.parent / f"in{channel[1]}_label") or f"channel {channel[1]}"
            yield f"{rail}-{channel[2]}-current", f"the current of {rail} is over its {channel[2]} limit"


def _pi_bits(root: Path, ask: Ask | None) -> int | None:
    """The bits of `vcgencmd get_throttled`, None where there is no such firmware."""
    if not _text(root / "proc/device-tree/model").startswith("Raspberry Pi"):
        return None
    try:
        answer = re.fullmatch(r"throttled=0x([0-9a-fA-F]+)", (ask or vcgencmd_of(root))("get_throttled").strip())
    except (OSError, ValueError):
        return None
    return int(answer[1], 16) if answer else None


def _temperatures(root: Path) -> Iterator[tuple[str, float]]:
    """Zones of blocks that are off raise or show nonsense."""
    for zone in sorted(root.glob("sys/class/thermal/thermal_zone*")):
        millidegrees = _number(zone / "temp")
        if millidegrees is not None and TEMPERATURES_C[0] < millidegrees / 1e3 < TEMPERATURES_C[1]:
            yield f"{_text(zone / 'type') or 'zone'} {zone.name.removeprefix('thermal_zone')}", millidegrees / 1e3


def _text(path: Path) -> str:
    """Empty where it cannot be read."""
    try:
        return path.read_text().strip("\0\n ")
    except (OSError, ValueError):
        return ""


def _number(path: Path) -> int | None:
    """None where it cannot be read."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
