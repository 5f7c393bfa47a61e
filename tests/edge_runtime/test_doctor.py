"""What edge-doctor says of boards and of machines without any meter."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from edge_runtime import doctor, tensorrt_find
from edge_runtime.meters import Probe, Timing
from edge_runtime.meters._sampled import SampledMeter
from tests.edge_runtime import power_worlds
from tests.edge_runtime.power_worlds import Workload, World

NAMES = ("ina", "pi_pmic", "rapl", "battery")


STEADY = World(Workload([(100.0, 7.5)]))
SENSORS: dict[str, Callable[[World], SampledMeter]] = {
    "ina": partial(power_worlds.ina, timing=Timing(window_s=0.007)),
    "rapl": power_worlds.rapl,
    "nvml": power_worlds.nvml,
    "kasa": power_worlds.plug,
}


@pytest.mark.parametrize("name", SENSORS)
@pytest.mark.parametrize("seed", range(5))
def test_steady_power_is_shown_as_it_is_however_late_the_meter_tells_it(
    name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = replace(STEADY, now_s=20.0 + seed / 10.0)
    meter = SENSORS[name](world)
    monkeypatch.setattr(doctor, "probe", lambda root, plug: Probe(meter, ("ina: not there",)))

    def wait(seconds: float) -> None:
        power_worlds.play(world, meter, [(world.now_s + seconds, lambda: None)], seed)

    found = doctor.examine(tmp_path, world.clock, wait)
    assert (found.meter, found.quality, found.reason) == (name, "measured", None)
    assert found.power_w == pytest.approx(7.5, rel=0.01) and found.not_used == ("ina: not there",)


def test_a_meter_that_falls_silent_shows_no_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = replace(STEADY, now_s=20.0)
    meter = power_worlds.plug(world)
    monkeypatch.setattr(doctor, "probe", lambda root, plug: Probe(meter, ()))

    def wait(seconds: float) -> None:
        power_worlds.play(world, meter, [(world.now_s + seconds, lambda: None)], seed=0)
        world.now_s += 60.0

    found = doctor.examine(tmp_path, world.clock, wait)
    assert found.power_w is None and (found.reason or "").startswith("kasa: no sample for 60.")


def test_without_any_meter_every_reason_is_named(tmp_path: Path) -> None:
    found = doctor.examine(tmp_path, lambda: 0.0, pytest.fail)
    assert (found.meter, found.power_w) == ("none", None)
    assert tuple(line.partition(":")[0] for line in found.not_used) == NAMES
    assert all(name in doctor.in_words(found) for name in NAMES)


def test_a_board_is_named_with_what_does_not_work_there_and_the_fix(tmp_path: Path) -> None:
    (tmp_path / "proc/device-tree").mkdir(parents=True)
    (tmp_path / "proc/device-tree/model").write_text("NVIDIA Jetson Orin Nano Developer Kit\0")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nv_tegra_release").write_text("# R35 (release), REVISION: 4.1, GCID: 1, BOARD: generic, EABI: a")
    found = doctor.examine(tmp_path, lambda: 0.0, pytest.fail)
    assert found.device is not None and found.device.profile == "jetson_orin_nano"
    assert "untested" in found.device.status
    assert any("3.8" in line and "JetPack 6.1" in line for line in found.device.unsupported)
    words = doctor.in_words(found)
    assert "profile jetson_orin_nano" in words and "install JetPack 6.1" in words


def test_a_device_that_no_profile_fits_is_told_as_such(tmp_path: Path) -> None:
    found = doctor.examine(tmp_path, lambda: 0.0, pytest.fail)
    assert found.device is None and "no profile fits" in doctor.in_words(found)


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import sys; from edge_runtime.doctor import main; sys.exit(main())", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_command_answers_as_one_document(tmp_path: Path) -> None:
    (tmp_path / "proc/device-tree").mkdir(parents=True)
    (tmp_path / "proc/device-tree/model").write_text("Raspberry Pi 4 Model B Rev 1.4\0")
    answer = json.loads(run("--root", str(tmp_path), "--format", "json").stdout)
    assert answer["device"]["profile"] == "raspberry_pi_4" and "--plug" in answer["device"]["unsupported"][0]
    assert (answer["kind"], answer["meter"], answer["power_w"]) == ("edge-doctor", "none", None)
    assert "meter     none" in run("--root", str(tmp_path)).stdout


def test_a_root_that_is_no_folder_is_one_line(tmp_path: Path) -> None:
    done = run("--root", str(tmp_path / "missing"))
    assert done.returncode == 2 and "--root should be a folder" in done.stderr and "Traceback" not in done.stderr


def test_a_jetson_says_which_python_owns_tensorrt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_runtime.tensorrt_find.find_spec", lambda name: None)
    assert tensorrt_find.look(tmp_path)[0].startswith("not installed")
    (tmp_path / "usr/lib/python3.99/dist-packages/tensorrt").mkdir(parents=True)
    (line,) = tensorrt_find.look(tmp_path)
    assert "system's Python 3.99 owns it" in line and "python3.99 -m venv --system-site-packages" in line
    assert "for which there is no such TensorRT" in line


def test_a_python_with_tensorrt_and_without_pycuda_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_runtime.tensorrt_find.find_spec", lambda name: object() if name == "tensorrt" else None)
    first, second = tensorrt_find.look(Path("/"))
    assert first.startswith("tensorrt ") and "in this Python" in first and "cutlayer[tensorrt]" in second
