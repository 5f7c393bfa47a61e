"""The power controller of a Raspberry Pi 5, by `vcgencmd pmic_read_adc` (devices.md 1.2).

Its twelve rails leave out what hangs on 5 V: USB, HATs, NVMe, the fan. The sum is what the board takes behind its
regulators, which is less than what its supply gives; it is stated as it is, without a community's regression.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from contract.errors import why
from edge_runtime.meters._pieces import Timing
from edge_runtime.meters._reading import Quality
from edge_runtime.meters._sampled import SampledMeter, Sampling
from edge_runtime.meters._vcgencmd import Ask, vcgencmd_of

# Every read starts a process; what the controller averages over is not documented.
SAMPLING = Sampling(interval_s=0.5, fine_interval_s=0.1, timing=Timing(doubt_s=0.1))
QUESTION = "pmic_read_adc"
# Compute Modules and keyboards of the fifth generation are asked too; older boards have nothing that could answer.
BOARDS = ("Raspberry Pi 5", "Raspberry Pi Compute Module 5")
_RAIL = re.compile(r"\s*\w+_[AV]\b|.*\b(?:current|volt)\(")
_LINE = re.compile(r"\s*(\w+)_([AV])\s+(?:current|volt)\(\d+\)=(\S+)[AV]\s*")


class PiPmicSensor:
    """Adds up volts times amperes of every rail that has both."""

    name = "pi_pmic"
    scope = "PMIC rails"
    quality: Quality = "measured"

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._rails: frozenset[str] | None = None  # of its first answer

    def read_w(self) -> float:
        """Watts. Raises: OSError or ValueError when it does not answer as it should, and with the same rails."""
        watts = rails_w(self._ask(QUESTION))
        self._rails = frozenset(watts) if self._rails is None else self._rails
        if self._rails != watts.keys():
            changed = ", ".join(sorted(self._rails ^ watts.keys()))
            raise ValueError(f"vcgencmd {QUESTION}: other rails than before ({changed})")
        return sum(watts.values())


def rails_w(text: str) -> Mapping[str, float]:
    """Watts of each rail in the text of `pmic_read_adc`.

    Raises: ValueError where a value is no number, a current has no voltage, or there is none.
    """
    found: dict[str, dict[str, float]] = {"A": {}, "V": {}}
    for line in text.splitlines():
        if _RAIL.match(line):
            quantity, rail, value = _value(line)
            found[quantity][rail] = value
    amperes, volts = found["A"], found["V"]
    missing = sorted(amperes.keys() - volts.keys())
    if not amperes or missing:
        raise ValueError(f"vcgencmd {QUESTION}: no voltage of {missing[0]}" if missing else "it has no currents")
    return {rail: value * volts[rail] for rail, value in amperes.items()}


def _value(line: str) -> tuple[str, str, float]:
    """A or V, the rail, and how many: a line that is left out would be a rail that is left out."""
    match = _LINE.fullmatch(line)
    try:
        value = float(match[3]) if match else math.nan
    except ValueError:
        value = math.nan
    if match is None or not math.isfinite(value):
        raise ValueError(f"vcgencmd {QUESTION}: {line.strip()[:60]!r} shows no number")
    return match[2], match[1], value


def open_pi_pmic(root: Path, ask: Ask | None = None) -> tuple[SampledMeter | None, list[str]]:
    """A meter where the board is a Raspberry Pi 5, or None with the reason."""
    model = root / "proc/device-tree/model"
    try:
        board = model.read_text().strip("\0\n")
    except (OSError, ValueError):
        return None, ["pi_pmic: not a Raspberry Pi"]
    if not board.startswith(BOARDS):
        return None, [f"pi_pmic: {board} has no power sensor; use a smart plug or a USB meter"]
    sensor = PiPmicSensor(ask or vcgencmd_of(root))
    try:
        sensor.read_w()
    except (OSError, ValueError) as error:
        return None, [f"pi_pmic: {why(error)}"]
    return SampledMeter(sensor, SAMPLING), []
