"""Shunt monitors of NVIDIA Jetson boards and of power HATs: INA3221, INA238, INA219 and INA226 (devices.md 1.1).

Two kernel drivers lay out an INA3221 in two ways. Boards have rails that are fed from other rails: what is added up is
declared for every known set of labels, and a set that is not known has no total.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.meters._reading import Quality
from edge_runtime.meters._sampled import SampledMeter, Sampling

SAMPLING = Sampling(interval_s=0.1)  # the driver waits for a conversion: some ms for each value
_SUM_LABEL = "sum of shunt voltages"  # no rail
_UNUSED_LABEL = "NC"  # not connected; reading it fails with ENODATA


@dataclass(frozen=True)
class TotalRule:
    """Which rails make the total where all of `labels` are there."""

    labels: tuple[str, ...]
    scope: str


# In the order in which they are tried: a parent rail before the rails that it feeds.
TOTALS = (
    TotalRule(("VIN",), "carrier input"),  # AGX Thor's INA238
    TotalRule(("VDD_IN",), "module input"),  # Orin Nano, Orin NX, Xavier NX
    TotalRule(("POM_5V_IN",), "module input"),  # Jetson Nano
    TotalRule(("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"), "module rails"),  # AGX Orin: VIN_SYS_5V0 feeds VDDQ
    TotalRule(("VDD_GPU", "VDD_CPU_SOC_MSS", "VIN_SYS_5V0"), "module rails"),  # AGX Thor without its INA238
    TotalRule(("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"), "module rails"),  # AGX Xavier
    TotalRule(("HAT",), "behind the HAT's shunt"),
)

Reader = Callable[[], float]  # watts; raises OSError or ValueError


class InaSensor:
    """Adds up the rails of a board's total."""

    name = "ina"
    quality: Quality = "measured"

    def __init__(self, rails: Mapping[str, Reader], scope: str) -> None:
        self.scope = f"{scope} ({' + '.join(rails)})"
        self._rails = rails

    def read_w(self) -> float:
        """Watts of all rails. Raises: OSError or ValueError when one cannot be read: part of a sum is no sum."""
        return sum(read() for read in self._rails.values())


def open_ina(root: Path) -> tuple[SampledMeter | None, list[str]]:
    """A meter on the declared total of the board, or None; the reasons say what is missing."""
    rails = find_rails(root)
    for rule in TOTALS:
        if all(label in rails for label in rule.labels):
            sensor = InaSensor({label: rails[label] for label in rule.labels}, rule.scope)
            try:
                sensor.read_w()
            except (OSError, ValueError) as error:
                return None, [f"ina: {sensor.scope} cannot be read ({error})"]
            return SampledMeter(sensor, SAMPLING), []
    if rails:
        return None, [f"ina: no total is known for the rails {', '.join(sorted(rails))}"]
    return None, ["ina: no INA3221, INA238, INA219 or INA226 under /sys/bus/i2c/drivers"]


def find_rails(root: Path) -> dict[str, Reader]:
    """Every labelled rail of the board, by its label."""
    drivers = root / "sys/bus/i2c/drivers"
    rails: dict[str, Reader] = {}
    for device in sorted(drivers.glob("ina3221/*/hwmon/hwmon*")):  # L4T 34 and later; numbers change between boots
        rails.update(_hwmon_rails(device))
    for device in sorted(drivers.glob("ina3221x/*/iio:device*")):  # L4T 32
        rails.update(_iio_rails(device))
    for device in sorted(drivers.glob("ina238/*/hwmon/hwmon*")):
        if _text(device / "in1_label") == "VIN":
            rails["VIN"] = _microwatts(device / "power1_input")
    for device in sorted(drivers.glob("ina2xx/*/hwmon/hwmon*")):  # INA219 and INA226
        rails["HAT"] = _microwatts(device / "power1_input")
    return rails


def _hwmon_rails(device: Path) -> dict[str, Reader]:
    """Millivolts times milliamperes: this driver has no power."""
    rails = {}
    for path in sorted(device.glob("in*_label")):
        found, label = re.fullmatch(r"in(\d+)_label", path.name), _text(path)
        if found and label and label not in (_UNUSED_LABEL, _SUM_LABEL):
            rails[label] = _volts_times_amperes(device / f"in{found[1]}_input", device / f"curr{found[1]}_input")
    return rails


def _iio_rails(device: Path) -> dict[str, Reader]:
    """`ui_input_N` is "<mV> <mA>" of one conversion; where it is missing, volts and amperes are of two."""
    rails = {}
    for path in sorted(device.glob("rail_name_*")):
        label, number = _text(path), path.name.rpartition("_")[2]
        if not label or label == _UNUSED_LABEL:
            continue
        both = device / f"ui_input_{number}"
        if both.exists():
            rails[label] = _both_at_once(both)
        else:
            volts, amperes = device / f"in_voltage{number}_input", device / f"in_current{number}_input"
            rails[label] = _volts_times_amperes(volts, amperes)
    return rails


def _volts_times_amperes(volts: Path, amperes: Path) -> Reader:
    return lambda: int(volts.read_text()) * int(amperes.read_text()) / 1e6


def _both_at_once(path: Path) -> Reader:
    def read() -> float:
        millivolts, milliamperes = path.read_text().split()
        return int(millivolts) * int(milliamperes) / 1e6

    return read


def _microwatts(path: Path) -> Reader:
    return lambda: int(path.read_text()) / 1e6


def _text(path: Path) -> str:
    """A label; empty where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""
