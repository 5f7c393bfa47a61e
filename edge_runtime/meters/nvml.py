"""NVIDIA graphics cards by NVML's energy counters, through the optional package nvidia-ml-py (devices.md 1.4).

On Jetson boards NVML starts and answers nothing: whether it works is found by reading it. The counter moves about every
100 ms, so that a stage shorter than some seconds is known roughly only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from edge_runtime.meters._reading import Quality, Reading


class NvmlMeter:
    """Adds up the boards' counters, which start with their driver."""

    name = "nvml"
    quality: Quality = "measured"

    def __init__(self, nvml: Any, handles: list[Any]) -> None:
        self.scope = f"{len(handles)} GPU board(s)"
        self._nvml, self._handles = nvml, handles
        self._first_mj: int | None = None

    def read(self, now_s: float) -> Reading:
        """Joules since the first read; unknown where a board does not answer or its driver was loaded again."""
        try:
            counted_mj = sum(int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(each)) for each in self._handles)
        except self._nvml.NVMLError as error:
            return Reading(None, f"nvml: {error}")
        if self._first_mj is None:
            self._first_mj = counted_mj
        if counted_mj < self._first_mj:
            return Reading(None, "nvml: the counter went back; the driver was loaded again")
        return Reading((counted_mj - self._first_mj) / 1e3)


def open_nvml(load: Callable[[str], Any] = importlib.import_module) -> tuple[NvmlMeter | None, list[str]]:
    """A meter on every board that counts energy, or None with the reason."""
    try:
        nvml = load("pynvml")
    except ImportError:
        return None, ["nvml: nvidia-ml-py is not installed"]
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
        for handle in handles:
            nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError as error:
        return None, [f"nvml: it cannot be read ({error})"]
    if not handles:
        return None, ["nvml: there is no GPU"]
    return NvmlMeter(nvml, handles), []
