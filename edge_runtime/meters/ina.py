"""Shunt monitors of NVIDIA Jetson boards and of power HATs: INA3221, INA238, INA219 and INA226 (devices.md 1.1).

Two kernel drivers lay out an INA3221 in two ways. Boards have rails that are fed from other rails: what is added up is
declared for every known set of labels, and a set that is not known has no total.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from contract.errors import why
from edge_runtime.meters._pieces import Timing
from edge_runtime.meters._reading import Quality
from edge_runtime.meters._sampled import SampledMeter, Sampling
from edge_runtime.meters._sysfs import read_line

SAMPLING = Sampling(interval_s=0.1, fine_interval_s=0.01)  # the driver waits for a conversion: some ms for each value
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
    TotalRule(("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"), "module rails"),  # AGX Xavier
    TotalRule(("HAT",), "behind the HAT's shunt"),
)

# How long one figure is gathered, where the board does not say (milliseconds, as `update_interval` has it).
INTERVAL_MS = 7.0  # one sample of three channels, 1.1 ms each for volts and amperes
CONTINUOUS = Timing(window_s=0.422, lag_s=0.211, doubt_s=0.211)  # L4T 32: 64 samples; shown until the next are done
TRIGGERED = Timing(doubt_s=0.422)  # L4T 32: one conversion at the read, unless the board's device tree has it otherwise
VOLT_STEP_V = 0.008
SHUNT_STEP_V = 40e-6
SHUNT_OHM = 0.005  # where the board does not say

Reader = Callable[[], float]  # watts; raises OSError or ValueError


@dataclass(frozen=True)
class Rail:
    """One rail of a board."""

    read_w: Reader
    timing: Timing


class InaSensor:
    """Adds up the rails of a board's total."""

    name = "ina"
    quality: Quality = "measured"

    def __init__(self, rails: Mapping[str, Rail], scope: str) -> None:
        self.scope = f"{scope} ({' + '.join(rails)})"
        self._rails = rails

    def read_w(self) -> float:
        """Watts of all rails. Raises: OSError or ValueError when one cannot be read: part of a sum is no sum."""
        return sum(rail.read_w() for rail in self._rails.values())


def open_ina(root: Path) -> tuple[SampledMeter | None, list[str]]:
    """A meter on the declared total of the board, or None; the reasons say what is missing."""
    rails = find_rails(root)
    for rule in TOTALS:
        if all(label in rails for label in rule.labels):
            chosen = {label: rails[label] for label in rule.labels}
            sensor = InaSensor(chosen, rule.scope)
            try:
                sensor.read_w()
            except (OSError, ValueError) as error:
                return None, [f"ina: {sensor.scope} cannot be read ({why(error)})"]
            return SampledMeter(sensor, replace(SAMPLING, timing=_joint(chosen.values()))), []
    if rails:
        return None, [f"ina: no total is known for the rails {', '.join(sorted(rails))}"]
    return None, ["ina: no INA3221, INA238, INA219 or INA226 under /sys/bus/i2c/drivers"]


def _joint(rails: Iterable[Rail]) -> Timing:
    """Of rails that are read one after the other: the slowest's, with the steps of all."""
    timings = [rail.timing for rail in rails]
    slowest = max(timings, key=lambda timing: timing.window_s + timing.doubt_s)
    return replace(slowest, step_w=sum(timing.step_w for timing in timings))


def find_rails(root: Path) -> dict[str, Rail]:
    """Every labelled rail of the board, by its label; where two have the same, by label and place: which is which, and
    whether one feeds the other, nobody knows."""
    found = list(_found_rails(root / "sys/bus/i2c/drivers"))
    times = Counter(label for label, _, _ in found)
    return {label if times[label] == 1 else f"{label} {place}": rail for label, place, rail in found}


