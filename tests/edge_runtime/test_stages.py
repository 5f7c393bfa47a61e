from __future__ import annotations

import threading

import pytest

from edge_runtime.meters._pieces import Piece, Timing
from edge_runtime.meters._reading import Quality
from edge_runtime.meters._sampled import SampledMeter, Sampling
from edge_runtime.meters.none import NoMeter
from edge_runtime.stages import ENDED_MOST, RECENT_MOST, UNHEARD_MOST_S, Stages

EXACT = Sampling(interval_s=0.1, timing=Timing(window_s=1e-6, counts=True))


class Clockwork:
    """A clock and a counter that move when told, read ten times a second."""

    name, scope = "clockwork", "a made-up device"
    quality: Quality = "measured"

    def __init__(self, sampling: Sampling = EXACT, note: str | None = None) -> None:
        self.now_s, self.energy_j, self.failure, self.reads = 0.0, 0.0, "", 0
        self.meter = SampledMeter(self, sampling, lambda: self.now_s, lambda meter: None, note)
        self.stages = Stages(self.meter, lambda: self.now_s)

    def read_j(self) -> float:
        self.reads += 1
        if self.failure:
            raise OSError(self.failure)
        return self.energy_j

    def spend(self, seconds: float, energy_j: float) -> None:
        steps = max(round(seconds * 10), 1)
        for _ in range(steps):
            self.now_s += seconds / steps
            self.energy_j += energy_j / steps
            self.meter.sample()


def test_stages_are_differences_and_add_up() -> None:
    world = Clockwork()
    assert world.stages.scope == "clockwork: a made-up device"
    with world.stages.measure("extract"):
        world.spend(2.0, 10.0)
    world.spend(5.0, 1.0)
    with world.stages.measure("extract"):
        world.spend(1.0, 4.0)
    world.spend(1.0, 2.0)
    cost = world.stages.costs()["extract"]
    assert cost.seconds == pytest.approx(3.0) and cost.energy_j == pytest.approx(14.0, abs=1e-4)
    assert cost.bound_j is not None and 0.0 < cost.bound_j < 2.5 and cost.reason is None
    assert cost.mean_w == pytest.approx(14.0 / 3.0, abs=1e-3) and cost.peak_w == pytest.approx(5.0, abs=1e-3)
    assert cost.peak_window_s == pytest.approx(0.1)


def test_a_stage_between_two_samples_has_its_share_of_what_they_tell() -> None:
    world = Clockwork()
    world.spend(1.0, 5.0)
    world.now_s += 0.02
    world.stages.begin("train")
    world.now_s += 0.04
    world.stages.end("train")
    world.now_s, world.energy_j = world.now_s + 0.04, world.energy_j + 0.5
    world.meter.sample()
    world.spend(1.0, 5.0)
    cost = world.stages.costs()["train"]
    assert cost.energy_j == pytest.approx(0.2, abs=1e-4)
    assert cost.bound_j is not None and cost.bound_j >= 0.3  # it may have been all of that, or none


def test_stages_that_overlap_are_counted_once_in_the_total() -> None:
    world = Clockwork()
    world.stages.begin("upload")
    world.spend(2.0, 2.0)
    with world.stages.measure("train"):
        world.spend(2.0, 10.0)
        world.stages.end("upload")
        world.spend(1.0, 5.0)
    world.spend(3.0, 30.0)
    assert world.stages.costs()["upload"].energy_j == pytest.approx(12.0, abs=1e-4)
    assert world.stages.costs()["train"].energy_j == pytest.approx(15.0, abs=1e-4)
    assert world.stages.total().seconds == pytest.approx(5.0)
    assert world.stages.total().energy_j == pytest.approx(17.0, abs=1e-4)


def test_a_stage_that_ends_by_an_error_counts() -> None:
    world = Clockwork()
    with pytest.raises(KeyError), world.stages.measure("extract"):
        world.spend(2.0, 3.0)
        raise KeyError
    assert world.stages.costs()["extract"].seconds == pytest.approx(2.0)


def test_a_stage_begun_twice_goes_on_and_one_never_begun_is_absent() -> None:
    world = Clockwork()
    world.stages.begin("upload")
    world.spend(1.0, 1.0)
    world.stages.begin("upload")
    world.spend(1.0, 1.0)
    world.stages.end("upload")
    world.stages.end("upload")
    world.stages.end("other")
    world.stages.begin("never ended")
    assert list(world.stages.costs()) == ["upload"]
    assert world.stages.costs()["upload"].seconds == pytest.approx(2.0)


