"""A recorded board is diagnosed as the board itself, and tells nothing of whose it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edge_runtime import doctor
from edge_runtime.throttle import snapshot
from tools.record_meter import record

ROOT = Path(__file__).parents[2]
SECRETS = (
    "SN0123456789",
    "a4:83:e7:12:34:56",
    "a4_83_e7_12_34_56",
    "6e3c1b1a-9a9f-4b52-8d1c-1f2e3d4c5b6a",
    "ward-7-camera",
)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def identify(root: Path) -> None:
    """What must not be recorded, where boards have it."""
    serial, mac, mac_name, uuid, host = SECRETS
    supply = f"sys/class/power_supply/hid-{mac}-battery"
    write(root, {
        "etc/hostname": f"{host}\n", "etc/machine-id": f"{uuid}\n", "proc/sys/kernel/random/boot_id": f"{uuid}\n",
        "proc/device-tree/serial-number": f"{serial}\0", "sys/class/net/eth0/address": f"{mac}\n",
        "sys/class/dmi/id/product_uuid": f"{uuid}\n",
        "proc/cpuinfo": f"vendor_id\t: GenuineIntel\nSerial\t\t: {serial}\nModel\t\t: A Board Rev 1.0\n",
        f"{supply}/type": "Battery\n", f"{supply}/scope": "Device\n", f"{supply}/status": "Discharging\n",
        f"{supply}/power_now": "1\n", f"sys/class/power_supply/wacom_{mac_name}/type": "Battery\n",
        f"{supply}/serial_number": f"{serial}\n", "sys/class/thermal/thermal_zone7/type": f"{host} {mac}\n",
    })  # fmt: skip


def orin(root: Path) -> None:
    """An AGX Orin: a rail that is not connected, one that another feeds, an alarm, a fan."""
    device = "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3"
    rails = {"VDD_GPU_SOC": (20000, 300), "VDD_CPU_CV": (20000, 150), "VIN_SYS_5V0": (5000, 1056)}
    for number, (label, (millivolts, milliamperes)) in enumerate(rails.items(), start=1):
        write(root, {
            f"{device}/in{number}_label": f"{label}\n", f"{device}/in{number}_input": f"{millivolts}\n",
            f"{device}/curr{number}_input": f"{milliamperes}\n", f"{device}/shunt{number}_resistor": "2000\n",
        })  # fmt: skip
    other = "sys/bus/i2c/drivers/ina3221/1-0041/hwmon/hwmon2"
    write(root, {f"{device}/update_interval": "7\n", f"{device}/curr1_crit_alarm": "1\n", f"{other}/in1_label": "NC\n"})
    (root / other / "in1_input").mkdir()
    write(root, {
        "sys/class/hwmon/hwmon5/name": "soctherm_oc\n", "sys/class/hwmon/hwmon5/oc1_event_cnt": "3\n",
        "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n", "sys/class/thermal/thermal_zone0/temp": "51250\n",
        "sys/class/thermal/cooling_device0/type": "gpu-throttle-alert\n",
        "sys/class/thermal/cooling_device0/cur_state": "1\n",
        "proc/device-tree/model": "NVIDIA Jetson AGX Orin Developer Kit\0",
        "proc/device-tree/compatible": "nvidia,p3737-0000+p3701-0005\0nvidia,p3701-0005\0nvidia,tegra234\0",
        "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 3896, BOARD: generic, EABI: aarch64, DATE: x\n",
    })  # fmt: skip


def old_nano(root: Path) -> None:
    device = "sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0"
    for number, label in enumerate(("POM_5V_IN", "POM_5V_GPU", "POM_5V_CPU")):
        write(root, {f"{device}/rail_name_{number}": f"{label}\n", f"{device}/ui_input_{number}": "5048 600\n"})
    write(root, {f"{device}/warn_current_limit_0": "32760 ma\n", f"{device}/running_mode": "1\n"})


def pi(root: Path) -> None:
    answer = "     3V7_WL_SW_A current(0)=0.10000000A\n     3V7_WL_SW_V volt(8)=3.70000000V\n"
    write(root, {
        "proc/device-tree/model": "Raspberry Pi 5 Model B Rev 1.0\0", "vcgencmd/pmic_read_adc": answer,
        "vcgencmd/get_throttled": "throttled=0x50005\n",
    })  # fmt: skip


def laptop(root: Path) -> None:
    """A battery that discharges; RAPL that nobody may read."""
    write(root, {
        "sys/class/power_supply/BAT0/type": "Battery\n", "sys/class/power_supply/BAT0/status": "Discharging\n",
        "sys/class/power_supply/BAT0/power_now": "9125000\n", "sys/class/power_supply/BAT0/serial_number": SECRETS[0],
        "sys/class/power_supply/AC/online": "0\n",
        "sys/class/powercap/intel-rapl:0/name": "package-0\n",
        "sys/class/powercap/intel-rapl:0/max_energy_range_uj": "262143328850\n",
        "sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count": "12\n",
        "sys/devices/system/cpu/cpufreq/policy0/scaling_governor": "powersave\n",
    })  # fmt: skip
    (root / "sys/class/powercap/intel-rapl:0/energy_uj").mkdir()


def diagnose(root: Path) -> doctor.Diagnosis:
    now_s = [0.0]

    def wait(seconds: float) -> None:
        now_s[0] += seconds

    return doctor.examine(root, lambda: now_s[0], wait)


BOARDS = {"orin": orin, "old_nano": old_nano, "pi": pi, "laptop": laptop}


@pytest.mark.parametrize("board", BOARDS)
def test_a_recording_is_diagnosed_as_its_board(tmp_path: Path, board: str) -> None:
    (tmp_path / "board").mkdir()
    identify(tmp_path / "board")
    BOARDS[board](tmp_path / "board")
    written, left_out = record(tmp_path / "board", tmp_path / "recording")
    assert written >= 3 and any("hid-" in line for line in left_out)
    itself, recorded = diagnose(tmp_path / "board"), diagnose(tmp_path / "recording")
    # How much was used meanwhile is of the moment; which meter there is and why no other, is of the board.
    assert (recorded.meter, recorded.scope, recorded.quality) == (itself.meter, itself.scope, itself.quality)
    assert recorded.meter != "none" and recorded.device == itself.device
    not_used = [line.replace(str(tmp_path / "recording"), str(tmp_path / "board")) for line in recorded.not_used]
    assert not_used == list(itself.not_used)
    first, again = snapshot(tmp_path / "board"), snapshot(tmp_path / "recording")
    assert (again.active, again.counted) == (first.active, first.counted)
    assert again.hottest_c == first.hottest_c


@pytest.mark.parametrize("board", BOARDS)
def test_a_recording_tells_nothing_of_whose_the_board_is(tmp_path: Path, board: str) -> None:
    (tmp_path / "board").mkdir()
    BOARDS[board](tmp_path / "board")
    identify(tmp_path / "board")
    record(tmp_path / "board", tmp_path / "recording")
    told = "\n".join(
        f"{path.relative_to(tmp_path)} {path.read_text() if path.is_file() else ''}"
        for path in (tmp_path / "recording").rglob("*")
    )
    assert [secret for secret in SECRETS if secret in told] == []
    assert "Model\t\t: A Board Rev 1.0" in told


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads files of mode 000")
def test_what_the_user_may_not_read_stays_so_in_the_recording(tmp_path: Path) -> None:
    laptop(tmp_path / "board")
    counter = tmp_path / "board/sys/class/powercap/intel-rapl:0/energy_uj"
    counter.rmdir()
    counter.touch(mode=0)
    record(tmp_path / "board", tmp_path / "recording")
    assert any("permission denied" in line for line in diagnose(tmp_path / "recording").not_used)


def test_a_file_of_another_form_is_left_out_and_said(tmp_path: Path) -> None:
    pi(tmp_path / "board")
    write(tmp_path / "board", {"sys/class/power_supply/BAT0/status": "call 555-0100 {for} help\n"})
    _, left_out = record(tmp_path / "board", tmp_path / "recording")
    assert left_out == ["sys/class/power_supply/BAT0/status: it has another form than is known to be harmless"]
    assert not (tmp_path / "recording/sys/class/power_supply").exists()


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.record_meter", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_command_writes_a_new_folder_only(tmp_path: Path) -> None:
    pi(tmp_path / "board")
    done = run("--root", tmp_path / "board", "-o", tmp_path / "recording")
    assert done.returncode == 0 and "read them before you give them away" in done.stderr, done.stderr
    assert (tmp_path / "recording/vcgencmd/get_throttled").read_text() == "throttled=0x50005\n"
    again = run("--root", tmp_path / "board", "-o", tmp_path / "recording")
    assert again.returncode == 2 and "is not empty" in again.stderr and "Traceback" not in again.stderr
    missing = run("--root", tmp_path / "missing", "-o", tmp_path / "other")
    assert missing.returncode == 2 and "--root should be a folder" in missing.stderr


def test_this_machine_can_be_recorded(tmp_path: Path) -> None:
    done = run("-o", tmp_path / "recording")
    assert done.returncode == 0, done.stderr
    assert diagnose(tmp_path / "recording").meter
