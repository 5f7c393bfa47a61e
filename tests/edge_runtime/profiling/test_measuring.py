"""What edge-profile measures and makes of it, on virtual time with power that is known exactly."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence

import pytest

from edge_runtime.meters import Piece, PowerTrace, Timing
from edge_runtime.meters._reading import Quality
from edge_runtime.meters._sampled import SampledMeter, Sampling
from edge_runtime.profiling.measuring import Measured, Phase, Plan, cool_down, in_drawn_order, measure, run_block
from edge_runtime.profiling.rows import Estimate, Link, Row, communication, estimate, make_row
from tests.edge_runtime.profiling.virtual_device import COOL_C, IDLE_W, VirtualDevice

PLAN = Plan(5, 10.0, 30.0, 30.0, 20.0, 7)
ONE = [("frontend", 0.125, 6.0)]  # of two images; times that add up exactly
STEP = [("forward", 0.125, 6.0), ("backward", 0.25, 9.0), ("optimiser", 0.125, 3.0)]


def row_of(
    device: VirtualDevice, costs: Sequence[tuple[str, float, float]], link: Link | None = None, plan: Plan = PLAN
) -> tuple[Row, Measured]:
    candidate = device.candidate(2, costs)
    measured = measure(candidate, plan, device.bench())
    return make_row(candidate.point, candidate.phase_names, measured, device.trace, "", link or Link()), measured


def test_a_split_costs_what_the_device_took() -> None:
    row, measured = row_of(VirtualDevice(), ONE)
    energy = row.energy
    assert energy is not None and energy.power is not None
    assert row.seconds_per_image.mean == pytest.approx(0.0625)
    assert energy.measured_j.mean == pytest.approx(6.0 * 0.0625)
    assert energy.compute_j.mean == pytest.approx(4.0 * 0.0625)
    assert energy.idle_j == pytest.approx(2.0 * 0.0625)
    assert (energy.idle_before_w, energy.idle_after_w) == pytest.approx((IDLE_W, IDLE_W))
    assert (energy.power.mean_w, energy.power.peak_w) == pytest.approx((6.0, 6.0))
    assert energy.measured_j.half_width == pytest.approx(0.0, abs=1e-9) and energy.measured_j.blocks == 5
    assert row.coverage == 1.0 and row.energy_reason is None and row.notes == () and row.throttled == ()
    assert len(measured.rounds) == 5 and len(measured.rounds[0][0].marks_s) == 81


class SampledDevice(VirtualDevice):
    """The same with a sensor that shows the mean of the last `window_s`, sampled about ten times a second."""

    name, scope = "made up", "all of it"
    quality: Quality = "measured"

    def __init__(self, window_s: float) -> None:
        super().__init__()
        self._rng, self._due_s, self._window_s = random.Random(1), 0.0, window_s
        timing = Timing(window_s=window_s, doubt_s=window_s)
        self.meter = SampledMeter(self, Sampling(0.1, timing=timing), lambda: self.now_s, lambda meter: None)
        self.sampled = PowerTrace(timing)
        self.meter.watch(self.sampled.add)

    def read_w(self) -> float:
        """From the exact trace, which is complete up to now."""
        window = self.trace.energy_between(self.now_s - self._window_s, self.now_s)
        return (window.energy_j or 0.0) / self._window_s

    def spend(self, seconds: float, watts: float) -> None:
        ends_s = self.now_s + seconds
        while self.now_s < ends_s:
            step_s = min(ends_s, max(self._due_s, self.now_s + 1e-3)) - self.now_s
            super().spend(step_s, watts)
            if self.now_s >= self._due_s:
                self.meter.sample()
                self._due_s = self.now_s + self._rng.uniform(0.05, 0.15)


@pytest.mark.parametrize("window_s", [0.007, 0.422])
def test_a_sampled_sensor_is_off_by_a_hundredth_at_most(window_s: float) -> None:
    """Work of 0.125 s at 6 W, then 0.125 s at 3 W: neither is as long as the slow sensor's window."""
    device = SampledDevice(window_s)
    candidate = device.candidate(2, [("frontend", 0.125, 6.0), ("rest", 0.125, 3.0)])
    both = dataclasses.replace(candidate, open=lambda: candidate.open()[-1:])
    measured = measure(both, dataclasses.replace(PLAN, warm_up_s=3.0), device.bench())
    row = make_row(candidate.point, ("frontend",), measured, device.sampled, "", Link())
    assert row.energy is not None and row.energy.measured_j.mean == pytest.approx(4.5 * 0.125, rel=0.01)
    assert row.energy.compute_j.mean == pytest.approx(2.5 * 0.125, rel=0.02)
    assert row.energy.idle_before_w == pytest.approx(IDLE_W, rel=0.005)
    assert row.energy.bound_j is not None and row.energy.bound_j > 0.0
    assert row.energy.power is not None and row.energy.power.peak_window_s == window_s


