"""Sensors that show power, on trees as boards have them, and the sum under their samples against known truth."""

from __future__ import annotations

import math
import random
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.meters import PowerTrace, probe, recording
from edge_runtime.meters._pieces import Piece, Sample, Timing, pieces_of
from edge_runtime.meters._reading import CounterLostError
from edge_runtime.meters._sampled import SampledMeter, Sampling
from edge_runtime.meters.battery import open_battery
from edge_runtime.meters.ina import find_rails, open_ina
from edge_runtime.meters.nvml import open_nvml
from edge_runtime.meters.pi_pmic import open_pi_pmic, rails_w

DRIVERS = "sys/bus/i2c/drivers"
ORIN_NANO = {"VDD_IN": (4984, 1856), "VDD_CPU_GPU_CV": (4984, 600), "VDD_SOC": (4984, 424)}


def write(root: Path, files: Mapping[str, str]) -> None:
    """Files as the kernel prints them: text and a line end."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def hwmon(root: Path, place: str, number: int, rails: Mapping[str, tuple[int, int]]) -> Path:
    """An INA3221 as L4T 34 and later show it; an unconnected channel answers reads with an error."""
    device = root / DRIVERS / "ina3221" / place / "hwmon" / f"hwmon{number}"
    for channel, (label, (millivolts, milliamperes)) in enumerate(rails.items(), start=1):
        write(device, {f"in{channel}_label": label.partition("#")[0]})
        if label.startswith("NC"):
            (device / f"in{channel}_input").mkdir()  # reading a folder is an OSError, as ENODATA is
        else:
            values = {f"in{channel}_input": str(millivolts), f"curr{channel}_input": str(milliamperes)}
            write(device, values)
    write(device, {"in7_label": "sum of shunt voltages", "in7_input": "9000"})
    return device


def power_of(root: Path) -> float:
    """What the board's sensor shows now."""
    meter, reasons = open_ina(root)
    assert meter is not None, reasons
    return meter._read()


def test_agx_orin_does_not_count_the_rail_that_another_feeds(tmp_path: Path) -> None:
    hwmon(tmp_path, "1-0040", 3, {"VDD_GPU_SOC": (20000, 300), "VDD_CPU_CV": (20000, 150), "VIN_SYS_5V0": (5000, 1056)})
    hwmon(tmp_path, "1-0041", 2, {"NC": (0, 0), "VDDQ_VDD2_1V8AO": (5000, 180), "NC#2": (0, 0)})
    assert power_of(tmp_path) == pytest.approx(14.28)  # 15.18 W with all that has a label
    meter, _ = open_ina(tmp_path)
    assert meter is not None and meter.scope == "module rails (VDD_GPU_SOC + VDD_CPU_CV + VIN_SYS_5V0)"


def test_orin_nano_is_its_input_rail(tmp_path: Path) -> None:
    hwmon(tmp_path, "1-0040", 1, ORIN_NANO)
    assert power_of(tmp_path) == pytest.approx(4.984 * 1.856)
    assert probe(tmp_path).meter.name == "ina"


@pytest.mark.parametrize("both", [True, False])
def test_jetson_nano_of_the_old_kernel_is_its_input_rail(tmp_path: Path, both: bool) -> None:
    device = tmp_path / DRIVERS / "ina3221x" / "6-0040" / "iio:device0"
    for number, (label, milliamperes) in enumerate((("POM_5V_IN", 600), ("POM_5V_GPU", 40), ("POM_5V_CPU", 200))):
        write(device, {f"rail_name_{number}": label})
        if both:
            write(device, {f"ui_input_{number}": f"5048 {milliamperes}"})
        else:
            write(device, {f"in_voltage{number}_input": "5048", f"in_current{number}_input": str(milliamperes)})
    write(device, {"warn_current_limit_0": "32760 ma"})
    assert power_of(tmp_path) == pytest.approx(3.0288)


def test_thor_is_what_its_carrier_takes(tmp_path: Path) -> None:
    hwmon(
        tmp_path, "2-0040", 4, {"VDD_GPU": (19700, 5060), "VDD_CPU_SOC_MSS": (19700, 600), "VIN_SYS_5V0": (5000, 900)}
    )
    write(tmp_path / DRIVERS / "ina238/2-0044/hwmon/hwmon5", {"in1_label": "VIN", "power1_input": "150000000"})
    assert power_of(tmp_path) == pytest.approx(150.0)


