"""The power controller of a Raspberry Pi 5, by `vcgencmd pmic_read_adc` (devices.md 1.2).

Its twelve rails leave out what hangs on 5 V: USB, HATs, NVMe, the fan. The sum is what the board takes behind its
regulators, which is less than what its supply gives; it is stated as it is, without a community's regression.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from edge_runtime.meters._reading import Quality
from edge_runtime.meters._sampled import SampledMeter, Sampling

SAMPLING = Sampling(interval_s=0.5)  # every read starts a process
TIMEOUT_S = 2.0
_LINE = re.compile(r"\s*(\w+)_([AV])\s+(?:current|volt)\(\d+\)=([\d.]+)[AV]\s*")


class PiPmicSensor:
    """Adds up volts times amperes of every rail that has both."""

    name = "pi_pmic"
    scope = "PMIC rails"
    quality: Quality = "measured"

    def __init__(self, ask: Callable[[], str]) -> None:
        self._ask = ask

    def read_w(self) -> float:
        """Watts. Raises: OSError or ValueError when it does not answer as it should."""
        return rails_w(self._ask())


def rails_w(text: str) -> float:
    """Watts in the text of `pmic_read_adc`. Raises: ValueError where a current has no voltage, or there is none."""
    found: dict[str, dict[str, float]] = {"A": {}, "V": {}}
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match:
            found[match[2]][match[1]] = float(match[3])
    amperes, volts = found["A"], found["V"]
    missing = sorted(amperes.keys() - volts.keys())
    if not amperes or missing:
        raise ValueError(f"vcgencmd pmic_read_adc: no voltage of {missing[0]}" if missing else "it has no currents")
    return sum(value * volts[rail] for rail, value in amperes.items())


def open_pi_pmic(root: Path, ask: Callable[[], str] | None = None) -> tuple[SampledMeter | None, list[str]]:
    """A meter where the board is a Raspberry Pi 5, or None with the reason."""
    model = root / "proc/device-tree/model"
    try:
        board = model.read_text().strip("\0\n")
    except (OSError, ValueError):
        return None, ["pi_pmic: not a Raspberry Pi"]
    if not board.startswith("Raspberry Pi 5"):
        return None, [f"pi_pmic: {board} has no power sensor; use a smart plug or a USB meter"]
    sensor = PiPmicSensor(ask or _vcgencmd)
    try:
        sensor.read_w()
    except (OSError, ValueError) as error:
        return None, [f"pi_pmic: {error}"]
    return SampledMeter(sensor, SAMPLING), []


def _vcgencmd() -> str:
    command = shutil.which("vcgencmd")
    if command is None:
        raise OSError("there is no vcgencmd; install the package libraspberrypi-bin or raspi-utils")
    try:
        done = subprocess.run([command, "pmic_read_adc"], capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"vcgencmd did not answer within {TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()[:200]
        raise OSError(f"vcgencmd failed ({said}); let this user into the group video, which may open /dev/vcio")
    return done.stdout
