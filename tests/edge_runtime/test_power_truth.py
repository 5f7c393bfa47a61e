"""Meters against workloads whose energy is known exactly: what a profile is worth, and what live figures promise."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from functools import partial

import pytest

from edge_runtime.meters import recording
from edge_runtime.meters._pieces import Timing
from edge_runtime.meters._sampled import SampledMeter
from edge_runtime.meters.ina import CONTINUOUS
from edge_runtime.stages import Stages
from tests.edge_runtime import power_worlds
from tests.edge_runtime.power_worlds import Workload, World

FAST_INA = Timing(window_s=0.007, doubt_s=0.007)
SENSORS: dict[str, Callable[[World], SampledMeter]] = {
    "ina": partial(power_worlds.ina, timing=FAST_INA),
    "ina_averaging": partial(power_worlds.ina, timing=CONTINUOUS),
    "rapl": power_worlds.rapl,
    "nvml": power_worlds.nvml,
    "plug": power_worlds.plug,
}
BOUNDS = {"ina": 0.25, "ina_averaging": 0.45, "rapl": 0.1, "nvml": 0.15, "plug": 2.0}
BLOCK_S = {"plug": 30.0}  # the others: 10


def profile_error(open_meter: Callable[[World], SampledMeter], block_s: float, seed: int) -> float:
    """How far a profile of one random phase is off, as a share: idle, repetitions for a block's time, idle."""
    rng = random.Random(seed)
    idle_w = rng.uniform(2.0, 4.0)
    phase = power_worlds.random_phase(rng, idle_w + 1.0)
    steps, marks_s, now_s = [(10.0, idle_w)], [10.0], 10.0
    while now_s < 10.0 + block_s:
        repetition = [(seconds * rng.uniform(0.98, 1.02), watts) for seconds, watts in phase]
        steps += repetition
        now_s += sum(seconds for seconds, _ in repetition)
        marks_s.append(now_s)
    world = World(Workload([*steps, (10.0, idle_w)]))
    meter = open_meter(world)
    meter.read(0.0)
    power_worlds.play(world, meter, [(9.0, lambda: None)], seed)
    with recording(meter) as trace:
        power_worlds.play(world, meter, [(now_s + meter.settle_s, lambda: None)], seed)
    window = trace.energy_of_repeats(marks_s)
    truth_j = world.workload.energy_j(now_s) - world.workload.energy_j(10.0)
    assert window.energy_j is not None and window.bound_j is not None and window.coverage > 0.99
    assert abs(window.energy_j - truth_j) <= window.bound_j
    return abs(window.energy_j - truth_j) / truth_j


@pytest.mark.parametrize("sensor", SENSORS)
def test_a_hundred_profiles_are_right_to_one_in_a_hundred(sensor: str) -> None:
    errors = [profile_error(SENSORS[sensor], BLOCK_S.get(sensor, 10.0), seed) for seed in range(100)]
    assert max(errors) <= 0.01


def live_errors(open_meter: Callable[[World], SampledMeter], seed: int) -> list[tuple[float, float, float, float]]:
    """Truth, error, bound and seconds of each stage of a random run, and of all together."""
    rng = random.Random(seed)
    idle_w = rng.uniform(1.0, 4.0)
    steps, spans, now_s = [(3.0, idle_w)], [], 3.0
    while now_s < 40.0:
        name, length_s, began_s = rng.choice("abcd"), 10.0 ** rng.uniform(-1.5, 1.3), now_s
        is_rare = rng.random() < 0.2  # bursts that few samples meet
        phase = [] if is_rare else power_worlds.random_phase(rng, idle_w)
        while now_s < began_s + length_s:
            for seconds, watts in phase or power_worlds.random_burst(rng, idle_w):
                steps.append((min(seconds, length_s), watts))
                now_s += steps[-1][0]
        spans.append((name, began_s, now_s))
        pause_s = rng.choice((0.0, rng.uniform(0.0, 2.0)))
        steps.append((pause_s + 1e-9, idle_w))
        now_s += steps[-1][0]
    world = World(Workload([*steps, (10.0, idle_w)]))
    meter = open_meter(world)
    meter.read(0.0)
    stages = Stages(meter, world.clock)
    events: list[tuple[float, Callable[[], object]]] = []
    for name, began_s, ended_s in spans:
        events += [(began_s, partial(stages.begin, name)), (ended_s, partial(stages.end, name))]
    events.append((now_s + stages.settle_s, lambda: None))
    power_worlds.play(world, meter, events, seed)
    truths_j = dict.fromkeys(stages.costs(), 0.0)
    for name, began_s, ended_s in spans:
        truths_j[name] += world.workload.energy_j(ended_s) - world.workload.energy_j(began_s)
    rows = []
    for truth_j, cost in zip(
        [*truths_j.values(), sum(truths_j.values())], [*stages.costs().values(), stages.total()], strict=True
    ):
        assert cost.energy_j is not None and cost.bound_j is not None, cost.reason
        rows.append((truth_j, abs(cost.energy_j - truth_j), cost.bound_j, cost.seconds))
    return rows


@pytest.mark.parametrize("sensor", SENSORS)
def test_live_energy_is_within_its_printed_bound_in_a_hundred_runs(sensor: str) -> None:
    rows = [row for seed in range(100) for row in live_errors(SENSORS[sensor], seed)]
    assert all(error_j <= bound_j for _, error_j, bound_j, _ in rows)
    long = [bound_j / truth_j for truth_j, _, bound_j, seconds in rows if seconds >= 10.0]
    assert statistics.median(long) < BOUNDS[sensor]  # a bound that holds because it is wide would say nothing
