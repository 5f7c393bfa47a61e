"""How deep a split a device holds, on virtual time: work warms it, and above a temperature it slows down."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from contract.canonical import encode
from contract.errors import UsageError
from edge_runtime.meters import probe
from edge_runtime.profiling.cap import CapPlan, Where, conclude, hold_splits, to_text
from edge_runtime.profiling.session import Place, bench_of, find_cap, refuse_blindness
from tests.edge_runtime.profiling.virtual_device import COOL_C, VirtualDevice
from tests.edge_runtime.test_power_sensors import write

PLAN = CapPlan(10.0, 120.0, 600.0, None)
WHERE = Where("raspberry_pi_5", {"ambient": "21C", "fan": "off"}, "/", "ina: module input")


def deeper(device: VirtualDevice) -> list:
    """Splits 1 to 4 at 4, 6, 8 and 10 W, handed in backwards."""
    return [device.candidate(split, [("frontend", 0.125, 2.0 + 2.0 * split)]) for split in (4, 3, 2, 1)]


def test_the_deepest_split_that_holds_gives_the_cap() -> None:
    device = VirtualDevice(warms_c_per_j=0.05, throttles_at_c=70.0)  # 4 W over idle: 24 C in two minutes; 6 W: 36 C
    held = hold_splits(deeper(device), PLAN, device.bench(), device.powers)
    assert [(each.split, each.outcome) for each in held] == [(1, "held"), (2, "held"), (3, "throttled")]
    assert device.opened == [1, 2, 3]
    assert held[0].seconds == pytest.approx(120.0) and held[2].seconds < 120.0
    assert held[2].throttled == ("it slowed down",) and (held[2].temperature_end_c or 0.0) >= 70.0
    cap = conclude(held, PLAN, WHERE, None)
    assert (cap.is_reached, cap.deepest_safe_split, cap.p_max_reason) == (True, 2, None)
    assert cap.p_max_w == pytest.approx(6.0)
    assert encode(cap)["where"] == {**dataclasses.asdict(WHERE)}
    assert "deepest safe split: 2; P_max: 6.00 W" in to_text(cap) and "ambient=21C, fan=off" in to_text(cap)


def test_it_cools_down_between_splits() -> None:
    device = VirtualDevice(warms_c_per_j=0.05)
    hold_splits(deeper(device), PLAN, device.bench(), device.powers)
    assert len(device.rested_s) > 6 and all(seconds <= 1.0 for seconds in device.rested_s)


def test_a_limit_of_the_temperature_ends_it_before_the_device_slows_down() -> None:
    device = VirtualDevice(warms_c_per_j=0.05, throttles_at_c=70.0)
    held = hold_splits(deeper(device), dataclasses.replace(PLAN, limit_c=60.0), device.bench(), device.powers)
    assert [(each.split, each.outcome) for each in held] == [(1, "held"), (2, "too hot")]
    assert held[1].throttled == () and (held[1].temperature_end_c or 0.0) >= 60.0


def test_where_every_split_holds_the_cap_is_a_least() -> None:
    device = VirtualDevice()
    cap = conclude(hold_splits(deeper(device), PLAN, device.bench(), device.powers), PLAN, WHERE, None)
    assert (cap.is_reached, cap.deepest_safe_split) == (False, 4)
    assert cap.p_max_w == pytest.approx(10.0) and "at least" in (cap.p_max_reason or "")


def test_where_no_split_holds_there_is_no_cap() -> None:
    device = VirtualDevice(warms_c_per_j=1.0, throttles_at_c=COOL_C + 1.0)
    cap = conclude(hold_splits(deeper(device), PLAN, device.bench(), device.powers), PLAN, WHERE, None)
    assert (cap.is_reached, cap.deepest_safe_split, cap.p_max_w) == (True, None, None)
    assert "not even" in (cap.p_max_reason or "") and "deepest safe split: none; P_max: unknown" in to_text(cap)


def test_without_a_meter_the_split_is_known_and_the_watts_are_not() -> None:
    device = VirtualDevice(warms_c_per_j=0.05, throttles_at_c=70.0)
    held = hold_splits(deeper(device), PLAN, device.bench(), lambda began_s, ended_s: None)
    cap = conclude(held, PLAN, WHERE, "no meter: none")
    assert (cap.deepest_safe_split, cap.p_max_w, cap.p_max_reason) == (2, None, "no meter: none")
    assert "power unknown" in to_text(cap)


def place(root: Path) -> Place:
    return Place(None, {}, root, probe(root))


def test_a_device_that_tells_nothing_of_its_heat_is_refused(tmp_path: Path) -> None:
    limited = dataclasses.replace(PLAN, limit_c=80.0)

    def refuse(plan: CapPlan) -> None:
        refuse_blindness(place(tmp_path), plan, bench_of(place(tmp_path), lambda seconds: None))

    with pytest.raises(UsageError, match="nothing here tells"):
        refuse(limited)
    write(tmp_path, {"sys/class/thermal/thermal_zone0/temp": "45000"})
    with pytest.raises(UsageError, match="--limit-c|nothing here tells"):
        refuse(PLAN)
    refuse(limited)
    write(tmp_path, {"sys/class/hwmon/hwmon3/name": "soctherm_oc", "sys/class/hwmon/hwmon3/oc1_event_cnt": "0"})
    refuse(PLAN)


def test_a_made_up_board_is_watched_for_what_it_counts(tmp_path: Path) -> None:
    events = {"sys/class/hwmon/hwmon3/name": "soctherm_oc", "sys/class/hwmon/hwmon3/oc3_event_cnt": "5"}
    write(tmp_path, events | {"sys/class/thermal/thermal_zone0/temp": "45000"})
    device = VirtualDevice()

    def open_phases() -> list:
        phase = device.candidate(1, [("frontend", 0.1, 6.0)]).open()[0]

        def run() -> int:
            write(tmp_path, {"sys/class/hwmon/hwmon3/oc3_event_cnt": "7"})
            return phase.run()

        return [dataclasses.replace(phase, run=run)]

    candidate = dataclasses.replace(device.candidate(1, [("frontend", 0.1, 6.0)]), open=open_phases)
    cap = find_cap([candidate], CapPlan(0.01, 60.0, 0.0, None), place(tmp_path))
    assert (cap.splits[0].outcome, cap.splits[0].temperature_end_c) == ("throttled", 45.0)
    assert "oc3: peak current" in cap.splits[0].throttled[0] and cap.where.root == str(tmp_path)
