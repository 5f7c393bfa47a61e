"""What is known of each kind of device: a TOML file each, and the loader; a device of your own is a file of your own.

Facts only: which meter, which limits, what runs there and what does not. Which rails of a board make its total, and
over how long a sensor averages, is stated once, in `edge_runtime.meters`, because it is decided by what is found there;
how a file system shows which device it is of is `detect`'s part.
"""

from __future__ import annotations

import sys
import types
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Profile", "ProfileError", "Unsupported", "load", "load_file", "names"]

FOLDER = Path(__file__).parent
FILE_BYTES_MAX = 1 << 16

T = TypeVar("T")


class ProfileError(ValueError):
    """What is wrong with a profile (`cause`) and what to do about it (`cure`)."""

    def __init__(self, cause: str, cure: str) -> None:
        super().__init__(cause)
        self.cause, self.cure = cause, cure


@dataclass(frozen=True)
class Signs:
    """By what the device is known; empty where that sign says nothing of it.

    `modules` are parts of an entry of /proc/device-tree/compatible, `models` of /proc/device-tree/model or the Model of
    /proc/cpuinfo, `l4t_boards` the BOARD of /etc/nv_tegra_release, `x86` and what else an x86 machine has or has not.
    """

    modules: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    l4t_boards: tuple[str, ...] = ()
    x86: bool = False
    battery: bool = False
    nvidia: bool = False


@dataclass(frozen=True)
class Software:
    """What the device's system brings: `runtime` says how edge_runtime runs there, `engine` which engine works."""

    system: str
    python: str
    runtime: str
    engine: str
    cuda: str | None = None
    tensorrt: str | None = None
    compute_capability: str | None = None


@dataclass(frozen=True)
class MeterFacts:
    """`name` of a file of edge_runtime/meters, or "external"; `rails` are all that its chips label, not what is added.

    `sees` says what is in its figure and what is not.
    """

    name: str
    sees: str
    rails: tuple[str, ...] = ()


@dataclass(frozen=True)
class Power:
    """Power modes, and watts for a model where nothing measures: each with its source, None where there is none."""

    modes: tuple[str, ...] = ()
    modes_source: str | None = None
    idle_w: float | None = None
    busy_w: float | None = None
    watts_source: str | None = None
    sent_j_per_byte: float | None = None
    received_j_per_byte: float | None = None
    link_source: str | None = None


@dataclass(frozen=True)
class Ceilings:
    """Beyond what the device slows itself down; None: unknown."""

    temperature_c: float | None = None
    current_ma: int | None = None
    source: str | None = None


@dataclass(frozen=True)
class Unsupported:
    """What does not work there, why, and what to do; `before_l4t`: only on L4T releases before that one."""

    what: str
    why: str
    fix: str
    before_l4t: int | None = None


@dataclass(frozen=True)
class Profile:
    """One kind of device; `status` says what was run on it."""

    name: str
    title: str
    status: str
    signs: Signs
    software: Software
    meter: MeterFacts
    power: Power = Power()
    ceilings: Ceilings = Ceilings()
    unsupported: tuple[Unsupported, ...] = ()


def names() -> tuple[str, ...]:
    """The devices that there is a file for."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


@cache
def load(name: str) -> Profile:
    """The profile of that name. Raises: ProfileError."""
    if name not in names():
        raise ProfileError(f"there is no profile {name!r} (known: {', '.join(names())})", "choose one, or give a file")
    return load_file(FOLDER / f"{name}.toml")


def load_file(path: Path) -> Profile:
    """The profile in a file, named after it.

    Raises: ProfileError when it cannot be read, lacks or has a key that it should not, or gives figures no source.
    """
    try:
        data = path.read_bytes()
        document = tomllib.loads(data.decode("utf-8"))
    except OSError as error:
        raise ProfileError(f"the profile {path} cannot be read: {error.strerror}", "correct the path") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ProfileError(f"the profile {path} is not valid TOML: {error}", "correct the file") from error
    if len(data) > FILE_BYTES_MAX:
        raise ProfileError(f"the profile {path} should have at most {FILE_BYTES_MAX} bytes", "give a profile")
    if "name" in document:
        raise ProfileError(f"{path.name}: unknown key name", "remove it: the file's name is the profile's")
    profile = _build(Profile, {"name": path.stem, **document}, path.name)
    _check_sources(profile, path.name)
    return profile


def _check_sources(profile: Profile, where: str) -> None:
    """A figure that nobody can look up is worth nothing."""
    power, ceilings = profile.power, profile.ceilings
    for group, figures, source in (
        ("power: idle_w, busy_w", (power.idle_w, power.busy_w), power.watts_source),
        ("power: joules per byte", (power.sent_j_per_byte, power.received_j_per_byte), power.link_source),
        ("power: modes", power.modes, power.modes_source),
        ("ceilings", (ceilings.temperature_c, ceilings.current_ma), ceilings.source),
    ):
        if any(each is not None for each in figures) and not source:
            raise ProfileError(f"{where}: {group} has figures and no source", "say where they come from, or leave them")
    if (power.idle_w is None) != (power.busy_w is None):
        raise ProfileError(f"{where}: power has one of idle_w and busy_w", "give both, or neither")
    if power.idle_w is not None and power.busy_w is not None and not 0 < power.idle_w <= power.busy_w:
        raise ProfileError(f"{where}: power should have 0 < idle_w <= busy_w", "correct them")


def _build(kind: type[T], table: object, where: str) -> T:
    """A dataclass from a TOML table: every key a field, every field without a default there."""
    if not isinstance(table, dict):
        raise ProfileError(f"{where} should be a table, found {table!r}", "correct the file")
    hints, known = get_type_hints(kind), {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(table.keys() - known.keys())
    if unknown:
        raise ProfileError(f"{where}: unknown key {unknown[0]} (known: {', '.join(known)})", "correct or remove it")
    missing = [name for name, field in known.items() if field.default is MISSING and name not in table]
    if missing:
        raise ProfileError(f"{where}: the key {missing[0]} is missing", "add it")
    return kind(**{name: _convert(hints[name], value, f"{where}: {name}") for name, value in table.items()})


def _convert(hint: Any, value: object, where: str) -> Any:
    """A TOML value as the type that a field has."""
    if get_origin(hint) in (Union, types.UnionType):  # X | None; TOML has no null
        hint = get_args(hint)[0]
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ProfileError(f"{where} should be a list, found {value!r}", "correct it")
        return tuple(_convert(get_args(hint)[0], each, f"{where}[{row}]") for row, each in enumerate(value))
    if is_dataclass(hint):
        return _build(hint, value, where)  # type: ignore[arg-type]
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint or value == "":
        raise ProfileError(f"{where} should be {hint.__name__}, found {value!r}", "correct it")
    return value
