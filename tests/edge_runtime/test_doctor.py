"""What edge-doctor says of boards and of machines without any meter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from edge_runtime import doctor

NAMES = ("ina", "pi_pmic", "rapl", "battery")


def rapl(root: Path, energy_uj: int) -> Path:
    folder = root / "sys/class/powercap/intel-rapl:0"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("name", "package-0"), ("energy_uj", energy_uj), ("max_energy_range_uj", 262143328850)):
        (folder / name).write_text(f"{text}\n")
    return folder / "energy_uj"


def test_a_counter_is_watched_for_a_moment(tmp_path: Path) -> None:
    counter, clock_s = rapl(tmp_path, 1_000_000), [0.0]

    def wait(seconds: float) -> None:
        clock_s[0] += seconds
        counter.write_text("9000000\n")

    found = doctor.examine(tmp_path, lambda: clock_s[0], wait)
    assert (found.meter, found.scope, found.quality, found.reason) == ("rapl", "package-0", "measured", None)
    assert found.power_w == pytest.approx(8.0 / doctor.WATCH_S)
    assert [line.partition(":")[0] for line in found.not_used] == ["ina", "pi_pmic"]


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