def test_agx_xavier_adds_up_six_rails_of_two_chips(tmp_path: Path) -> None:
    hwmon(tmp_path, "1-0040", 1, {"GPU": (19000, 100), "CPU": (19000, 100), "SOC": (19000, 100)})
    hwmon(tmp_path, "1-0041", 2, {"CV": (19000, 100), "VDDRQ": (19000, 100), "SYS5V": (19000, 100)})
    assert power_of(tmp_path) == pytest.approx(6 * 1.9)


def test_a_power_hat_counts_what_is_behind_it(tmp_path: Path) -> None:
    write(tmp_path / DRIVERS / "ina2xx/1-0040/hwmon/hwmon0", {"power1_input": "3250000"})
    assert power_of(tmp_path) == pytest.approx(3.25)


@pytest.mark.parametrize("places", [("1-0040", "2-0040"), ("1-0040", "1-0040")])
def test_a_label_that_is_there_twice_has_no_total(tmp_path: Path, places: tuple[str, str]) -> None:
    for number, place in enumerate(places):
        hwmon(tmp_path, place, number, {"VDD_IN": (5000, 1000 * (number + 1))})
    device = tmp_path / DRIVERS / "ina3221x" / "6-0041" / "iio:device0"
    write(device, {"rail_name_0": "VDD_IN", "ui_input_0": "5048 600"})
    meter, reasons = open_ina(tmp_path)
    assert meter is None and "VDD_IN 1-0040:1" in reasons[0] and "VDD_IN 6-0041:0" in reasons[0]


def test_thor_without_its_carrier_s_sensor_has_no_total(tmp_path: Path) -> None:
    hwmon(tmp_path, "2-0040", 4, {"VDD_GPU": (19700, 5060), "VDD_CPU_SOC_MSS": (19700, 600), "VIN_SYS_5V0": (5000, 9)})
    meter, reasons = open_ina(tmp_path)
    assert meter is None and "no total is known" in reasons[0]


@pytest.mark.parametrize(("label", "shown"), [("VBAT", "INA238 VBAT"), ("VDD_IN", "INA238 VDD_IN"), ("", "INA238")])
def test_another_board_s_ina238_is_named_and_is_no_total(tmp_path: Path, label: str, shown: str) -> None:
    write(tmp_path / DRIVERS / "ina238/2-0044/hwmon/hwmon5", {"in1_label": label, "power1_input": "150000000"})
    meter, reasons = open_ina(tmp_path)
    assert meter is None and reasons == [f"ina: no total is known for the rails {shown}"]


def test_two_power_hats_have_no_total(tmp_path: Path) -> None:
    for place in ("1-0040", "1-0041"):
        write(tmp_path / DRIVERS / f"ina2xx/{place}/hwmon/hwmon0", {"power1_input": "3250000"})
    meter, reasons = open_ina(tmp_path)
    assert meter is None and reasons == ["ina: no total is known for the rails HAT 1-0040, HAT 1-0041"]


def timing_of(root: Path) -> Timing:
    meter, reasons = open_ina(root)
    assert meter is not None, reasons
    return meter.timing


def test_what_the_board_says_of_its_conversions_is_its_window(tmp_path: Path) -> None:
    device = hwmon(tmp_path, "1-0040", 1, ORIN_NANO)
    assert timing_of(tmp_path).window_s == pytest.approx(0.007)
    write(device, {"update_interval": "105", "shunt1_resistor": "2000"})
    timing = timing_of(tmp_path)
    assert timing.window_s == timing.doubt_s == pytest.approx(0.105) and not timing.counts
    assert timing.step_w == pytest.approx(0.020 * 4.984 + 0.008 * 1.856)  # 40 uV at 2 mOhm, 8 mV


@pytest.mark.parametrize(("mode", "window_s"), [("1\n", 0.422), ("0\n", 0.0), (None, 0.0)])
def test_the_old_kernel_s_sensor_averages_or_not_and_is_doubted_either_way(
    tmp_path: Path, mode: str | None, window_s: float
) -> None:
    device = tmp_path / DRIVERS / "ina3221x" / "6-0040" / "iio:device0"
    write(device, {"rail_name_0": "POM_5V_IN", "ui_input_0": "5048 600"})
    if mode is not None:
        (device / "running_mode").write_text(mode)
    timing = timing_of(tmp_path)
    assert timing.window_s == window_s and timing.centre_s + timing.reach_s >= 0.422