def _found_rails(drivers: Path) -> Iterator[tuple[str, str, Rail]]:
    """Label, place (bus, address and channel) and rail."""
    for device in sorted(drivers.glob("ina3221/*/hwmon/hwmon*")):  # L4T 34 and later; numbers change between boots
        yield from _hwmon_rails(device)
    for device in sorted(drivers.glob("ina3221x/*/iio:device*")):  # L4T 32
        yield from _iio_rails(device)
    for device in sorted(drivers.glob("ina238/*/hwmon/hwmon*")):
        label = _text(device / "in1_label")
        yield label if label == "VIN" else f"INA238 {label}".strip(), *_chip_rail(device)
    for device in sorted(drivers.glob("ina2xx/*/hwmon/hwmon*")):  # INA219 and INA226
        yield "HAT", *_chip_rail(device)


def _chip_rail(device: Path) -> tuple[str, Rail]:
    """Place and rail of a chip of one channel, which shows power itself."""
    return device.parent.parent.name, Rail(_microwatts(device / "power1_input"), _hwmon_timing(device))


def _hwmon_rails(device: Path) -> Iterator[tuple[str, str, Rail]]:
    """Millivolts times milliamperes: this driver has no power."""
    for path in sorted(device.glob("in*_label")):
        found, label = re.fullmatch(r"in(\d+)_label", path.name), _text(path)
        if found and label and label not in (_UNUSED_LABEL, _SUM_LABEL):
            volts, amperes = device / f"in{found[1]}_input", device / f"curr{found[1]}_input"
            step_w = _step_w(volts, amperes, device / f"shunt{found[1]}_resistor")
            rail = Rail(_volts_times_amperes(volts, amperes), replace(_hwmon_timing(device), step_w=step_w))
            yield label, f"{device.parent.parent.name}:{found[1]}", rail


def _iio_rails(device: Path) -> Iterator[tuple[str, str, Rail]]:
    """`ui_input_N` is "<mV> <mA>" of one conversion; where it is missing, volts and amperes are of two."""
    timing = CONTINUOUS if _text(device / "running_mode") == "1" else TRIGGERED
    for path in sorted(device.glob("rail_name_*")):
        label, number = _text(path), path.name.rpartition("_")[2]
        if not label or label == _UNUSED_LABEL:
            continue
        both = device / f"ui_input_{number}"
        volts, amperes = device / f"in_voltage{number}_input", device / f"in_current{number}_input"
        read_w = _both_at_once(both) if both.exists() else _volts_times_amperes(volts, amperes)
        step_w = _step_w(volts, amperes, device / f"shunt{number}_resistor")
        yield label, f"{device.parent.name}:{number}", Rail(read_w, replace(timing, step_w=step_w))


def _hwmon_timing(device: Path) -> Timing:
    """The driver waits for a conversion at the read, of volts first and of amperes then."""
    interval_s = _number(device / "update_interval", INTERVAL_MS) / 1e3
    return Timing(window_s=interval_s, doubt_s=interval_s)


def _step_w(volts: Path, amperes: Path, shunt: Path) -> float:
    """The distance between two powers that a rail can show, at the volts and amperes of now."""
    step_a = SHUNT_STEP_V / (_number(shunt, SHUNT_OHM * 1e6) / 1e6)
    return step_a * _number(volts, 5000.0) / 1e3 + VOLT_STEP_V * _number(amperes, 0.0) / 1e3


def _number(path: Path, otherwise: float) -> float:
    """What a file of the kernel's says; `otherwise` where it is missing, unreadable or 0."""
    try:
        return float(path.read_text()) or otherwise
    except (OSError, ValueError):
        return otherwise


def _volts_times_amperes(volts: Path, amperes: Path) -> Reader:
    millivolts, milliamperes = str(volts), str(amperes)
    return lambda: int(read_line(millivolts)) * int(read_line(milliamperes)) / 1e6


def _both_at_once(path: Path) -> Reader:
    both = str(path)

    def read() -> float:
        millivolts, milliamperes = read_line(both).split()
        return int(millivolts) * int(milliamperes) / 1e6

    return read


def _microwatts(path: Path) -> Reader:
    microwatts = str(path)
    return lambda: int(read_line(microwatts)) / 1e6


def _text(path: Path) -> str:
    """A label; empty where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""