def test_phases_that_cannot_be_run_alone_are_differences() -> None:
    row, _ = row_of(VirtualDevice(), STEP)
    assert [phase.name for phase in row.phases] == ["forward", "backward", "optimiser"]
    assert [phase.seconds.mean for phase in row.phases] == pytest.approx([0.0625, 0.125, 0.0625])
    net_j = [phase.compute_j.mean for phase in row.phases if phase.compute_j is not None]
    assert net_j == pytest.approx([4.0 * 0.0625, 7.0 * 0.125, 1.0 * 0.0625])
    assert row.energy is not None and row.energy.compute_j.mean == pytest.approx(sum(net_j))
    assert row.seconds_per_image.mean == pytest.approx(0.25)


def test_work_that_takes_less_than_idling_is_shown_as_it_is() -> None:
    row, _ = row_of(VirtualDevice(), [("frontend", 0.125, 1.5)])
    assert row.energy is not None and row.energy.compute_j.mean == pytest.approx(-0.5 * 0.0625)
    assert row.phases[0].compute_j is not None and row.phases[0].compute_j.mean < 0


def test_communication_is_modelled_or_unknown_and_so_is_the_sum() -> None:
    point = VirtualDevice().candidate(1, ONE, up=100, down=50).point
    assert communication(point, Link())[0] is None
    assert communication(point, Link(1e-6, None, "a plug"))[0] is None
    joules, reason = communication(point, Link(1e-6, 2e-6, "a plug"))
    assert joules == pytest.approx(200e-6) and "modelled" in reason and "a plug" in reason
    silent = dataclasses.replace(point, sent_bytes_per_image=0, received_bytes_per_image=0)
    assert communication(silent, Link())[0] == 0.0
    unknown, _ = row_of(VirtualDevice(), ONE)
    assert unknown.total_j is None and unknown.communication_j is None
    known, _ = row_of(VirtualDevice(), ONE, Link(1e-3, None, "a plug"))
    assert known.total_j == pytest.approx(6.0 * 0.0625 + 0.1)


def test_without_a_meter_time_is_known_and_energy_is_not() -> None:
    device = VirtualDevice()
    candidate = device.candidate(2, ONE)
    measured = measure(candidate, PLAN, device.bench())
    row = make_row(candidate.point, candidate.phase_names, measured, None, "no meter: ina: none", Link())
    assert row.seconds_per_image.mean == pytest.approx(0.0625)
    assert (row.energy, row.energy_reason, row.coverage) == (None, "no meter: ina: none", None)
    assert row.phases[0].compute_j is None and row.total_j is None


def with_gap(device: VirtualDevice, measured: Measured, share: float) -> PowerTrace:
    """The device's trace, of which one block is missing a share."""
    marks_s = measured.rounds[2][0].marks_s
    lost_s = marks_s[0] + share * (marks_s[-1] - marks_s[0])
    trace = PowerTrace(Timing())
    for piece in device.trace._pieces:
        gone = marks_s[0] <= piece.begin_s < lost_s
        trace.add(dataclasses.replace(piece, gap="the plug went away") if gone else piece)
    return trace


@pytest.mark.parametrize(("share", "refused"), [(0.05, False), (0.15, True)])
def test_a_row_that_was_not_seen_for_nine_tenths_of_the_time_is_refused(share: float, refused: bool) -> None:
    device = VirtualDevice()
    candidate = device.candidate(2, ONE)
    measured = measure(candidate, PLAN, device.bench())
    row = make_row(candidate.point, ("frontend",), measured, with_gap(device, measured, share), "", Link())
    assert row.coverage == pytest.approx(1.0 - share, abs=0.02)
    assert (row.energy is None) == refused and row.seconds_per_image.mean == pytest.approx(0.0625)
    assert "the plug went away" in (row.energy_reason or "")
    assert refused or (row.energy_reason or "").startswith("partial")


def test_an_idle_baseline_that_was_not_seen_leaves_energy_unknown() -> None:
    device = VirtualDevice()
    candidate = device.candidate(2, ONE)
    measured = measure(candidate, PLAN, device.bench())
    blind = PowerTrace(Timing())
    for piece in device.trace._pieces:
        blind.add(dataclasses.replace(piece, gap="lost") if piece.begin_s >= measured.after_s[0] else piece)
    row = make_row(candidate.point, ("frontend",), measured, blind, "", Link())
    assert row.energy is None and "idle baseline" in (row.energy_reason or "")


def test_a_baseline_that_drifts_is_noted() -> None:
    device = VirtualDevice()
    candidate = device.candidate(2, ONE)
    measured = measure(candidate, PLAN, device.bench())
    drifted = PowerTrace(Timing())
    for piece in device.trace._pieces:
        more_w = 0.2 if piece.begin_s >= measured.after_s[0] else 0.0
        drifted.add(dataclasses.replace(piece, begin_w=piece.begin_w + more_w, end_w=piece.end_w + more_w))
    row = make_row(candidate.point, ("frontend",), measured, drifted, "", Link())
    assert len(row.notes) == 1 and "from 2.00 to 2.20 W" in row.notes[0]
    assert row.energy is not None and row.energy.idle_j == pytest.approx(2.1 * 0.0625)


