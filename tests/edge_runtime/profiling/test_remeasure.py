"""An energy table that is measured anew in the middle of a run, on virtual time with power that is known exactly."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from contract.messages import Ask
from contract.signature import key_id, load_public
from edge_runtime.choose_split import Preferences, SplitCost
from edge_runtime.config import DeviceConfig
from edge_runtime.equip_parts import open_choice
from edge_runtime.meters import Piece, Timing
from edge_runtime.meters._reading import Quality
from edge_runtime.meters.none import NoMeter
from edge_runtime.own_choice import OwnChoice, Spent
from edge_runtime.profiling.measuring import Candidate
from edge_runtime.profiling.parts import PHASES
from edge_runtime.remeasure import bench_of, is_quick, plan_of, remeasure
from edge_runtime.stages import Stages
from edge_runtime.worker import Counters
from tests.edge_runtime.profiling.test_frontends import verified
from tests.edge_runtime.profiling.virtual_device import VirtualDevice
from tests.edge_runtime.test_own_choice import row, write_table

OLD = (SplitCost(1, 1.0, 5.0, 0.5, 0.25, 0.125), SplitCost(2, 2.0, 6.0, 1.0), SplitCost(3, 4.0, 7.0, 2.0))
NOT_DRAWN = {1: [(0.25, 4.0), (0.25, 4.0), (0.125, 4.0)], 2: [(0.125, 3.0), (0.0625, 3.0), (0.0625, 3.0)]}


class ToldMeter:
    """Tells every piece of a device's power at once."""

    name, scope, note, failure, settle_s = "made up", "all of it", None, None, 0.0

    def __init__(self, timing: Timing | None = None, quality: Quality = "measured") -> None:
        self.timing, self.quality = timing or Timing(), quality
        self.sinks: list[Callable[[Piece], None]] = []

    def watch(self, sink: Callable[[Piece], None], fine: bool = False) -> Callable[[], None]:
        self.sinks.append(sink)
        return lambda: self.sinks.remove(sink)


class MeteredDevice(VirtualDevice):
    """With a meter, which may be dead."""

    def __init__(self, tells: bool = True) -> None:
        super().__init__()
        self.meter, self._tells = ToldMeter(), tells

    def spend(self, seconds: float, watts: float) -> None:
        began_s = self.now_s
        super().spend(seconds, watts)
        for sink in self.meter.sinks if self._tells else ():
            sink(Piece(began_s, self.now_s, watts, watts))

    def again(self, old: Sequence[SplitCost]) -> tuple[SplitCost, ...]:
        return remeasure(self.candidates(), 60.0, self.bench(), self.meter, old)  # type: ignore[arg-type]

    def candidates(self) -> list[Candidate]:
        return [
            self.candidate(split, [(name, *cost) for name, cost in zip(PHASES, costs, strict=True)], 1)
            for split, costs in NOT_DRAWN.items()
        ]


def test_every_split_of_the_table_gets_what_it_takes_now_and_keeps_what_the_link_takes() -> None:
    device = MeteredDevice()
    began_s = device.now_s
    one, two, three = device.again(OLD)
    assert (one.energy_j, one.time_s) == pytest.approx((4.0 * 0.625 + 0.25, 0.625 + 0.125))
    assert (one.peak_w, one.link_j, one.link_s) == pytest.approx((4.0, 0.25, 0.125))
    assert (two.energy_j, two.time_s, two.peak_w) == pytest.approx((3.0 * 0.25, 0.25, 3.0))
    assert three == OLD[2]  # the package has no such part
    assert device.now_s - began_s == pytest.approx(60.0, rel=0.15)  # a repetition more or less
    assert sorted(device.opened) == [1, 2]


def test_a_meter_that_tells_nothing_changes_nothing() -> None:
    assert MeteredDevice(tells=False).again(OLD) == OLD


def test_seconds_are_shared_by_all_splits() -> None:
    candidates = MeteredDevice().candidates()
    plan = plan_of(60.0, candidates)
    assert 2 * (2 * plan.baseline_s + plan.warm_up_s + plan.blocks * len(PHASES) * plan.block_s) == pytest.approx(60.0)


def test_a_slow_sensor_and_a_model_are_not_asked() -> None:
    assert is_quick(ToldMeter()) and is_quick(ToldMeter(quality="derived"))  # type: ignore[arg-type]
    for slow in (ToldMeter(Timing(window_s=2.0)), ToldMeter(quality="modelled"), NoMeter("none")):
        assert not is_quick(slow)  # type: ignore[arg-type]


def test_a_stop_is_noticed_while_the_baseline_is_taken() -> None:
    class Stopped(Exception):
        pass

    looked = []

    def tick() -> None:
        looked.append(1)
        if len(looked) == 2:
            raise Stopped

    with pytest.raises(Stopped):
        bench_of(tick).wait(60.0)