def test_the_steps_of_all_rails_of_a_total_add_up(tmp_path: Path) -> None:
    hwmon(tmp_path, "1-0040", 3, {"VDD_GPU_SOC": (20000, 0), "VDD_CPU_CV": (20000, 0), "VIN_SYS_5V0": (5000, 0)})
    assert timing_of(tmp_path).step_w == pytest.approx(0.008 * (20 + 20 + 5))


def test_rails_without_a_declared_total_are_not_added_up(tmp_path: Path) -> None:
    hwmon(tmp_path, "1-0040", 1, {"VDD_NEW": (5000, 100), "VDD_OTHER": (5000, 100)})
    meter, reasons = open_ina(tmp_path)
    assert meter is None and reasons == ["ina: no total is known for the rails VDD_NEW, VDD_OTHER"]


def test_a_total_with_an_unreadable_rail_is_no_total(tmp_path: Path) -> None:
    device = hwmon(tmp_path, "1-0040", 1, ORIN_NANO)
    (device / "curr1_input").unlink()
    (device / "curr1_input").mkdir()
    meter, reasons = open_ina(tmp_path)
    assert meter is None and "VDD_IN" in reasons[0] and "cannot be read" in reasons[0]
    assert "VDD_SOC" in find_rails(tmp_path)


def battery(root: Path, **files: str) -> None:
    write(root / "sys/class/power_supply/BAT0", files)


def test_a_battery_that_discharges_shows_the_whole_machine(tmp_path: Path) -> None:
    battery(tmp_path, status="Discharging", power_now="12500000")
    write(
        tmp_path / "sys/class/power_supply/BAT1", {"status": "Discharging", "scope": "Device", "power_now": "9000000"}
    )
    meter, _ = open_battery(tmp_path)
    assert meter is not None and meter._read() == pytest.approx(12.5)  # without the mouse
    battery(tmp_path, status="Charging")
    with pytest.raises(ValueError, match="mains"):
        meter._read()


@pytest.mark.parametrize("current", ["-1500000", "1500000"])
def test_a_battery_may_show_current_of_either_sign(tmp_path: Path, current: str) -> None:
    battery(tmp_path, status="Discharging", current_now=current, voltage_now="11400000")
    meter, _ = open_battery(tmp_path)
    assert meter is not None and meter._read() == pytest.approx(17.1)


def test_batteries_of_other_names_count_and_those_of_mice_do_not(tmp_path: Path) -> None:
    supplies = tmp_path / "sys/class/power_supply"
    reads = {"type": "Battery", "status": "Discharging"}
    write(supplies / "CMB0", {**reads, "power_now": "7000000"})
    write(supplies / "hid-mouse-battery", {**reads, "capacity": "80"})
    write(supplies / "AC", {"type": "Mains", "online": "0", "current_now": "3000000"})
    meter, _ = open_battery(tmp_path)
    assert meter is not None and meter._read() == pytest.approx(7.0) and meter.scope == "whole machine (CMB0)"


@pytest.mark.parametrize("power", ["power_now", "current_now"])
def test_no_power_while_it_discharges_is_unknown_and_not_zero(tmp_path: Path, power: str) -> None:
    battery(tmp_path, status="Discharging", voltage_now="11400000", **{power: "0"})
    meter, reasons = open_battery(tmp_path)
    assert meter is None and "BAT0 discharges and shows 0 W" in reasons[0]


@pytest.mark.parametrize("spoiled", ["", "-\n", None])
def test_power_that_cannot_be_read_is_current_times_voltage(tmp_path: Path, spoiled: str | None) -> None:
    battery(tmp_path, status="Discharging", current_now="1500000", voltage_now="11400000")
    path = tmp_path / "sys/class/power_supply/BAT0/power_now"
    path.mkdir() if spoiled is None else path.write_text(spoiled)
    meter, _ = open_battery(tmp_path)
    assert meter is not None and meter._read() == pytest.approx(17.1)


