"""What a device says of having slowed itself down."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_runtime.throttle import LOOK_EVERY_S, Flag, SlowdownWatch, flags, snapshot


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def names(found: tuple[Flag, ...]) -> list[str]:
    assert all(len(flag.words) > 10 for flag in found)
    return [flag.name for flag in found]


def pi(root: Path, bits: str) -> None:
    write(root, {"proc/device-tree/model": "Raspberry Pi 4 Model B", "vcgencmd/get_throttled": f"throttled=0x{bits}"})


def test_a_device_that_says_nothing_has_no_flags(tmp_path: Path) -> None:
    seen = snapshot(tmp_path)
    assert flags(seen, seen) == () and seen.hottest_c is None


def test_pw_04_a_pi_that_is_throttled_says_so(tmp_path: Path) -> None:
    pi(tmp_path, "50005")
    assert names(flags(snapshot(tmp_path), snapshot(tmp_path))) == ["throttled", "under-voltage"]


def test_what_happened_before_the_run_is_not_of_the_run(tmp_path: Path) -> None:
    pi(tmp_path, "50000")
    before = snapshot(tmp_path)
    assert flags(before, snapshot(tmp_path)) == ()
    pi(tmp_path, "d0000")
    assert names(flags(before, snapshot(tmp_path))) == ["soft-temperature-limit"]


@pytest.mark.parametrize("answer", ["", "error=1", "throttled=50005"])
def test_a_firmware_that_does_not_answer_is_no_flag(tmp_path: Path, answer: str) -> None:
    pi(tmp_path, "0")
    seen = snapshot(tmp_path, lambda question: answer)
    assert seen.active == {} and seen.counted == {}


def test_the_firmware_is_asked_by_its_own_question(tmp_path: Path) -> None:
    pi(tmp_path, "0")
    asked: list[str] = []

    def ask(question: str) -> str:
        asked.append(question)
        raise OSError("no firmware")

    assert snapshot(tmp_path, ask).counted == {} and asked == ["get_throttled"]


def test_over_current_events_of_an_orin_are_counted_from_the_start(tmp_path: Path) -> None:
    hwmon = "sys/class/hwmon/hwmon2"
    write(tmp_path, {f"{hwmon}/name": "soctherm_oc", f"{hwmon}/oc1_event_cnt": "3", f"{hwmon}/oc3_event_cnt": "7"})
    write(tmp_path, {"sys/class/hwmon/hwmon1/name": "tmp451", "sys/class/hwmon/hwmon1/oc2_event_cnt": "1"})
    before = snapshot(tmp_path)
    write(tmp_path, {f"{hwmon}/oc3_event_cnt": "9"})
    assert before.counted == {"oc1": 3, "oc3": 7}
    assert names(flags(before, snapshot(tmp_path))) == ["oc3"]


def test_alerts_are_flags_and_a_fan_is_not(tmp_path: Path) -> None:
    thermal = "sys/class/thermal/cooling_device"
    write(tmp_path, {f"{thermal}0/type": "pwm-fan", f"{thermal}0/cur_state": "3"})
    write(tmp_path, {f"{thermal}1/type": "cpu-throttle-alert", f"{thermal}1/cur_state": "1"})
    write(tmp_path, {f"{thermal}2/type": "gpu-throttle-alert", f"{thermal}2/cur_state": "0"})
    calm = snapshot(tmp_path / "elsewhere")
    assert names(flags(calm, snapshot(tmp_path), calm)) == ["cpu-throttle-alert"]  # seen in between only


def test_alarms_of_a_rail_bear_its_name(tmp_path: Path) -> None:
    device = "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon1"
    write(
        tmp_path, {f"{device}/in1_label": "VDD_IN", f"{device}/curr1_crit_alarm": "1", f"{device}/curr1_max_alarm": "0"}
    )
    (tmp_path / device / "curr3_crit_alarm").mkdir()  # not connected
    seen = snapshot(tmp_path)
    assert names(flags(seen, seen)) == ["VDD_IN-crit-current"]


def test_heat_of_an_x86_is_counted_over_all_its_cores(tmp_path: Path) -> None:
    cpus = "sys/devices/system/cpu/cpu"
    for number in range(4):
        write(tmp_path, {f"{cpus}{number}/thermal_throttle/package_throttle_count": "5"})
    before = snapshot(tmp_path)
    write(tmp_path, {f"{cpus}3/thermal_throttle/package_throttle_count": "6"})
    assert names(flags(before, snapshot(tmp_path))) == ["package-throttle"]


def test_the_hottest_zone_counts_and_zones_may_fail(tmp_path: Path) -> None:
    zones = "sys/class/thermal/thermal_zone"
    write(tmp_path, {f"{zones}0/type": "cpu-thermal", f"{zones}0/temp": "51000"})
    write(tmp_path, {f"{zones}1/type": "gpu-thermal", f"{zones}1/temp": "48500"})
    write(tmp_path, {f"{zones}2/type": "cv0-thermal", f"{zones}2/temp": "-256000", f"{zones}4/type": "soc"})
    (tmp_path / f"{zones}3/temp").mkdir(parents=True)
    seen = snapshot(tmp_path)
    assert seen.temperatures_c == {"cpu-thermal 0": 51.0, "gpu-thermal 1": 48.5} and seen.hottest_c == 51.0


def test_a_watch_sees_what_passes_and_asks_the_firmware_at_both_ends_only(tmp_path: Path) -> None:
    pi(tmp_path, "0")
    asked: list[str] = []
    now_s = [0.0]

    def ask(question: str) -> str:
        asked.append(question)
        return "throttled=0x0" if len(asked) == 1 else "throttled=0x10000"

    watch = SlowdownWatch(tmp_path, ask, lambda: now_s[0])
    alert = {"sys/class/thermal/cooling_device0/type": "gpu-throttle-alert"}
    for state in ("0", "1", "0"):
        write(tmp_path, {**alert, "sys/class/thermal/cooling_device0/cur_state": state})
        now_s[0] += LOOK_EVERY_S
        watch.look()
        watch.look()  # too soon
    assert len(asked) == 1
    assert names(watch.flags()) == ["gpu-throttle-alert", "under-voltage"] and len(asked) == 2
