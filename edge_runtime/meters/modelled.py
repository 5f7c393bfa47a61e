"""Energy as two constants say it, idle and busy, and how busy the CPUs were: a model, for where nothing measures.

It is off unless the device's own configuration asks for it, and is never compared with what is measured. Constants are
handed in; the README's table of boards and `profiles` have some.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from contract.errors import ConfigError, why
from edge_runtime.meters._pieces import Timing
from edge_runtime.meters._reading import Quality
from edge_runtime.meters._sampled import SampledMeter, Sampling

BAND = 0.5  # of the energy: what constants of another board of the same kind are worth
POWER_MOST_W = 10_000.0


@dataclass(frozen=True)
class PowerModel:
    """Watts with nothing to do and with every CPU busy; `source` says whence. Calibrated: on this very device."""

    idle_w: float
    busy_w: float
    source: str
    calibrated: bool = False


class ModelledSensor:
    """Counts idle power for the time that passed, and what is above it for the time that CPUs were busy."""

    name = "modelled"
    quality: Quality = "modelled"

    def __init__(self, model: PowerModel, busy_s: Callable[[], float], clock: Callable[[], float]) -> None:
        """`busy_s` counts seconds in which a CPU was busy, as a mean over all CPUs."""
        self.scope = f"model of {model.source}: {model.idle_w:g} W idle, {model.busy_w:g} W with all CPUs busy"
        self._model, self._busy_s, self._clock = model, busy_s, clock

    def read_j(self) -> float:
        """Joules. Raises: OSError or ValueError when it is not known how busy the CPUs are."""
        model = self._model
        return model.idle_w * self._clock() + (model.busy_w - model.idle_w) * self._busy_s()


def open_modelled(
    model: PowerModel,
    root: Path = Path("/"),
    clock: Callable[[], float] = time.monotonic,
    start: Callable[[SampledMeter], None] | None = None,
) -> tuple[SampledMeter | None, list[str]]:
    """A meter on the model, or None with the reason."""
    sensor = ModelledSensor(model, lambda: busy_seconds((root / "proc/stat").read_text()), clock)
    try:
        sensor.read_j()
    except (OSError, ValueError) as error:
        return None, [f"modelled: it is not known how busy the CPUs are ({why(error)})"]
    timing = Timing(window_s=0.01, share=0.0 if model.calibrated else BAND, counts=True)
    sampling = Sampling(interval_s=0.1, gap_most_s=60.0, timing=timing)
    return SampledMeter(sensor, sampling, clock, start, "modelled, not measured"), []


def busy_seconds(text: str, ticks_per_s: int | None = None) -> float:
    """Seconds of /proc/stat that were neither idle nor spent waiting for a disk, as a mean over all CPUs.

    Raises: ValueError when it is not such a text.
    """
    lines = [line.split() for line in text.splitlines()]
    cpus = sum(1 for words in lines if words and words[0].startswith("cpu") and words[0] != "cpu")
    total = next((words[1:] for words in lines if words and words[0] == "cpu"), [])
    if not cpus or len(total) < 8:
        raise ValueError("/proc/stat has no line of all CPUs")
    user, nice, system, _, _, irq, softirq, steal = map(int, total[:8])  # guests are in user and nice already
    return (user + nice + system + irq + softirq + steal) / (ticks_per_s or os.sysconf("SC_CLK_TCK")) / cpus


def read_model(text: str | None) -> PowerModel | None:
    """The model that a setting `IDLE:BUSY` in watts asks for; None where there is none. Raises: ConfigError."""
    if text is None:
        return None
    try:
        idle_w, busy_w = map(float, text.split(":"))
        if not 0.0 <= idle_w <= busy_w <= POWER_MOST_W or busy_w == 0.0:
            raise ValueError(text)
    except ValueError as error:
        raise ConfigError(
            f"power_model should be IDLE:BUSY in watts, such as 2.5:9, found {text!r}", "correct --power-model"
        ) from error
    return PowerModel(idle_w, busy_w, "this device's configuration")