@pytest.mark.parametrize(
    "supply", [("ADP1", "Mains", "1"), ("ucsi-source-psy-0", "USB", "2"), ("wpc", "Wireless", "1")]
)
def test_a_battery_that_helps_a_weak_charger_is_not_the_whole_machine(
    tmp_path: Path, supply: tuple[str, str, str]
) -> None:
    name, kind, online = supply
    battery(tmp_path, status="Discharging", power_now="2500000", online="1")
    supplies = tmp_path / "sys/class/power_supply"
    write(supplies / name, {"type": kind, "online": "0"})
    write(supplies / "hid-mouse", {"type": "Battery", "scope": "Device", "online": "1"})
    meter, _ = open_battery(tmp_path)
    assert meter is not None and meter._read() == pytest.approx(2.5)
    write(supplies / name, {"online": online})
    with pytest.raises(ValueError, match=f"{name} feeds the machine: mains"):
        meter._read()


def test_a_battery_that_charges_takes_what_another_gives(tmp_path: Path) -> None:
    battery(tmp_path, status="Discharging", power_now="20000000")
    beside = tmp_path / "sys/class/power_supply/BAT1"
    write(beside, {"type": "Battery", "status": "Charging", "power_now": "8000000"})
    meter, reasons = open_battery(tmp_path)
    assert meter is None and "BAT1 is charged" in reasons[0]
    write(beside, {"status": "Not charging", "power_now": "0"})
    meter, _ = open_battery(tmp_path)
    assert meter is not None and meter._read() == pytest.approx(20.0)


def test_what_cannot_be_read_of_other_supplies_spoils_no_battery(tmp_path: Path) -> None:
    battery(tmp_path, status="Discharging", power_now="12500000")
    supplies = tmp_path / "sys/class/power_supply"
    write(supplies / "BAT1", {"type": "Battery", "present": "0"})
    for unreadable in ("BAT1/status", "ucsi-source-psy-0/type", "ucsi-source-psy-0/online", "hidpp/scope", "CMB9/type"):
        (supplies / unreadable).mkdir(parents=True)  # reading a folder is an OSError, as ENODEV is
    write(supplies / "CMB9", {"power_now": "1"})
    (supplies / "odd").mkdir()
    (supplies / "odd/type").write_bytes(b"\xff\n")
    meter = probe(tmp_path).meter
    assert meter.name == "battery" and isinstance(meter, SampledMeter) and meter._read() == pytest.approx(12.5)


def test_a_machine_on_mains_says_why_its_battery_is_no_meter(tmp_path: Path) -> None:
    battery(tmp_path, status="Full", power_now="0")
    meter, reasons = open_battery(tmp_path)
    assert meter is None and "mains" in reasons[0]


PMIC = """      3V7_WL_SW_A current(0)=0.10000000A
        3V3_SYS_A current(1)=0.20000000A
      3V7_WL_SW_V volt(8)=3.70000000V
        3V3_SYS_V volt(9)=3.30000000V
          EXT5V_V volt(24)=5.10000000V
           BATT_V volt(25)=0.00000000V
"""


def pi(root: Path, model: str) -> None:
    path = root / "proc/device-tree/model"
    path.parent.mkdir(parents=True)
    path.write_text(model + "\0")


def test_pi_5_adds_up_the_rails_that_have_a_current(tmp_path: Path) -> None:
    pi(tmp_path, "Raspberry Pi 5 Model B Rev 1.0")
    meter, _ = open_pi_pmic(tmp_path, lambda question: PMIC)
    assert meter is not None and meter._read() == pytest.approx(1.03)


def test_a_current_that_flows_back_counts_as_what_it_is() -> None:
    assert rails_w(PMIC.replace("0.20000000A", "-0.00048842A"))["3V3_SYS"] == pytest.approx(-0.00048842 * 3.3)


@pytest.mark.parametrize("odd", ["nanA", "infA", "0,2A", "A", "", "0.2.0A", "0.2V", "0.2"])
def test_a_rail_whose_figure_is_no_number_is_an_error_and_not_left_out(odd: str) -> None:
    for shown in ("0.20000000A", "3.30000000V"):
        with pytest.raises(ValueError, match="3V3_SYS_[AV].* shows no number"):
            rails_w(PMIC.replace(shown, odd.replace("A", shown[-1]) if odd != "0.2V" else "0.2W"))


def test_an_answer_that_has_lost_a_rail_is_an_error(tmp_path: Path) -> None:
    pi(tmp_path, "Raspberry Pi 5 Model B Rev 1.0")
    answers = [PMIC, PMIC, "\n".join(line for line in PMIC.splitlines() if "3V3_SYS" not in line), PMIC]
    meter, _ = open_pi_pmic(tmp_path, lambda question: answers.pop(0))
    assert meter is not None and meter._read() == pytest.approx(1.03)
    with pytest.raises(ValueError, match=r"other rails than before \(3V3_SYS\)"):
        meter._read()
    assert meter._read() == pytest.approx(1.03)


