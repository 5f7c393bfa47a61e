"""Clocks below their target, on file trees as kernels show them; and that a row of a profile says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_runtime.clocks import ClockWatch
from edge_runtime.profiling.measuring import Plan, measure
from edge_runtime.profiling.rows import Link, make_row
from edge_runtime.throttle import SlowdownWatch
from tests.edge_runtime.profiling.virtual_device import VirtualDevice
from tools.record_meter import record

CPU, GPU = "sys/devices/system/cpu/cpufreq", "sys/class/devfreq/17000000.gpu"
# Kernels say kHz of CPUs and Hz of GPUs. An Orin Nano after jetson_clocks: floors are pinned to the ceilings.
ORIN_NANO = {
    f"{CPU}/policy0/scaling_cur_freq": 1510400, f"{CPU}/policy0/scaling_min_freq": 1510400,
    f"{CPU}/policy0/scaling_max_freq": 1510400, f"{CPU}/policy4/scaling_cur_freq": 1510400,
    f"{CPU}/policy4/scaling_min_freq": 1510400, f"{CPU}/policy4/scaling_max_freq": 1510400,
    f"{GPU}/cur_freq": 624750000, f"{GPU}/min_freq": 624750000, f"{GPU}/max_freq": 624750000,
    f"{GPU}/target_freq": 624750000,
}  # fmt: skip
# A Raspberry Pi 5 under its default governor, with nothing to do.
PI_5 = {
    f"{CPU}/policy0/scaling_cur_freq": 1500000, f"{CPU}/policy0/scaling_min_freq": 1500000,
    f"{CPU}/policy0/scaling_max_freq": 2400000,
}  # fmt: skip
# A laptop whose floor somebody set to its turbo clock, which it holds on one core only; it promises 2.1 GHz.
LAPTOP = {
    f"{CPU}/policy0/scaling_cur_freq": 2900000, f"{CPU}/policy0/scaling_min_freq": 4700000,
    f"{CPU}/policy0/scaling_max_freq": 4700000, f"{CPU}/policy0/base_frequency": 2100000,
}  # fmt: skip


def write(root: Path, files: dict[str, int]) -> None:
    for name, value in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")


def looked_at(root: Path, board: dict[str, int], then: dict[str, int], seconds: int = 4) -> dict[str, str]:
    """What a watch that began on the board has seen after so many seconds of something else, looking once in each."""
    write(root, board)
    watch = ClockWatch(root)
    write(root, then)
    for second in range(seconds):
        watch.look(float(second))
    return watch.seen


@pytest.mark.parametrize("board", [ORIN_NANO, PI_5, LAPTOP, {}], ids=["orin nano", "pi 5", "laptop", "none"])
def test_a_device_as_it_was_set_has_no_low_clock(tmp_path: Path, board: dict[str, int]) -> None:
    assert looked_at(tmp_path, board, {}) == {}


def test_a_clock_under_its_floor_is_told_with_both_figures(tmp_path: Path) -> None:
    seen = looked_at(tmp_path, ORIN_NANO, {f"{CPU}/policy4/scaling_cur_freq": 729600})
    assert seen == {"cpu-clock policy4": "it runs at 730 MHz where 1510 MHz are set, for 3 s or more"}


def test_a_ceiling_that_was_lowered_is_told_under_any_governor(tmp_path: Path) -> None:
    seen = looked_at(tmp_path, PI_5, {f"{CPU}/policy0/scaling_max_freq": 1800000})
    assert seen == {"cpu-clock policy0": "its ceiling was lowered from 2400 MHz to 1800 MHz, for 3 s or more"}


def test_a_gpu_is_measured_by_what_its_governor_asks_for(tmp_path: Path) -> None:
    idle = {**ORIN_NANO, f"{GPU}/min_freq": 306000000, f"{GPU}/cur_freq": 306000000, f"{GPU}/target_freq": 306000000}
    assert looked_at(tmp_path, idle, {}) == {}
    assert list(looked_at(tmp_path, idle, {f"{GPU}/target_freq": 624750000})) == ["gpu-clock 17000000.gpu"]


def test_a_gpu_without_power_is_off_and_not_slow(tmp_path: Path) -> None:
    assert looked_at(tmp_path, ORIN_NANO, {f"{GPU}/cur_freq": 0}) == {}


def test_a_clock_that_cannot_be_read_is_not_slow(tmp_path: Path) -> None:
    write(tmp_path, ORIN_NANO)
    watch = ClockWatch(tmp_path)
    for path in (tmp_path / CPU / "policy0").iterdir():
        path.unlink()
        path.mkdir()  # reading it fails
    for second in range(5):
        watch.look(float(second))
    assert watch.seen == {}


def test_a_laptop_is_held_to_what_it_promises_and_no_more(tmp_path: Path) -> None:
    assert (
        looked_at(tmp_path, LAPTOP, {f"{CPU}/policy0/scaling_cur_freq": 2050000}) == {}
    )  # within what counters differ
    assert list(looked_at(tmp_path, LAPTOP, {f"{CPU}/policy0/scaling_cur_freq": 800000})) == ["cpu-clock policy0"]


@pytest.mark.parametrize(("moments_s", "is_told"), [
    ((0.0, 1.0, 2.0, 3.0), True), ((0.0, 1.0, 2.0, 2.9), False), ((0.0, 10.0), False), ((0.0, 10.0, 20.0), True),
])  # fmt: skip
def test_it_counts_once_it_was_low_for_three_seconds_and_looks(
    tmp_path: Path, moments_s: tuple[float, ...], is_told: bool
) -> None:
    write(tmp_path, ORIN_NANO)
    watch = ClockWatch(tmp_path)
    write(tmp_path, {f"{CPU}/policy0/scaling_cur_freq": 729600})
    for moment_s in moments_s:
        watch.look(moment_s)
    assert bool(watch.seen) == is_told


def test_a_clock_that_recovers_begins_anew(tmp_path: Path) -> None:
    write(tmp_path, ORIN_NANO)
    watch = ClockWatch(tmp_path)
    for second in range(12):
        write(tmp_path, {f"{CPU}/policy0/scaling_cur_freq": 1510400 if second % 3 == 0 else 729600})
        watch.look(float(second))
    assert watch.seen == {}


def test_a_recording_tells_of_its_clocks_what_the_board_does(tmp_path: Path) -> None:
    board, copy = tmp_path / "board", tmp_path / "recording"
    for kind, files in (("orin", ORIN_NANO), ("laptop", LAPTOP)):
        write(board / kind, files)
        (copy / kind).mkdir(parents=True)
        assert record(board / kind, copy / kind) == (len(files), [])
        assert all(int((copy / kind / name).read_text()) == value for name, value in files.items())


def test_a_profile_of_a_device_that_slows_down_says_so_in_its_row(tmp_path: Path) -> None:
    write(tmp_path, ORIN_NANO)
    device = VirtualDevice()
    watches: list[SlowdownWatch] = []

    def watch() -> object:
        watches.append(SlowdownWatch(tmp_path, clock=lambda: device.now_s))
        return lambda: tuple(f"{flag.name}: {flag.words}" for flag in watches[-1].flags())

    def look() -> None:
        if device.now_s > 150.0:
            write(tmp_path, {f"{GPU}/max_freq": 306000000})
        watches[-1].look()

    bench = device.bench()
    bench = type(bench)(bench.clock, bench.wait, bench.temperature_c, watch, bench.advance, look)  # type: ignore[arg-type]
    candidate = device.candidate(1, [("frontend", 0.5, 6.0)])
    measured = measure(candidate, Plan(5, 10.0, 30.0, 30.0, 20.0, 7), bench)
    row = make_row(candidate.point, ("frontend",), measured, None, "none", Link())
    assert row.throttled == (
        "gpu-clock 17000000.gpu: its ceiling was lowered from 625 MHz to 306 MHz, for 3 s or more",
    )  # fmt: skip
