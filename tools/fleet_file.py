"""Fleet files: kinds of devices, and devices with their places, as TOML; `fleets/paper.toml` shows the form.

A kind with `profile` takes idle and busy watts and the highest temperature from that profile where it has none of its
own. A device with `table` names a file of `edge-profile --train -o` beside the fleet's: its times and watts are those.
What the figures mean is `fleet`'s part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import tomllib

import profiles
from contract.errors import ConfigError
from edge_runtime.profiling.table import read_table
from tools.fleet import Fleet, FleetDevice, Kind, Recorded

PAPER = Path(__file__).parent / "fleets" / "paper.toml"
FILE_BYTES_MAX = 1 << 20
_MAY_BE_ZERO = ("sleep_w", "wake_s")


def load_fleet(path: Path, environment: str, count: int | None = None) -> Fleet:
    """The devices of a file in one environment; with `count`, so many of them, in turn. Raises: ConfigError."""
    try:
        with path.open("rb") as file:
            document = tomllib.loads(file.read(FILE_BYTES_MAX).decode("utf-8"))
        kinds = {name: _kind(name, table) for name, table in document["kinds"].items()}
        devices = [_device(table, kinds, environment, path.parent) for table in document["devices"]]
        server = _positive(document, "server_macs_per_s")
        fleet = Fleet(environment, tuple(_counted(devices, count)), server, str(document["note"]))
    except OSError as error:
        raise ConfigError(f"the fleet {path} cannot be read: {error.strerror}", "correct the path") from error
    except KeyError as error:
        raise ConfigError(f"{path}: {error.args[0]} is missing", "compare with tools/fleets/paper.toml") from error
    except (ValueError, TypeError, AttributeError, profiles.ProfileError) as error:
        raise ConfigError(f"{path} is no fleet: {error}", "compare with tools/fleets/paper.toml") from error
    names = [device.name for device in fleet.devices]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"{path} should have devices, each with a name of its own, found {names}", "correct the file")
    return fleet


def environments_of(path: Path) -> tuple[str, ...]:
    """Places that every device of a file has. Raises: ConfigError."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        known = [set(device["places"]) for device in document["devices"]]
    except OSError as error:
        raise ConfigError(f"the fleet {path} cannot be read: {error.strerror}", "correct the path") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no fleet: {error}", "compare with tools/fleets/paper.toml") from error
    return tuple(sorted(set.intersection(*known))) if known else ()


def _kind(name: str, table: Mapping[str, Any]) -> Kind:
    given = dict(table)
    if "profile" in given:
        profile = profiles.load(given.pop("profile"))
        known = {
            "idle_w": profile.power.idle_w, "busy_w": profile.power.busy_w, "limit_c": profile.ceilings.temperature_c,
        }  # fmt: skip
        given = {**{key: value for key, value in known.items() if value is not None}, **given}
    wanted = [field.name for field in fields(Kind) if field.name not in ("name", "source")]
    unknown = sorted(given.keys() - {*wanted, "source"})
    if unknown:
        raise ValueError(f"kinds.{name}: unknown key {unknown[0]} (known: {', '.join(wanted)}, profile, source)")
    kind = Kind(name=name, source=str(given["source"]), **{key: _positive(given, key) for key in wanted})
    if not kind.sleep_w <= kind.idle_w <= kind.link_w <= kind.busy_w:
        raise ValueError(f"kinds.{name}: expected sleep_w <= idle_w <= link_w <= busy_w")
    return kind


def _positive(table: Mapping[str, Any], key: str) -> float:
    value = table[key]
    if type(value) not in (int, float) or not 0 <= value < float("inf") or not (value or key in _MAY_BE_ZERO):
        raise ValueError(f"{key} should be a number above 0, found {value!r}")
    return float(value)


def _device(table: Mapping[str, Any], kinds: Mapping[str, Kind], environment: str, folder: Path) -> FleetDevice:
    place, alpha = table["places"][environment], table["alpha"]
    if table["kind"] not in kinds:
        raise ValueError(f"device {table['name']}: no kind {table['kind']!r} (known: {', '.join(kinds)})")
    if type(place["fan"]) is not bool or not 0 <= float(alpha) <= 1:
        raise ValueError(f"device {table['name']}: expected fan true or false and alpha from 0 to 1")
    recorded = read_recorded(folder / table["table"]) if "table" in table else {}
    kind = kinds[table["kind"]]
    return FleetDevice(str(table["name"]), kind, float(place["ambient_c"]), place["fan"], float(alpha), recorded)


def read_recorded(path: Path) -> dict[int, Recorded]:
    """Times and watts by split of a table that `edge-profile --train -o` wrote. Raises: ConfigError."""
    table = read_table(path)
    if table.work != "training":
        raise ConfigError(f"{path} is of frontends, not of training", "measure with edge-profile --train -o")
    found = {}
    for row in table.rows:
        seconds = {phase.name: phase.seconds.mean for phase in row.phases}
        energy = row.energy
        found[row.point.split] = Recorded(
            forward_s=seconds["forward"],
            backward_s=seconds["backward"] + seconds["optimiser"],
            compute_w=None if energy is None else energy.measured_j.mean / row.seconds_per_image.mean,
            peak_w=None if energy is None or energy.power is None else energy.power.peak_w,
        )
    return found


def _counted(devices: list[FleetDevice], count: int | None) -> list[FleetDevice]:
    """So many, the file's over and over; names of later turns say which."""
    if count is None:
        return devices
    turns = [divmod(number, len(devices)) for number in range(count)]
    return [
        replace(devices[place], name=devices[place].name + (f"-{turn + 1}" if turn else "")) for turn, place in turns
    ]