@pytest.mark.parametrize("model", ["Raspberry Pi Compute Module 5 Rev 1.0", "Raspberry Pi 500 Rev 1.0"])
def test_other_boards_of_the_fifth_generation_are_asked(tmp_path: Path, model: str) -> None:
    pi(tmp_path, model)
    assert open_pi_pmic(tmp_path, lambda question: PMIC)[0] is not None
    meter, reasons = open_pi_pmic(tmp_path, lambda question: "")
    assert meter is None and reasons == ["pi_pmic: it has no currents"]


@pytest.mark.parametrize("text", ["", 'error=1 error_msg="Command not registered"', PMIC.replace("3V3_SYS_V", "X_V")])
def test_what_is_not_the_answer_of_a_pi_5_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="pmic_read_adc|no currents"):
        rails_w(text)


def test_pi_4_has_no_sensor_and_says_what_to_use(tmp_path: Path) -> None:
    pi(tmp_path, "Raspberry Pi 4 Model B Rev 1.4")
    meter, reasons = open_pi_pmic(tmp_path, lambda question: PMIC)
    assert meter is None and "smart plug" in reasons[0]


class Nvml:
    """NVML as a library that starts; on a Jetson it answers nothing."""

    class NVMLError(Exception):
        pass

    def __init__(self, counters_mj: list[int] | None, silent: tuple[int, ...] = ()) -> None:
        self.counters_mj, self._silent = counters_mj, silent

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 1 if self.counters_mj is None else len(self.counters_mj)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if self.counters_mj is None or handle in self._silent:
            raise self.NVMLError("Not Supported")
        return self.counters_mj[handle]


def test_nvml_counts_all_boards_from_its_first_read() -> None:
    library = Nvml([5_000_000, 7_000_000])
    meter, _ = open_nvml(lambda name: library)
    assert meter is not None and meter.scope == "2 GPU board(s)" and meter.timing.doubt_s == 0.1
    assert meter._read() == 12_000.0
    library.counters_mj = [5_001_000, 7_000_500]
    assert meter._read() == pytest.approx(12_001.5)
    library.counters_mj = [10, 8_000_000]
    with pytest.raises(CounterLostError, match="loaded again"):
        meter._read()
    library.counters_mj = None
    with pytest.raises(OSError, match="Not Supported"):
        meter._read()


def test_nvml_that_starts_and_cannot_be_read_is_no_meter() -> None:
    meter, reasons = open_nvml(lambda name: Nvml(None))
    assert meter is None and "Not Supported" in reasons[0]


def test_nvml_measures_the_boards_that_count_and_names_the_others() -> None:
    meter, reasons = open_nvml(lambda name: Nvml([5_000, 7_000, 9_000], silent=(1,)))
    assert meter is not None and meter._read() == pytest.approx(14.0) and meter.scope == "GPU boards 0, 2 of 3"
    assert reasons == ["nvml: board 1 shows no energy (Not Supported)"] and meter.note == f"partial: {reasons[0]}"