def question(number: int, **changes: np.ndarray) -> Ask:
    tensors = {
        "splits": np.array([1, 2, 3], np.uint16),
        "sigma": np.array([1.0, 0.5, 0.25], np.float32),
        "strengths": np.array([0.0, 2.0], np.float32),
        "leakage": np.array([[0.5, 0.3], [0.45, 0.25], [0.4, 0.2]], np.float32),
    }
    return Ask(f"choose-{number}", "choose_split", {"rule": "p3sl", "round": number}, 60.0, tensors | changes)


def test_a_turn_off_the_table_is_followed_by_a_new_table_and_a_new_choice() -> None:
    """By energy alone: split 1 was the cheapest; the whole device has changed, and now split 2 is."""
    device, said, asked = MeteredDevice(), list[str](), list[Sequence[SplitCost]]()

    def again(old: Sequence[SplitCost]) -> tuple[SplitCost, ...]:
        asked.append(old)
        return device.again(old)

    # The first turn takes 0.75 J an image of computing, as the table says (0.25 of its 1 J are the link's); the second
    # 2.5 J. What split 2 then takes, the turns that follow take too, but for one: that is no reason for another table.
    joules = [0.0, 0.0, 75.0, 325.0, 400.0, 600.0]
    spent = iter([Spent(each, 0.0, 100 * max(0, number - 1)) for number, each in enumerate(joules)])
    own = OwnChoice(OLD, Preferences(0.0), said.append, lambda: next(spent), remeasure=again)
    assert [own.answer(question(number)).split for number in (1, 2)] == [1, 1] and not asked
    assert own.answer(question(3)).split == 2 and asked == [OLD]
    assert "measured anew" in said[-2] and said[-1] == "split 2 is chosen, it was 1"
    assert own.answer(question(4)).split == 2 and len(asked) == 1
    assert own.answer(question(5)).split == 2 and len(asked) == 1  # 2 J where the new table says 0.75: corrected alone
    assert "corrected" in said[-1]


def test_a_device_that_slowed_down_measures_anew_and_goes_to_a_lower_peak() -> None:
    spent = iter([Spent(), Spent(), Spent(None, 0.0, 100, frozenset({"throttled"}))])
    hotter = (SplitCost(1, 1.5, 5.0, 0.5), SplitCost(2, 3.0, 6.0, 1.0), SplitCost(3, 6.0, 7.0, 2.0))
    own = OwnChoice(OLD, Preferences(1.0), lambda text: None, lambda: next(spent), remeasure=lambda old: hotter)
    assert [own.answer(question(number)).split for number in (1, 2)] == [3, 2]


def test_a_devices_own_package_is_measured_by_its_own_meter_in_a_run(tmp_path: Path) -> None:
    """Real graphs, and a meter that says 5 W all the time: joules are 5 times the seconds."""
    given = os.environ.get("CUTLAYER_TEST_PACKAGE")
    if not given:
        pytest.skip("the graphs are made by tests.make_package: run tools/test, or set CUTLAYER_TEST_PACKAGE")
    key = load_public(Path(given) / "keys/publisher.pub")
    installed = verified(tmp_path, [Path(given) / "parts"], {key_id(key): key})[0].installed
    assert installed.training is not None
    model, digest = installed.manifest.model, installed.digest.hex()
    rows = [replace(each, point=replace(each.point, model=model, package_digest=digest)) for each in (row(1, 0.5),)]
    table, unused = write_table(tmp_path / "table.json", *rows), tmp_path / "unused"
    config = DeviceConfig(
        engine="", data=unused, server="", trust=unused, ca=None, key=unused, name="pi", state=unused, site_secret=None,
        classes=None, label_mode="raw-label", noise="keyed", alpha=None, kappa_floor=None, max_releases=1, threads=1,
        energy_table=table, privacy_weight=0.0, remeasure_s=0.5,
    )  # fmt: skip
    meter, counters, said, ticks = ToldMeter(), Counters(), list[str](), list[int]()
    stages, told_s = Stages(meter, time.monotonic), [time.monotonic()]  # type: ignore[arg-type]

    def tick(images: int) -> None:
        now_s = time.monotonic()
        for sink in list(meter.sinks):
            sink(Piece(told_s[0], now_s, 5.0, 5.0))
        told_s[0] = now_s
        ticks.append(images)

    own = open_choice(installed, installed.training, config, 1, stages, counters, tick, said.append)
    tables = {"splits": np.array([1], np.uint16), "sigma": np.ones(1, np.float32)}
    tables["leakage"] = np.array([[0.5, 0.3]], np.float32)
    assert own.answer(question(1, **tables)).split == 1
    with stages.measure("train"):
        tick(1)
    tick(1)  # the meter has told of the stage's end
    counters.images += 1000
    assert own.answer(question(2, **tables)).split == 1
    assert "measured anew" in said[-1] and len(ticks) > 10
    (cost,) = own._costs
    assert cost.energy_j == pytest.approx(5.0 * (cost.time_s or 0.0), rel=0.2) and cost.peak_w == pytest.approx(5.0)
