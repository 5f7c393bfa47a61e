"""What a real run tells of the time in which the device is away from its work, on a clock and a counter that obey."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from contract.messages import Activations, Ask, Message, Settled
from edge_runtime.profiling.measuring import Plan, measure
from edge_runtime.profiling.rows import AWAY_PARTS, Link, Row, make_row
from edge_runtime.profiling.server import AwayMarks, Joined, MarkedWorker, stage_of, with_away
from edge_runtime.stages import StageCost
from edge_runtime.worker import Counters, Upload
from tests.edge_runtime.profiling.virtual_device import VirtualDevice
from tests.edge_runtime.test_stages import Clockwork

UPLOAD = Upload("a", "train", 0.0, 1 << 20)


class Worker:
    """Works for a second at 5 J, and answers a forward with activations of four images."""

    def __init__(self, world: Clockwork) -> None:
        self.counters = Counters()
        self.samples: Sequence[object] = range(8)
        self._world = world

    def answer(self, ask: Ask, run: str, upload: Upload) -> Iterator[Message]:
        self._world.spend(1.0, 5.0)
        if ask.kind == "forward":
            yield Activations(ask.ask, 0, 8, "train", np.zeros((4, 3), np.float32), None)
        else:
            yield Settled(ask.ask, 8)


GRADIENT = {"gradient": np.zeros((4, 3), np.float32)}
SETTLE = Ask("s", "settle", {"step": 2, "after": 1, "base": 0, "batch": 2, "rate": 0.1}, 10.0, GRADIENT)


def load(cut: int) -> Ask:
    return Ask(f"l{cut}", "load_part", {"step": 1, "after": 0, "base": 0, "cut": cut}, 10.0)


def forward(batch: int) -> Ask:
    places = {"after": 1, "batch": batch, "epoch": 0, "place": batch, "size": 4, "seed": 1}
    return Ask(f"f{batch}", "forward", {**places, "rate": 0.1}, 10.0, GRADIENT if batch else {})


def talk(world: Clockwork, worker: MarkedWorker, asks: Sequence[tuple[Ask, float, float]]) -> None:
    """Each ask comes so many seconds and joules after the answer before it."""
    for ask, seconds, joules in asks:
        if seconds:
            world.spend(seconds, joules)
        list(worker.answer(ask, "r", UPLOAD))


def test_the_device_is_away_from_an_answer_to_the_next_ask() -> None:
    world = Clockwork()
    marks = AwayMarks(world.stages)
    worker = MarkedWorker(Worker(world), marks)  # type: ignore[arg-type]
    talk(world, worker, [(load(2), 0.0, 0.0), (forward(0), 9.0, 90.0), (forward(1), 2.0, 6.0), (SETTLE, 3.0, 7.0)])
    talk(world, worker, [(load(1), 50.0, 50.0), (forward(0), 1.0, 1.0), (SETTLE, 4.0, 8.0)])
    talk(world, worker, [(forward(1), 5.0, 5.0)])
    world.spend(100.0, 100.0)  # no ask follows: that is no time of a step
    costs = world.stages.costs()
    assert costs[stage_of(2)].seconds == pytest.approx(5.0)
    assert costs[stage_of(2)].energy_j == pytest.approx(13.0, abs=0.1)
    assert costs[stage_of(1)].seconds == pytest.approx(4.0)
    assert marks.images == {2: 8, 1: 4} and list(worker.samples) == list(range(8))


def test_the_time_away_has_three_parts_and_nothing_between_them() -> None:
    world = Clockwork()
    marks = AwayMarks(world.stages)
    marks.bytes_came()  # at work: of no part
    assert not marks.wants_arrival()
    marks.leave(2, 4)
    assert marks.wants_arrival() and not marks.wants_arrival()
    world.spend(1.0, 10.0)
    marks.arrived()
    world.spend(2.0, 2.0)
    marks.bytes_came()
    marks.went_on()  # a heartbeat
    world.spend(3.0, 3.0)
    marks.bytes_came()
    marks.bytes_came()
    world.spend(0.5, 8.0)
    marks.come_back()
    world.spend(9.0, 9.0)
    found = {name: (cost.seconds, cost.energy_j) for name, cost in world.stages.costs().items()}
    assert found["upload at split 2"] == pytest.approx((1.0, 10.0), abs=0.2)
    assert found["wait at split 2"] == pytest.approx((5.0, 5.0), abs=0.2)
    assert found["download at split 2"] == pytest.approx((0.5, 8.0), abs=0.2)
    assert found["away at split 2"] == pytest.approx((6.5, 23.0), abs=0.2)


def test_an_answer_that_is_written_again_is_asked_after_again() -> None:
    world = Clockwork()
    marks = AwayMarks(world.stages)
    marks.leave(2, 4)
    assert marks.wants_arrival()
    world.spend(1.0, 1.0)
    marks.connection_ended()
    world.spend(2.0, 2.0)
    assert marks.wants_arrival()
    marks.arrived()
    marks.bytes_came()
    world.spend(0.5, 0.5)
    marks.connection_ended()  # half of an ask came
    world.spend(4.0, 4.0)
    marks.come_back()
    costs = world.stages.costs()
    seconds = [costs[stage_of(2, part)].seconds for part in AWAY_PARTS]
    assert seconds == pytest.approx([3.0, 4.0, 0.5]) and marks.images == {2: 4}


def row(split: int = 2, metered: bool = True) -> Row:
    device = VirtualDevice()
    candidate = device.candidate(split, [("forward", 0.125, 6.0)], up=100, down=100)
    measured = measure(candidate, Plan(5, 10.0, 30.0, 30.0, 20.0, 7), device.bench())
    trace = device.trace if metered else None
    return make_row(candidate.point, ("forward",), measured, trace, "no meter", Link())


UPLOADED, WAITED, DOWNLOADED = StageCost(1.0, 6.0, 0.2), StageCost(3.0, 4.0, 0.2), StageCost(1.0, 3.0, 0.1)


def joined(cost: StageCost, digest: str = "ab" * 32, parts: Sequence[StageCost] = ()) -> Joined:
    named = {stage_of(2, name): part for name, part in zip(AWAY_PARTS, parts, strict=False)}
    return Joined("r7", digest, {stage_of(2): cost, **named}, {2: 10})


def test_what_was_taken_beyond_idling_while_it_went_up_and_came_down_is_the_links() -> None:
    found = with_away(row(), joined(StageCost(5.0, 13.0, 0.5), parts=(UPLOADED, WAITED, DOWNLOADED)))
    assert found.away is not None and (found.away.run, found.away.images, found.away.seconds) == ("r7", 10, 0.5)
    assert (found.away.energy_j, found.away.bound_j) == pytest.approx((1.3, 0.05))
    assert [(part.name, part.seconds, part.energy_j, part.bound_j) for part in found.away.parts] == [
        ("upload", pytest.approx(0.1), pytest.approx(0.6), pytest.approx(0.02)),
        ("wait", pytest.approx(0.3), pytest.approx(0.4), pytest.approx(0.02)),
        ("download", pytest.approx(0.1), pytest.approx(0.3), pytest.approx(0.01)),
    ]
    assert (
        found.communication_j == pytest.approx(0.6 + 0.3 - 2.0 * 0.2)
        and "of run r7, by this meter" in found.communication_reason
    )
    assert found.energy is not None and found.total_j == pytest.approx(found.energy.measured_j.mean + 1.3)


def test_a_run_without_a_meter_tells_the_time_alone() -> None:
    found = with_away(row(metered=False), joined(StageCost(5.0, None, reason="none")))
    assert found.away is not None and (found.away.seconds, found.away.energy_j, found.away.reason) == (
        0.5,
        None,
        "none",
    )
    assert found.communication_j is None and found.total_j is None


def test_a_part_whose_energy_is_unknown_leaves_the_links_unknown() -> None:
    unknown = StageCost(1.0, None, reason="too short")
    found = with_away(row(), joined(StageCost(5.0, 13.0, 0.5), parts=(UPLOADED, WAITED, unknown)))
    before = row()
    assert found.away is not None and found.away.parts[2].energy_j is None
    assert (found.communication_j, found.total_j) == (before.communication_j, before.total_j)


def test_a_run_of_another_split_or_package_tells_nothing() -> None:
    cost = StageCost(5.0, 13.0, 0.5)
    for mine, its in ((row(3), joined(cost)), (row(), joined(cost, "cd" * 32))):
        assert with_away(mine, its) == mine
    assert with_away(row(), dataclasses.replace(joined(cost), images={})).away is None
