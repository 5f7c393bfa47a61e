"""Made-up workloads whose energy is known exactly, and sensors that show them as real ones do. The clock is virtual."""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edge_runtime.meters._pieces import Timing
from edge_runtime.meters._sampled import SampledMeter
from edge_runtime.meters.ina import SAMPLING as INA_SAMPLING
from edge_runtime.meters.ina import InaSensor, Rail
from edge_runtime.meters.kasa import SAMPLING as PLUG_SAMPLING
from edge_runtime.meters.nvml import SAMPLING as NVML_SAMPLING
from edge_runtime.meters.nvml import NvmlSensor
from edge_runtime.meters.rapl import SAMPLING as RAPL_SAMPLING
from edge_runtime.meters.rapl import Domain, RaplLimits, RaplSensor

BEFORE_S = 20.0  # idle time before every workload, for sensors that look back


class Workload:
    """Power in steps."""

    def __init__(self, steps: Sequence[tuple[float, float]]) -> None:
        """Seconds and watts of each step; before the first and after the last, power is theirs."""
        self._edges_s = [0.0, *itertools.accumulate(seconds for seconds, _ in steps)]
        self._watts = [watts for _, watts in steps]
        self._joules = [0.0, *itertools.accumulate(seconds * watts for seconds, watts in steps)]

    @property
    def end_s(self) -> float:
        return self._edges_s[-1]

    def energy_j(self, at_s: float) -> float:
        """Joules from 0 to a moment; negative before it."""
        place = min(max(bisect.bisect_right(self._edges_s, at_s) - 1, 0), len(self._watts) - 1)
        return self._joules[place] + (at_s - self._edges_s[place]) * self._watts[place]


@dataclass
class World:
    """A clock that moves when told, over a workload."""

    workload: Workload
    now_s: float = 0.0

    def clock(self) -> float:
        return self.now_s

    def mean_w(self, end_s: float, window_s: float) -> float:
        """Mean power of the window that ends at a moment."""
        window_s = max(window_s, 1e-4)
        return (self.workload.energy_j(end_s) - self.workload.energy_j(end_s - window_s)) / window_s


def unstarted(meter: SampledMeter) -> None:
    """Instead of a thread: the test samples."""


def ina(world: World, timing: Timing) -> SampledMeter:
    """One rail of 5 V in steps of 8 mV and 8 mA; it refreshes at the read, or holds each figure for a window's time."""
    holds = timing.lag_s > 0.0
    phase_s = 0.4 * timing.window_s

    def read_w() -> float:
        end_s = world.now_s
        if holds:
            end_s = math.floor((end_s - phase_s) / timing.window_s) * timing.window_s + phase_s
        volts = round(5.03 / 0.008) * 0.008
        return volts * round(world.mean_w(end_s, timing.window_s) / 5.03 / 0.008) * 0.008

    timing = replace(timing, step_w=0.008 * 5.03 + 0.008 * 3.0)
    sensor = InaSensor({"VDD_IN": Rail(read_w, timing)}, "module input")
    return SampledMeter(sensor, replace(INA_SAMPLING, timing=timing), world.clock, unstarted)


class _Counter:
    """A file of microjoules that changes once in a millisecond, and wraps."""

    def __init__(self, world: World, range_uj: int) -> None:
        self._world, self._range_uj = world, range_uj

    def read_text(self) -> str:
        counted_s = math.floor(self._world.now_s * 1000.0) / 1000.0
        counted_uj = int(self._world.workload.energy_j(counted_s) * 1e6)
        return f"{(counted_uj // 61 * 61) % self._range_uj}\n"


def rapl(world: World) -> SampledMeter:
    """A package whose counter wraps every few seconds under load, in steps of 61 uJ."""
    range_uj, limits = 200_000_000, RaplLimits(power_max_w=60.0)
    domain: Any = Domain("package-0", _Counter(world, range_uj), range_uj)  # type: ignore[arg-type]
    return SampledMeter(RaplSensor([domain], limits, world.clock), RAPL_SAMPLING, world.clock, unstarted)


class _Nvml:
    """One board whose counter of millijoules changes every 100 ms."""

    class NVMLError(Exception):
        pass

    def __init__(self, world: World) -> None:
        self._world = world

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        counted_s = math.floor((self._world.now_s - 0.037) / 0.1) * 0.1 + 0.037
        return 10_000_000 + int(self._world.workload.energy_j(counted_s) * 1000.0)


def nvml(world: World) -> SampledMeter:
    return SampledMeter(NvmlSensor(_Nvml(world), [0]), NVML_SAMPLING, world.clock, unstarted)


class _Plug:
    """Mains power, averaged over a second, once a second, in steps of 1 mW, known a while later."""

    name, scope, quality = "kasa", "mains at a plug", "measured"

    def __init__(self, world: World, lag_s: float) -> None:
        self._world, self._lag_s = world, lag_s

    def read_w(self) -> float:
        shown_s = math.floor(self._world.now_s - self._lag_s)
        return round(self._world.mean_w(shown_s, 1.0), 3)


def plug(world: World, lag_s: float = 0.9) -> SampledMeter:
    """A figure is up to a second old when it is read: 0.9 to 1.9 s late."""
    return SampledMeter(_Plug(world, lag_s), PLUG_SAMPLING, world.clock, unstarted)  # type: ignore[arg-type]


def play(world: World, meter: SampledMeter, events: Sequence[tuple[float, Callable[[], object]]], seed: int) -> None:
    """Let time pass: the meter samples when it would, and each event happens at its moment."""
    rng = random.Random(seed)
    next_s = world.now_s + meter.wait_s(rng)
    for at_s, act in events:
        while next_s <= at_s:
            world.now_s = next_s
            meter.sample()
            next_s += meter.wait_s(rng)
        world.now_s = at_s
        act()


def random_phase(rng: random.Random, least_w: float) -> list[tuple[float, float]]:
    """One repetition of some work: a few steps of random length and power, from milliseconds to a second or two."""
    scale_s = 10.0 ** rng.uniform(-2.0, 0.0)
    return [(scale_s * rng.uniform(0.2, 2.0), rng.uniform(least_w, 15.0)) for _ in range(rng.randint(1, 4))]


def random_burst(rng: random.Random, idle_w: float) -> list[tuple[float, float]]:
    """Milliseconds of high power after a random time of almost none."""
    return [(rng.expovariate(4.0), idle_w + 0.3), (rng.uniform(0.001, 0.01), 15.0)]