def test_energy_that_was_lost_for_long_is_unknown_with_the_reason() -> None:
    world = Clockwork()
    with world.stages.measure("extract"):
        world.spend(1.0, 1.0)
        world.failure = "counter lost"
        world.spend(5.0, 5.0)
    world.failure = ""
    with world.stages.measure("extract"):
        world.spend(1.0, 1.0)
    cost = world.stages.costs()["extract"]
    assert cost.energy_j is None and cost.bound_j is None and cost.peak_w is None
    assert cost.reason is not None and "counter lost" in cost.reason and "clockwork: measured for" in cost.reason
    assert world.stages.energy_reason() == cost.reason


def test_a_short_run_says_why_the_newest_samples_failed() -> None:
    world = Clockwork(Sampling(interval_s=0.1, gap_most_s=5.0, timing=Timing(window_s=0.1)))
    world.failure = "the plug refuses the account"
    with world.stages.measure("extract"):
        world.spend(1.0, 1.0)
    reason = "clockwork: measured for 0.0% of the time (the plug refuses the account)"
    assert world.stages.energy_reason() == world.stages.costs()["extract"].reason == reason
    world.failure = ""
    world.meter.sample()  # what is missing now is missing for another reason
    assert "too few samples" in (world.stages.energy_reason() or "")


def test_without_a_meter_only_time_is_known() -> None:
    now_s = [0.0]
    stages = Stages(NoMeter("no meter here"), lambda: now_s[0])
    with stages.measure("extract"):
        now_s[0] = 2.0
    cost = stages.costs()["extract"]
    assert (cost.seconds, cost.energy_j, cost.reason) == (2.0, None, "no meter here")
    assert stages.settle_s == 0.0


def test_what_a_meter_leaves_out_is_said_beside_its_joules() -> None:
    world = Clockwork(note="partial: without dram")
    with world.stages.measure("extract"):
        world.spend(1.0, 1.0)
    world.spend(1.0, 1.0)
    assert world.stages.energy_reason() == "partial: without dram"


def test_what_is_kept_does_not_grow_with_the_run() -> None:
    world = Clockwork()
    for _ in range(2 * RECENT_MOST):
        with world.stages.measure("train"):
            world.spend(0.1, 0.5)
    stage = world.stages._named["train"]
    assert len(stage.ended) <= 2 and len(world.stages._recent) == RECENT_MOST
    assert world.stages.costs()["train"].energy_j == pytest.approx(0.5 * 2 * RECENT_MOST, rel=1e-3)


def test_what_is_kept_does_not_grow_without_a_meter_either() -> None:
    now_s = [0.0]
    stages = Stages(NoMeter("no meter here"), lambda: now_s[0])
    for _ in range(3 * ENDED_MOST):
        with stages.measure("train"):
            now_s[0] += 0.5
    assert len(stages._named["train"].ended) == len(stages._any.ended) == ENDED_MOST
    assert stages.costs()["train"].seconds == pytest.approx(1.5 * ENDED_MOST)


def test_work_whose_sampler_has_time_does_not_read() -> None:
    world = Clockwork()
    with world.stages.measure("extract"):
        world.spend(2.0, 2.0)
        samples = world.reads
        world.stages.sample()
    assert world.reads == samples


def test_work_that_leaves_the_sampler_no_time_reads_for_it() -> None:
    world = Clockwork()
    with world.stages.measure("extract"):
        for _ in range(100):
            world.now_s, world.energy_j = world.now_s + UNHEARD_MOST_S / 4, world.energy_j + 1.0
            world.stages.sample()
    world.spend(1.0, 4.0)
    assert world.stages.costs()["extract"].energy_j == pytest.approx(100.0, abs=0.01)


def test_stages_and_sampler_run_on_two_threads() -> None:
    world, stop = Clockwork(), threading.Event()

    def sample() -> None:
        while not stop.is_set():
            world.meter.sample()

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        for _ in range(300):
            with world.stages.measure("train"):
                world.now_s, world.energy_j = world.now_s + 0.01, world.energy_j + 0.1
    finally:
        stop.set()
        sampler.join()
    assert world.stages.costs()["train"].seconds == pytest.approx(3.0)


def test_pieces_before_a_beginning_tell_of_its_bound() -> None:
    timing = Timing(window_s=1.0)
    stages = Stages(NoMeter("hand-fed"), lambda: 10.0)
    stages._meter.timing = timing  # type: ignore[misc]
    stages._take(Piece(9.0, 10.0, 8.0, 8.0))
    stages.begin("train")
    stages._clock = lambda: 12.0
    stages.end("train")
    stages._take(Piece(10.0, 13.0, 2.0, 2.0))
    assert stages.costs()["train"].energy_j == pytest.approx(4.0)
    assert (stages.costs()["train"].bound_j or 0.0) >= 0.5 * 8.0 + 0.5 * 2.0
