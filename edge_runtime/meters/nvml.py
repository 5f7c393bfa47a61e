"""NVIDIA graphics cards by NVML's energy counters, through the optional package nvidia-ml-py (devices.md 1.4).

On Jetson boards NVML starts and answers nothing: whether it works is found by reading it. The counter moves about every
100 ms, so that a stage shorter than some seconds is known roughly only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from edge_runtime.meters._pieces import Timing
from edge_runtime.meters._reading import CounterLostError, Quality
from edge_runtime.meters._sampled import SampledMeter, Sampling

# Often enough to see when the counter changes.
SAMPLING = Sampling(interval_s=0.1, gap_most_s=60.0, fine_interval_s=0.02, timing=Timing(window_s=0.1, counts=True))


class NvmlSensor:
    """Adds up the boards' counters, which start with their driver."""

    name = "nvml"
    quality: Quality = "measured"

    def __init__(self, nvml: Any, handles: list[Any], scope: str | None = None) -> None:
        self.scope = scope or f"{len(handles)} GPU board(s)"
        self._nvml, self._handles = nvml, handles
        self._before_mj = [0] * len(handles)

    def read_j(self) -> float:
        """Joules. Raises: OSError when a board does not answer, CounterLostError when its driver was loaded again."""
        try:
            counted_mj = [int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(each)) for each in self._handles]
        except self._nvml.NVMLError as error:
            raise OSError(str(error)) from error
        before_mj, self._before_mj = self._before_mj, counted_mj
        if any(now < before for now, before in zip(counted_mj, before_mj, strict=True)):
            raise CounterLostError("the counter went back; the driver was loaded again")
        return sum(counted_mj) / 1e3


def open_nvml(load: Callable[[str], Any] = importlib.import_module) -> tuple[SampledMeter | None, list[str]]:
    """A meter on every board that counts energy, or None; the reasons name what is missing either way."""
    try:
        nvml = load("pynvml")
    except ImportError:
        return None, ["nvml: nvidia-ml-py is not installed (pip install cutlayer[nvml])"]
    try:
        nvml.nvmlInit()
        boards = range(nvml.nvmlDeviceGetCount())
    except Exception as error:  # NVML's own, or whatever a package of another version makes of the call
        return None, [f"nvml: it cannot be read ({error})"]
    handles: dict[int, Any] = {}
    reasons = []
    for number in boards:
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
            handles[number] = handle
        except Exception as error:
            reasons.append(f"nvml: board {number} shows no energy ({error})")
    if not handles:
        return None, reasons or ["nvml: there is no GPU"]
    note = "; ".join(f"partial: {reason}" for reason in reasons) or None
    scope = f"GPU boards {', '.join(map(str, handles))} of {len(boards)}" if reasons else None
    sensor = NvmlSensor(nvml, list(handles.values()), scope)
    return SampledMeter(sensor, _sampling(len(handles)), note=note), reasons


def _sampling(boards: int) -> Sampling:
    """Counters of several boards change one after the other, so that their sum is of no single moment."""
    timing = SAMPLING.timing
    return SAMPLING if boards == 1 else replace(SAMPLING, timing=replace(timing, doubt_s=timing.window_s))