@pytest.mark.parametrize("missing", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetTotalEnergyConsumption"])
def test_nvml_of_a_package_that_lacks_a_function_is_no_meter(missing: str) -> None:
    names = {"nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetTotalEnergyConsumption"}
    old = SimpleNamespace(**{name: getattr(Nvml([1]), name) for name in names - {missing}})
    meter, reasons = open_nvml(lambda name: old)
    assert meter is None and missing in reasons[0]


def test_nvml_that_is_not_installed_is_no_meter() -> None:
    def load(name: str) -> object:
        raise ImportError(name)

    meter, reasons = open_nvml(load)
    assert meter is None and "nvidia-ml-py" in reasons[0]


class Simulated:
    """Power as a function of a clock that moves with every look at it."""

    name, scope, quality = "simulated", "all", "measured"

    def __init__(self, power_w: Callable[[float], float | None]) -> None:
        self.now_s, self._power_w = 0.0, power_w

    def clock(self) -> float:
        return self.now_s

    def read_w(self) -> float:
        watts = self._power_w(self.now_s)
        if watts is None:
            raise OSError("no data")
        return watts


def play(sensor: Simulated, sampling: Sampling, seconds: float, seed: int = 0) -> SampledMeter:
    """A meter after `seconds` of jittered samples."""
    meter, rng = SampledMeter(sensor, sampling, sensor.clock, start=lambda meter: None), random.Random(seed)  # type: ignore[arg-type]
    meter.read(0.0)
    while sensor.now_s < seconds:
        sensor.now_s = min(sensor.now_s + meter.wait_s(rng), seconds)
        meter.sample()
    return meter


def test_a_hundred_random_workloads_are_measured_to_one_in_a_hundred() -> None:
    rng = random.Random(1)
    for seed in range(100):
        levels = [rng.uniform(1, 15) for _ in range(5)]
        widths = [rng.uniform(0.5, 5.0) for _ in levels]
        edges = [sum(widths[: place + 1]) for place in range(len(widths))]

        def power_w(now_s: float, levels: list[float] = levels, edges: list[float] = edges) -> float:
            inside = now_s % edges[-1]
            return next(level for level, edge in zip(levels, edges, strict=True) if inside < edge)

        seconds = 20 * edges[-1]
        truth_j = 20 * sum(level * width for level, width in zip(levels, widths, strict=True))
        measured = play(Simulated(power_w), Sampling(0.1), seconds, seed).read(seconds)
        assert measured.energy_j == pytest.approx(truth_j, rel=0.01)


def test_jitter_keeps_a_workload_from_beating_with_the_sampler() -> None:
    def busy(now_s: float) -> float:
        return 6.0 if now_s % 0.5 < 0.12 else 2.0

    truth_j = 600.0 * (0.24 * 6.0 + 0.76 * 2.0)
    even = play(Simulated(busy), Sampling(0.5, jitter=0.0), 600.0).read(0.0).energy_j
    jittered = play(Simulated(busy), Sampling(0.5), 600.0).read(0.0).energy_j
    assert even is not None and jittered is not None
    assert abs(even - truth_j) / truth_j > 0.3 > 0.05 > abs(jittered - truth_j) / truth_j


def test_a_gap_is_not_bridged_and_is_said() -> None:
    def lost(now_s: float) -> float | None:
        return None if 50.0 < now_s < 55.0 else 10.0

    reading = play(Simulated(lost), Sampling(0.1, gap_most_s=1.0), 100.0).read(0.0)
    assert reading.energy_j == pytest.approx(950.0, abs=5.0)
    assert reading.reason is not None and re.search(r"partial: .* 9[45]\.\d% of the time", reading.reason)


def test_a_sensor_that_is_mostly_away_measures_nothing() -> None:
    def lost(now_s: float) -> float | None:
        return None if now_s > 50.0 else 10.0

    reading = play(Simulated(lost), Sampling(0.1), 100.0).read(0.0)
    assert reading.energy_j is None and reading.reason is not None and "no data" in reading.reason


def test_a_sensor_that_never_answers_is_unknown_and_not_zero() -> None:
    reading = play(Simulated(lambda now_s: None), Sampling(0.1), 1.0).read(0.0)
    assert reading.energy_j is None


@given(st.lists(st.tuples(st.floats(0.001, 5.0), st.none() | st.floats(0.0, 100.0)), max_size=40))
def test_pieces_follow_one_another_and_hold_no_more_than_the_highest_power(
    steps: list[tuple[float, float | None]],
) -> None:
    pieces, now_s, found = pieces_of(Timing(), 1.0), 0.0, []
    for apart_s, watts in steps:
        now_s += apart_s
        piece = pieces.add(Sample(now_s, watts, None if watts is not None else "lost"))
        found += [piece] if piece else []
    assert all(before.end_s == after.begin_s for before, after in zip(found, found[1:], strict=False))
    assert all(each.gap is not None or each.duration_s <= 1.0 for each in found)
    highest_w = max((watts for _, watts in steps if watts is not None), default=0.0)
    covered_s = sum(each.duration_s for each in found if each.gap is None)
    assert 0.0 <= sum(each.energy_j for each in found) <= highest_w * covered_s + 1e-6
    assert math.isfinite(covered_s) and covered_s <= now_s


def test_a_sample_that_comes_late_is_left_out() -> None:
    pieces = pieces_of(Timing(), 1.0)
    found = [pieces.add(Sample(at_s, 4.0)) for at_s in (0.0, 0.5, 0.3, 1.0)]
    assert sum(piece.energy_j for piece in found if piece) == pytest.approx(4.0)


def counted(*steps: tuple[float, float | None], window_s: float = 0.1) -> list[Piece]:
    """The pieces of a counter's samples: moment, joules."""
    pieces = pieces_of(Timing(window_s=window_s, counts=True), 10.0)
    found = [pieces.add(Sample(at_s, joules, None if joules is not None else "lost")) for at_s, joules in steps]
    return [piece for piece in found if piece]


def test_a_counter_is_linear_between_its_changes() -> None:
    (piece,) = counted((0.00, 5.0), (0.03, 5.0), (0.06, 5.5), (0.09, 5.5), (0.12, 5.5), (0.16, 6.0), (0.2, 6.0))[1:]
    assert (piece.begin_s, piece.end_s) == (pytest.approx(0.045), pytest.approx(0.14))
    assert piece.energy_j == pytest.approx(0.5) and piece.doubt_s == pytest.approx(0.02)


def test_a_counter_that_is_read_seldom_changed_a_window_before_the_read_at_most() -> None:
    (piece,) = counted((0.0, 5.0), (3.0, 8.0))
    assert (piece.begin_s, piece.end_s) == (pytest.approx(-0.05), pytest.approx(2.95))


def test_a_failed_read_of_a_counter_loses_nothing() -> None:
    pieces = counted((0.0, 5.0), (1.0, None), (2.0, 7.0))
    assert sum(piece.energy_j for piece in pieces) == pytest.approx(2.0) and all(piece.gap is None for piece in pieces)


def test_a_counter_that_goes_back_or_stands_still_is_a_gap() -> None:
    pieces = counted((0.0, 5.0), (1.0, 6.0), (2.0, 1.0), (3.0, 2.0))
    assert [piece.gap for piece in pieces] == [None, "the counter went back", None]
    assert sum(piece.energy_j for piece in pieces) == pytest.approx(2.0)
    pieces = counted((0.0, 5.0), (1.0, 6.0), (12.0, 6.0), (13.0, 7.0), (14.0, 8.0))
    assert [piece.gap for piece in pieces] == [None, "the counter stands still", "the counter stands still", None]


def test_a_counter_that_is_away_for_long_is_a_gap() -> None:
    pieces = counted((0.0, 5.0), (1.0, 6.0), (30.0, 300.0), (31.0, 301.0))
    assert [piece.gap is None for piece in pieces] == [True, False, True]
    pieces = counted((0.0, 5.0), (5.0, None), (11.0, None), (12.0, 9.0), (13.0, 10.0))
    assert [piece.gap for piece in pieces] == ["lost", "lost", None]


def test_sampling_runs_on_a_thread_of_its_own() -> None:
    sensor = Simulated(lambda now_s: 5.0)
    started: list[SampledMeter] = []
    meter = SampledMeter(sensor, Sampling(0.1), sensor.clock, start=started.append)  # type: ignore[arg-type]
    for _ in range(3):
        meter.read(0.0)
    assert started == [meter]


def test_a_sum_that_stands_still_is_unknown_after_a_gap_s_time() -> None:
    sensor = Simulated(lambda now_s: 5.0)
    meter = play(sensor, Sampling(1.0, at_reads=False), 4.0)
    sensor.now_s = 5.9
    assert meter.read(5.9).energy_j == pytest.approx(20.0)
    sensor.now_s = 600.0
    assert (meter.read(600.0).energy_j, meter.read(600.0).reason) == (None, "simulated: no sample for 596.0 s")
    meter.failure = "no answer"
    assert meter.read(600.0).reason == "simulated: no sample for 596.0 s after one that failed (no answer)"


def test_a_read_waits_a_while_only_for_a_sensor_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_runtime.meters._sampled.READ_WAIT_MOST_S", 0.01)
    sensor = Simulated(lambda now_s: 5.0)
    meter = play(sensor, Sampling(1.0), 4.0)
    is_reading, goes_on = threading.Event(), threading.Event()

    def hang(now_s: float) -> float:
        is_reading.set()
        goes_on.wait(30.0)
        return 5.0

    sensor._power_w = hang
    sampler = threading.Thread(target=meter.sample)
    sampler.start()
    try:
        assert is_reading.wait(30.0)
        assert meter.read(5.0).energy_j == pytest.approx(20.0)
        assert meter.read(50.0).reason == "simulated: no sample for 46.0 s"
    finally:
        goes_on.set()
        sampler.join()


@pytest.mark.parametrize(
    ("failure", "said"), [(ZeroDivisionError("odd"), "ZeroDivisionError: odd"), (OSError(), "OSError"), (None, "nan")]
)
def test_whatever_a_sensor_raises_or_shows_is_a_failed_sample(failure: Exception | None, said: str) -> None:
    def odd(now_s: float) -> float:
        if now_s <= 50.0:
            return 10.0
        if failure is not None:
            raise failure
        return math.nan

    meter = play(Simulated(odd), Sampling(0.1), 100.0)
    reading = meter.read(100.0)
    assert reading.energy_j is None and reading.reason is not None and said in reading.reason
    assert meter.failure is not None and said in meter.failure


def test_one_that_cannot_take_a_piece_spoils_nothing_for_the_others() -> None:
    sensor, taken = Simulated(lambda now_s: 5.0), list[Piece]()
    meter = play(sensor, Sampling(1.0), 4.0)

    def spoiled(piece: Piece) -> None:
        raise KeyError("stage")

    meter.watch(spoiled)
    meter.watch(taken.append)
    for _ in range(3):
        sensor.now_s += 1.0
        meter.sample()
    assert [piece.energy_j for piece in taken] == [5.0] * 3 and meter.read(7.0).energy_j == pytest.approx(35.0)
    assert meter.failure is not None and "could not be taken (KeyError: 'stage')" in meter.failure


def test_sampling_is_fine_while_a_block_is_recorded() -> None:
    sensor, rng = Simulated(lambda now_s: 5.0), random.Random(0)
    sampling = Sampling(0.1, fine_interval_s=0.01, timing=Timing(window_s=0.02, lag_s=0.3))
    meter = SampledMeter(sensor, sampling, sensor.clock, start=lambda meter: None)  # type: ignore[arg-type]
    assert min(meter.wait_s(rng) for _ in range(20)) >= 0.05
    assert meter.settle_s == pytest.approx(0.3 + 0.02 + 0.15)
    with recording(meter) as trace:
        assert max(meter.wait_s(rng) for _ in range(20)) <= 0.015
        assert meter.settle_s == pytest.approx(0.3 + 0.02 + 0.015)
        for _ in range(100):
            sensor.now_s += 0.01
            meter.sample()
    meter.sample()
    assert min(meter.wait_s(rng) for _ in range(20)) >= 0.05
    assert trace.energy_between(0.0, 0.5).energy_j == pytest.approx(2.5)
    assert trace.energy_between(0.6, 1.6).energy_j is None  # of the end it has not told yet
    assert len(trace.samples(-1.0, 2.0)) == 100


def test_a_trace_knows_its_peak_with_its_window_and_what_nearly_all_is_below() -> None:
    trace = PowerTrace(Timing(window_s=0.007))
    for number in range(2000):
        watts = 50.0 if number == 1000 else number / 200.0
        trace.add(Piece(number / 100, (number + 1) / 100, watts, watts))
    powers = trace.powers(0.0, 20.0)
    assert (powers.peak_w, powers.peak_window_s, powers.samples) == (50.0, 0.007, 2000)
    assert powers.p999_w == pytest.approx(9.99) and powers.mean_w == pytest.approx(5.02, abs=0.01)
    nothing = trace.powers(30.0, 40.0)
    assert (nothing.mean_w, nothing.peak_w, nothing.p999_w, nothing.samples) == (None, None, None, 0)


def test_a_bound_grows_with_what_is_not_covered() -> None:
    whole, holed = PowerTrace(Timing()), PowerTrace(Timing())
    for number in range(1000):
        piece = Piece(number / 100, (number + 1) / 100, 5.0, 5.0)
        whole.add(piece)
        holed.add(replace(piece, gap="lost") if 300 <= number < 350 else piece)
    known, partial = whole.energy_between(0.0, 10.0), holed.energy_between(0.0, 10.0)
    assert known.bound_j is not None and partial.bound_j is not None and partial.energy_j is not None
    assert partial.coverage == pytest.approx(0.95) and partial.reason is not None and "lost" in partial.reason
    assert partial.bound_j - known.bound_j == pytest.approx(2.5) and partial.energy_j == pytest.approx(47.5)
