"""A laptop's batteries: the power that leaves them, which is the whole machine's (devices.md 1.5).

They say so only while they discharge and nothing else feeds the machine, and refresh every 1 to 30 seconds.
"""

from __future__ import annotations

from pathlib import Path

from contract.errors import why
from edge_runtime.meters._pieces import Timing
from edge_runtime.meters._reading import Quality
from edge_runtime.meters._sampled import SampledMeter, Sampling

SAMPLING = Sampling(interval_s=2.0, gap_most_s=10.0, timing=Timing(doubt_s=30.0))


class BatterySensor:
    """Adds up the batteries that discharge, while they are all that feeds the machine."""

    name = "battery"
    quality: Quality = "measured"

    def __init__(self, supplies: Path, batteries: list[Path]) -> None:
        """`supplies` is the folder of all supplies: a charger may come and go."""
        self.scope = f"whole machine ({' + '.join(folder.name for folder in batteries)})"
        self._supplies, self._batteries = supplies, batteries

    def read_w(self) -> float:
        """Watts. Raises: OSError or ValueError when they do not show what the whole machine takes."""
        chargers = [folder.name for folder in sorted(self._supplies.iterdir()) if _is_charger_in_use(folder)]
        if chargers:
            raise ValueError(f"{' and '.join(chargers)} feeds the machine: mains power is not seen here")
        discharging = []
        for folder in self._batteries:
            if _text(folder / "present") == "0":  # an empty bay
                continue
            status = (folder / "status").read_text().strip()
            if status == "Charging":
                raise ValueError(f"{folder.name} is charged, from mains or from a battery beside it")
            if status == "Discharging":
                discharging.append(folder)
        if not discharging:
            raise ValueError("no battery discharges: the machine runs on mains, whose power is not seen here")
        return sum(map(_power_w, discharging))


def open_battery(root: Path) -> tuple[SampledMeter | None, list[str]]:
    """A meter on all system batteries, or None with the reason."""
    supplies = root / "sys/class/power_supply"
    batteries = [folder for folder in sorted(supplies.glob("*")) if _feeds_the_machine(folder)]
    if not batteries:
        return None, ["battery: none under /sys/class/power_supply"]
    sensor = BatterySensor(supplies, batteries)
    try:
        sensor.read_w()
    except (OSError, ValueError) as error:
        return None, [f"battery: {why(error)}"]
    return SampledMeter(sensor, SAMPLING), []


def _feeds_the_machine(folder: Path) -> bool:
    """Not a mouse's, which shows no power, and no supply; drivers name batteries as they like."""
    shows_power = any(folder.glob("power_now")) or any(folder.glob("current_now"))
    is_battery = folder.name.startswith("BAT") or (_text(folder / "type") == "Battery" and shows_power)
    return is_battery and _text(folder / "scope") != "Device"


def _is_charger_in_use(folder: Path) -> bool:
    """Mains, USB and whatever else is no battery and `online` (1, or 2 where its voltage was negotiated)."""
    is_battery = folder.name.startswith("BAT") or _text(folder / "type") == "Battery"
    return not is_battery and _text(folder / "scope") != "Device" and _text(folder / "online") not in ("", "0")


def _power_w(folder: Path) -> float:
    """Some report power, some current and voltage; the sign of a discharge is either. 0 is not known yet, not nothing.

    Raises: OSError or ValueError.
    """
    try:
        watts = int((folder / "power_now").read_text()) / 1e6
    except (OSError, ValueError):
        current, voltage = (int((folder / f"{name}_now").read_text()) for name in ("current", "voltage"))
        watts = current * voltage / 1e12
    if watts == 0.0:
        raise ValueError(f"{folder.name} discharges and shows 0 W")
    return abs(watts)


def _text(path: Path) -> str:
    """Empty where it is missing or cannot be read: drivers answer some of their files with an error."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""
