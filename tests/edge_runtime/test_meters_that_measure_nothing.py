"""The model and the recording that is played: what they say, and that neither is used unless it is asked for."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from contract.errors import ConfigError
from edge_runtime.meters import PowerModel, open_replay, probe, read_model, recording
from edge_runtime.meters._sampled import SampledMeter
from edge_runtime.meters.modelled import BAND, busy_seconds, open_modelled
from edge_runtime.stages import Stages
from tests.edge_runtime.power_worlds import unstarted

MODEL = PowerModel(2.0, 10.0, "a made-up board")
STAT = "cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0 0 0\nintr 5\n"


class Machine:
    """A /proc/stat of two CPUs, and a clock."""

    def __init__(self, root: Path) -> None:
        self.now_s, self._busy_s, self._path = 0.0, 0.0, root / "proc/stat"
        self._path.parent.mkdir(parents=True)
        self.work(0.0, 0.0)

    def clock(self) -> float:
        return self.now_s

    def work(self, seconds: float, busy: float) -> None:
        """Let time pass in which so many CPUs are busy."""
        self.now_s += seconds
        self._busy_s += seconds * busy
        self._path.write_text(STAT.format(busy=round(100 * self._busy_s), idle=0))


def opened(root: Path, machine: Machine, model: PowerModel = MODEL) -> SampledMeter:
    meter, reasons = open_modelled(model, root, machine.clock, unstarted)
    assert meter is not None, reasons
    return meter


def test_the_model_is_between_idle_and_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    machine = Machine(tmp_path)
    meter = opened(tmp_path, machine)
    stages = Stages(meter, machine.clock)
    for name, busy in (("idle", 0.0), ("half", 1.0), ("full", 2.0)):
        stages.begin(name)
        for _ in range(100):
            machine.work(0.1, busy)
            meter.sample()
        stages.end(name)
    machine.work(0.1, 0.0)
    meter.sample()
    costs = stages.costs()
    for name, watts in (("idle", 2.0), ("half", 6.0), ("full", 10.0)):
        cost = costs[name]
        assert cost.mean_w == pytest.approx(watts, rel=0.01)
        assert cost.bound_j is not None and cost.energy_j is not None and cost.bound_j >= BAND * cost.energy_j
        assert cost.reason == "modelled, not measured"
    assert meter.quality == "modelled" and meter.scope.startswith("model of a made-up board")


def test_a_calibrated_model_has_no_band(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    meter = opened(tmp_path, machine, PowerModel(2.0, 10.0, "this board", calibrated=True))
    assert meter.timing.share == 0.0 and opened(tmp_path, machine).timing.share == BAND


def test_a_model_is_used_only_where_it_is_asked_for_and_nothing_measures(tmp_path: Path) -> None:
    Machine(tmp_path)
    assert probe(tmp_path).meter.name == "none"
    found = probe(tmp_path, model=MODEL)
    assert (found.meter.name, found.meter.quality) == ("modelled", "modelled")
    assert len(found.reasons) == len(probe(tmp_path).reasons)  # why nothing measures
    battery = tmp_path / "sys/class/power_supply/BAT0"
    battery.mkdir(parents=True)
    (battery / "status").write_text("Discharging\n")
    (battery / "power_now").write_text("9000000\n")
    assert probe(tmp_path, model=MODEL).meter.name == "battery"


def test_a_model_without_proc_stat_is_no_meter(tmp_path: Path) -> None:
    found = probe(tmp_path, model=MODEL)
    assert found.meter.name == "none" and "modelled: it is not known how busy" in found.reasons[-1]


def test_busy_time_leaves_out_idling_and_waiting_for_a_disk() -> None:
    text = "cpu  10 20 30 1000 500 4 5 6 7 8\ncpu0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0\ncpu2 0 0 0 0 0 0 0 0\n"
    assert busy_seconds(text, 10) == pytest.approx((10 + 20 + 30 + 4 + 5 + 6) / 10 / 3)
    for wrong in ("", "cpu 1 2\ncpu0 1 2\n", "cpu  1 2 3 4 5 6 7 8\n", "cpu  a b c d e f g h\ncpu0 1\n"):
        with pytest.raises(ValueError):
            busy_seconds(wrong, 10)


def test_the_model_of_a_setting() -> None:
    assert read_model(None) is None
    model = read_model("2.5:9")
    assert model is not None and (model.idle_w, model.busy_w, model.calibrated) == (2.5, 9.0, False)
    for wrong in ("", "9", "9:2.5", "-1:4", "a:b", "1:2:3", "nan:4", "1:inf"):
        with pytest.raises(ConfigError, match="IDLE:BUSY"):
            read_model(wrong)


class Playing:
    """A recording of power that rises by 1 W a second, played by a clock that moves when told."""

    def __init__(self, path: Path) -> None:
        self.now_s, self._rng = 100.0, random.Random(0)
        self.meter = open_replay(path, lambda: self.now_s, unstarted)

    def run(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.meter.sample()
            self.now_s += self.meter.wait_s(self._rng)


def ramp(path: Path, missing: range = range(0)) -> Path:
    rows = [f"{1000 + number / 10},{'' if number in missing else number / 10}" for number in range(200)]
    path.write_text("\n".join(["seconds,watts", *rows]) + "\n")
    return path


def test_a_recording_is_played_at_its_own_pace(tmp_path: Path) -> None:
    player = Playing(ramp(tmp_path / "ramp.csv"))
    with recording(player.meter) as trace:
        player.run(19.0)
    window = trace.energy_between(102.0, 112.0)
    assert window.energy_j == pytest.approx((12.0**2 - 2.0**2) / 2, rel=0.01)
    assert trace.powers(102.0, 112.0).peak_w == pytest.approx(12.0, abs=0.2)
    assert (player.meter.quality, player.meter.scope) == ("replayed", "recording ramp.csv")


def test_json_is_played_alike(tmp_path: Path) -> None:
    document = {"seconds": [number / 10 for number in range(200)], "watts": [number / 10 for number in range(200)]}
    path = tmp_path / "ramp.json"
    path.write_text(json.dumps(document))
    first, second = Playing(path), Playing(ramp(tmp_path / "ramp.csv"))
    for player in (first, second):
        player.run(5.0)
    assert first.meter.read(0.0).energy_j == pytest.approx(second.meter.read(0.0).energy_j)


def test_what_failed_in_the_recording_and_what_is_after_it_is_unknown(tmp_path: Path) -> None:
    player = Playing(ramp(tmp_path / "ramp.csv", range(50, 100)))
    with recording(player.meter) as trace:
        player.run(30.0)
    assert trace.energy_between(106.0, 109.0).energy_j is None
    assert "failed in the recording" in (trace.energy_between(106.0, 109.0).reason or "")
    assert trace.energy_between(101.0, 104.0).coverage == pytest.approx(1.0)
    after = trace.energy_between(121.0, 129.0)
    assert after.energy_j is None and "has ended" in (after.reason or "")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "seconds,watts\n",
        "seconds,watts\n1,2\n",
        "a,b\n1,2\n2,3\n",
        "seconds,watts\n2,2\n1,3\n",
        "seconds,watts\n1,x\n2,3\n",
        "seconds,watts\n1,nan\n2,3\n",
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match="no recording of power"):
        open_replay(path)


@pytest.mark.parametrize(
    "text", ["{}", "[]", "{", '{"seconds": [1, 2], "watts": [1]}', '{"seconds": [1, 2], "watts": [[1], 2]}']
)
def test_json_that_is_no_recording_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="no recording of power"):
        open_replay(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no recording of power"):
        open_replay(tmp_path / "missing.csv")
