"""Which kind of device a file system is of, by what its kernel and its system say; `root` may be a recorded board.

What is then known of it is left to the profile's file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from profiles import Profile, Signs, load, names

_RELEASE = re.compile(r"# R(\d+) \(release\), REVISION: ([\d.]+),.*?BOARD: ([\w-]+)")


@dataclass(frozen=True)
class L4t:
    """A release of NVIDIA's Jetson Linux, such as 36 and "4.3"; `board` is no reliable name from 35 on."""

    major: int
    revision: str
    board: str


@dataclass(frozen=True)
class Seen:
    """What a file system says of its device; empty, False or None where it says nothing."""

    compatible: tuple[str, ...]
    model: str
    l4t: L4t | None
    x86: bool
    battery: bool
    nvidia: bool


def look(root: Path = Path("/")) -> Seen:
    """Read the signs under `root`; a file that cannot be read says nothing."""
    cpu = _text(root / "proc/cpuinfo")
    model = _text(root / "proc/device-tree/model").strip("\0\n ")
    of_cpu = re.search(r"^Model\s*: (.+)$", cpu, re.MULTILINE)
    return Seen(
        tuple(each for each in _text(root / "proc/device-tree/compatible").strip("\n").split("\0") if each),
        model or (of_cpu[1].strip() if of_cpu else ""),
        find_l4t(root),
        re.search(r"^vendor_id\s*: (GenuineIntel|AuthenticAMD)$", cpu, re.MULTILINE) is not None,
        any(_text(place / "scope").strip() != "Device" for place in (root / "sys/class/power_supply").glob("BAT*")),
        (root / "proc/driver/nvidia/version").is_file(),
    )


def find_l4t(root: Path) -> L4t | None:
    """The L4T release that is installed; None on anything but a Jetson, and in containers that hide it."""
    found = _RELEASE.search(_text(root / "etc/nv_tegra_release"))
    return None if found is None else L4t(int(found[1]), found[2], found[3])


def detect(root: Path = Path("/")) -> str | None:
    """The name of the profile that fits, None where none does."""
    seen = look(root)
    for fits in (_has_module, _has_model, _has_board, _is_machine):
        found = next((name for name in names() if fits(load(name).signs, seen)), None)
        if found is not None:
            return found
    return None


def applies(profile: Profile, l4t: L4t | None) -> tuple[str, ...]:
    """What is unsupported there, as lines; where the release is unknown, also what depends on it."""
    return tuple(
        f"{each.what}: {each.why}; {each.fix}"
        for each in profile.unsupported
        if each.before_l4t is None or l4t is None or l4t.major < each.before_l4t
    )


def _has_module(signs: Signs, seen: Seen) -> bool:
    return any(module in entry for module in signs.modules for entry in seen.compatible)


def _has_model(signs: Signs, seen: Seen) -> bool:
    return any(model in seen.model for model in signs.models)


def _has_board(signs: Signs, seen: Seen) -> bool:
    return seen.l4t is not None and seen.l4t.board in signs.l4t_boards


def _is_machine(signs: Signs, seen: Seen) -> bool:
    """An x86 machine with a battery is a laptop, whatever graphics it has."""
    if not signs.x86 or not seen.x86:
        return False
    return seen.battery if signs.battery else seen.nvidia and not seen.battery


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
