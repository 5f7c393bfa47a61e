"""A laptop's batteries: the power that leaves them, which is the whole machine's (devices.md 1.5).

They say so only while they discharge, and refresh every 1 to 30 seconds.
"""

from __future__ import annotations

from pathlib import Path

from edge_runtime.meters._pieces import Timing
from edge_runtime.meters._reading import Quality
from edge_runtime.meters._sampled import SampledMeter, Sampling

SAMPLING = Sampling(interval_s=2.0, gap_most_s=10.0, timing=Timing(doubt_s=30.0))


class BatterySensor:
    """Adds up the batteries that discharge."""

    name = "battery"
    quality: Quality = "measured"

    def __init__(self, folders: list[Path]) -> None:
        self.scope = f"whole machine ({' + '.join(folder.name for folder in folders)})"
        self._folders = folders

    def read_w(self) -> float:
        """Watts. Raises: OSError or ValueError when none discharges, or one cannot be read."""
        discharging = [folder for folder in self._folders if _is_discharging(folder)]
        if not discharging:
            raise ValueError("no battery discharges: the machine runs on mains, whose power is not seen here")
        return sum(map(_power_w, discharging))


def open_battery(root: Path) -> tuple[SampledMeter | None, list[str]]:
    """A meter on all system batteries, or None with the reason."""
    places = root / "sys/class/power_supply"
    folders = [folder for folder in sorted(places.glob("*")) if _feeds_the_machine(folder)]
    if not folders:
        return None, ["battery: none under /sys/class/power_supply"]
    sensor = BatterySensor(folders)
    try:
        sensor.read_w()
    except (OSError, ValueError) as error:
        return None, [f"battery: {error}"]
    return SampledMeter(sensor, SAMPLING), []


def _feeds_the_machine(folder: Path) -> bool:
    """Not a mouse's, which shows no power, and no supply; drivers name batteries as they like."""
    shows_power = (folder / "power_now").exists() or (folder / "current_now").exists()
    is_battery = folder.name.startswith("BAT") or (_text(folder / "type") == "Battery" and shows_power)
    return is_battery and _text(folder / "scope") != "Device"


def _is_discharging(folder: Path) -> bool:
    return (folder / "status").read_text().strip() == "Discharging"


def _power_w(folder: Path) -> float:
    """Some report power, some current and voltage; the sign of a discharge is either."""
    power = folder / "power_now"
    if power.exists():
        return abs(int(power.read_text())) / 1e6
    current, voltage = (int((folder / f"{name}_now").read_text()) for name in ("current", "voltage"))
    return abs(current * voltage) / 1e12


def _text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""