def test_what_slowed_the_device_down_marks_the_row() -> None:
    row, _ = row_of(VirtualDevice(warms_c_per_j=0.1, throttles_at_c=60.0), ONE)
    assert row.throttled == ("it slowed down",)
    assert row.temperature_start_c == COOL_C and (row.temperature_end_c or 0.0) > 60.0


def test_warm_up_ends_when_three_blocks_agree() -> None:
    device = VirtualDevice()
    candidate = device.candidate(2, ONE)
    first = measure(candidate, PLAN, device.bench())
    assert first.is_steady and first.warm_up_s == pytest.approx(3 * 2.0)
    slower = itertools.count(1)

    def run() -> int:
        device.spend(0.1 * 1.05 ** next(slower), 6.0)
        return 1

    drifting = dataclasses.replace(candidate, open=lambda: [Phase("frontend", run)])
    never = measure(drifting, dataclasses.replace(PLAN, blocks=2), device.bench())
    assert not never.is_steady and never.warm_up_s >= 30.0
    row = make_row(candidate.point, ("frontend",), never, None, "none", Link())
    assert "no three blocks agreed" in row.notes[0]


def test_a_block_is_at_least_one_repetition_and_whole_ones() -> None:
    device = VirtualDevice()
    long = device.candidate(1, [("frontend", 25.0, 6.0)]).open()[0]
    block = run_block(long, 10.0, device.bench())
    assert (len(block.marks_s), block.images, block.seconds_per_image) == (2, 2, 12.5)
    assert device.looks_s == [125.0]  # after each repetition: a clock that falls meanwhile must not go unseen


@pytest.mark.parametrize(("knows_heat", "most_s"), [(True, 10.0), (False, 20.0)])
def test_cooling_ends_when_it_is_as_cool_as_before_where_that_is_known(knows_heat: bool, most_s: float) -> None:
    device = VirtualDevice()
    device.celsius = 42.0
    waited_s = cool_down(PLAN.cool_down_s, device.bench(knows_heat), COOL_C if knows_heat else None)
    assert waited_s <= most_s and (knows_heat or waited_s == 20.0)
    assert not knows_heat or device.celsius <= COOL_C + 1.0


def test_the_order_is_drawn_from_the_seed_alone() -> None:
    splits = list(range(12))
    assert in_drawn_order(splits, 3) == in_drawn_order(splits, 3)
    assert sorted(in_drawn_order(splits, 3)) == splits
    assert len({tuple(in_drawn_order(splits, seed)) for seed in range(20)}) > 15


def test_progress_reaches_the_planned_time() -> None:
    device = VirtualDevice()
    for split in range(3):
        measure(device.candidate(split, STEP), PLAN, device.bench())
    cool_down(PLAN.cool_down_s, device.bench(), None)
    cool_down(PLAN.cool_down_s, device.bench(), None)
    assert device.progress_s == pytest.approx(PLAN.seconds(3, 3))


def test_the_interval_is_students() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    expected = 2.776 * math.sqrt(2.5) / math.sqrt(5)  # t of 4 degrees of freedom
    assert estimate(values) == Estimate(3.0, pytest.approx(expected), 5)
    assert estimate([1.0] * 40).half_width == 0.0


def test_the_interval_covers_the_truth_nineteen_times_of_twenty() -> None:
    rng, covered = random.Random(1), 0
    for _ in range(2000):
        found = estimate([rng.gauss(10.0, 1.0) for _ in range(5)])
        covered += abs(found.mean - 10.0) <= found.half_width
    assert covered / 2000 == pytest.approx(0.95, abs=0.015)


def test_power_is_told_as_a_distribution() -> None:
    device = VirtualDevice()
    watts = itertools.cycle([4.0, 8.0])

    def run() -> int:
        device.spend(0.125, next(watts))
        return 1

    candidate = dataclasses.replace(device.candidate(2, ONE), open=lambda: [Phase("frontend", run)])
    row = make_row(candidate.point, ("frontend",), measure(candidate, PLAN, device.bench()), device.trace, "", Link())
    assert row.energy is not None and row.energy.power is not None
    quantiles_w = row.energy.power.quantiles_w
    assert len(quantiles_w) == 21 and quantiles_w[0] == 4.0 and quantiles_w[-1] == 8.0
    assert list(quantiles_w) == sorted(quantiles_w)
    assert row.energy.power.mean_w == pytest.approx(6.0) and row.energy.power.peak_w == 8.0


def test_a_trace_without_samples_in_the_blocks_gives_no_power() -> None:
    device = VirtualDevice()
    candidate = device.candidate(2, ONE)
    measured = measure(candidate, dataclasses.replace(PLAN, block_s=1.0), device.bench())
    coarse = PowerTrace(Timing())
    coarse.add(Piece(0.0, 1e6, 2.0, 2.0))
    row = make_row(candidate.point, ("frontend",), measured, coarse, "", Link())
    assert row.energy is not None and row.energy.power is None
