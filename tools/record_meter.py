"""Record what a device shows of its energy meters, temperatures and clocks, as a folder for edge-doctor --root.

Only what is named below is recorded, and of it only lines of the form named: serial numbers, network addresses, unique
ids and host names are in none of them. A file that cannot be read becomes a folder, of which reading fails too; one
that this user may not read becomes an empty file of mode 000.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from contract.console import ArgumentParser, run_command, say
from contract.errors import UsageError
from contract.output import open_output
from edge_runtime.meters._vcgencmd import RECORDED, vcgencmd_of

FILE_BYTES_MOST = 1 << 20
NUMBER = r"-?\d+"
LABEL = r"[A-Za-z][\w+./() -]{0,47}"
WORD = r"[\w-]{1,32}"

_INA = "sys/bus/i2c/drivers/ina*/*/hwmon/hwmon*"
_OLD_INA = "sys/bus/i2c/drivers/ina3221x/*/iio:device*"
_SUPPLY = "sys/class/power_supply/*"
_THERMAL = "sys/class/thermal"
_CPU = "sys/devices/system/cpu"

# File -> the form that each recorded line has, from its beginning to its end.
ALLOWED: dict[str, str] = {
    f"{_INA}/name": WORD,
    f"{_INA}/in*_label": LABEL,
    **{f"{_INA}/{name}": NUMBER for name in (
        "in*_input", "in*_enable", "curr*_input", "curr*_max", "curr*_crit", "curr*_alarm", "power*_input",
        "shunt*_resistor", "samples", "update_interval",
    )},
    f"{_OLD_INA}/name": WORD,
    f"{_OLD_INA}/rail_name_*": LABEL,
    f"{_OLD_INA}/ui_input_*": rf"{NUMBER} {NUMBER}",
    **{f"{_OLD_INA}/{name}": NUMBER for name in (
        "in_voltage*_input", "in_current*_input", "in_power*_input", "running_mode", "shunt*_resistor",
    )},
    **{f"{_OLD_INA}/{name}": rf"{NUMBER} m[aw]" for name in (
        "warn_current_limit_*", "crit_current_limit_*", "crit_power_limit_*",
    )},
    "sys/class/powercap/intel-rapl*/name": WORD,
    "sys/class/powercap/intel-rapl*/energy_uj": NUMBER,
    "sys/class/powercap/intel-rapl*/max_energy_range_uj": NUMBER,
    **{f"{_SUPPLY}/{name}": LABEL for name in ("type", "status", "scope")},
    **{f"{_SUPPLY}/{name}": NUMBER for name in ("power_now", "current_now", "voltage_now", "present", "online")},
    f"{_THERMAL}/thermal_zone*/type": WORD,
    f"{_THERMAL}/thermal_zone*/temp": NUMBER,
    f"{_THERMAL}/cooling_device*/type": LABEL,
    f"{_THERMAL}/cooling_device*/cur_state": NUMBER,
    f"{_THERMAL}/cooling_device*/max_state": NUMBER,
    "sys/class/hwmon/hwmon*/name": WORD,
    "sys/class/hwmon/hwmon*/oc*_event_cnt": NUMBER,
    "sys/class/hwmon/hwmon*/oc*_throt_en": NUMBER,
    f"{_CPU}/cpu*/thermal_throttle/*_throttle_count": NUMBER,
    **{f"{_CPU}/cpufreq/policy*/{name}": NUMBER for name in (
        "scaling_cur_freq", "scaling_min_freq", "scaling_max_freq", "cpuinfo_max_freq", "base_frequency",
    )},
    f"{_CPU}/cpufreq/policy*/scaling_governor": WORD,
    **{f"sys/class/devfreq/*gpu*/{name}": NUMBER for name in ("cur_freq", "min_freq", "max_freq", "target_freq")},
    "proc/stat": r"cpu\d*( +\d+)+",
    "proc/cpuinfo": r"(vendor_id|Model)\s*: [\w .,()+-]+",
    "proc/device-tree/model": r"[\w .,()+-]+\0?",
    "proc/device-tree/compatible": r"([\w.,+-]+\0)+",
    "proc/driver/nvidia/version": r"NVRM version: [\w .-]+",
    "etc/nv_tegra_release": r"# R\d+ \(release\), REVISION: [\d.]+, GCID: \d+, BOARD: [\w-]+, .*",
}  # fmt: skip
ANSWERS = {
    "pmic_read_adc": r"\s*\w+_[AV]\s+(current|volt)\(\d+\)=[\d.]+[AV]\s*",
    "get_throttled": r"throttled=0x[0-9a-fA-F]+",
}
# The name of a mouse's or a headset's battery may be its address or serial number; the machine's own have such names.
SUPPLIES = re.compile(r"BAT\w{0,3}|CMB\d|AC\w{0,4}|ADP\w{0,3}|battery|mains|macsmart-\w+|(axp|bq)\w{1,8}-\w+")
IDENTIFYING = re.compile(r"([0-9a-fA-F]{2}[:_-]){5}[0-9a-fA-F]{2}|[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}")


@dataclass(frozen=True)
class Found:
    """One file as it is recorded: its lines, or why it could not be read."""

    path: Path  # under the root
    text: str
    failure: type[OSError] | None = None


def record(root: Path, output: Path) -> tuple[int, list[str]]:
    """Write the recording; how many files it has, and what was left out and why."""
    written, left_out = 0, []
    for found in (*find_files(root, left_out), *ask_firmware(root)):
        path = output / found.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if found.failure is None:
            path.write_text(found.text)
        elif found.failure is PermissionError:
            path.touch(mode=0)
        else:
            path.mkdir(exist_ok=True)
        written += 1
    return written, left_out


def find_files(root: Path, left_out: list[str]) -> Iterator[Found]:
    """Every allowed file under `root`; what is left out is added to `left_out`."""
    for pattern, form in ALLOWED.items():
        for path in sorted(root.glob(pattern)):
            name = path.relative_to(root)
            if IDENTIFYING.search(str(name)) or (pattern.startswith(_SUPPLY) and not SUPPLIES.fullmatch(name.parts[3])):
                left_out.append(f"{name.parent}: its name may identify the device")
                continue
            found = read(name, path.read_bytes, form)
            if found is None:
                left_out.append(f"{name}: it has another form than is known to be harmless")
            else:
                yield found


def ask_firmware(root: Path) -> Iterator[Found]:
    """What the firmware of a Raspberry Pi answers."""
    model = root / "proc/device-tree/model"
    if not model.is_file() or not model.read_text(errors="replace").startswith("Raspberry Pi"):
        return
    ask = vcgencmd_of(root)
    for question, form in ANSWERS.items():
        found = read(RECORDED / question, lambda question=question: ask(question).encode(), form)
        if found is not None:
            yield found


def read(name: Path, ask: Callable[[], bytes], form: str) -> Found | None:
    """The lines of the allowed form; None where there are others only."""
    try:
        text = ask()[:FILE_BYTES_MOST].decode(errors="replace")
    except PermissionError:
        return Found(name, "", PermissionError)
    except OSError:
        return Found(name, "", OSError)
    kept = [line for line in text.splitlines() if re.fullmatch(form, line, re.ASCII) and not IDENTIFYING.search(line)]
    return Found(name, "\n".join(kept) + "\n") if kept or not text.strip() else None


def parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog="tools/record_meter", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="new or empty folder to write")
    parser.add_argument(
        "--root", type=Path, default=Path("/"), metavar="DIR", help="file system to record (default: /)"
    )
    return parser.parse_args(argv)


def main() -> int:
    arguments = parse(sys.argv[1:])
    if not arguments.root.is_dir():
        raise UsageError(f"--root should be a folder, {str(arguments.root)!r} is none", "correct --root")
    output = open_output(arguments.output)
    if any(output.iterdir()):
        raise UsageError(f"-o {arguments.output} is not empty", "name another folder: a recording is of one moment")
    written, left_out = record(arguments.root, output)
    for line in dict.fromkeys(left_out):
        say(f"left out {line}")
    say(f"{written} files are in {output}; read them before you give them away")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
