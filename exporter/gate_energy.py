"""Joules of a split on a device, from a table that edge-profile wrote there; where no meter measured, from the watts of
a profile and the time that the table measured.

A time of this machine is no time of a device: without a table for a split its energy is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import profiles
from contract.canonical import CanonicalError, from_json
from contract.errors import ConfigError
from contract.tokens import KEPT, TokenLayout, sent_layout
from exporter.gate_choice import Energy

KIND = "edge-profile"
TABLE_BYTES_MAX = 16 << 20
_SCHEMES = {"w8a8": "int8", "float32": "float32"}
_CURE = "give a table that edge-profile wrote with -o, of frontends of this model"


@dataclass(frozen=True)
class Seconds:
    """What a table says of one split: seconds and, where a meter measured, joules of one image."""

    time_s: float
    energy_j: float | None
    reason: str  # the meter, or why the joules are unknown
    sent_bytes: int


@dataclass(frozen=True)
class EnergyTable:
    """By split and precision ("int8", "float32"); `file` and `device` say in words whose it is."""

    file: str
    device: str
    meter: str
    is_modelled: bool
    rows: Mapping[tuple[int, str], Seconds]


def read_energy(path: Path, model: str) -> EnergyTable:
    """Rows of frontends of this model. Raises: ConfigError for a file that is no such table, or has no such row."""
    try:
        with path.open("rb") as file:
            document: Any = from_json(file.read(TABLE_BYTES_MAX + 1), TABLE_BYTES_MAX)
        if (document["schema_version"], document["kind"]) != (1, KIND):
            raise ValueError(f"expected a document of kind {KIND}, version 1")
        meter, work = document["meter"], document["work"]
        rows = {}
        for row in document["rows"] if work == "frontend" else ():
            point, energy = row["point"], row["energy"]
            if point["model"] == model:
                joules = None if energy is None else float(energy["measured_j"]["mean"])
                reason = str(meter["name"]) if joules is not None else str(row["energy_reason"])
                time_s, sent = float(row["seconds_per_image"]["mean"]), int(point["sent_bytes_per_image"])
                rows[int(point["split"]), _SCHEMES[point["precision"]]] = Seconds(time_s, joules, reason, sent)
        device, name, quality = document["profile"] or "a device of no profile", meter["name"], meter["quality"]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", _CURE) from error
    except (CanonicalError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no table of edge-profile: {error}", _CURE) from error
    if not rows:
        raise ConfigError(f"{path} has no row of a frontend of {model}", _CURE)
    return EnergyTable(str(path), str(device), str(name), quality == "modelled", rows)


def load_profile(named: str) -> profiles.Profile:
    """The profile of that name, or in a file of one's own. Raises: ConfigError."""
    try:
        return profiles.load_file(Path(named)) if named.endswith(".toml") else profiles.load(named)
    except profiles.ProfileError as error:
        raise ConfigError(error.cause, error.cure) from error


def how_to_know_joules() -> str:
    """What there is to do where no joules are known; of the profiles, few have watts."""
    known = [name for name in profiles.names() if profiles.load(name).power.busy_w is not None]
    return (
        "on the device run edge-profile -o table.json, where nothing measures power with --plug HOST or with "
        "--power-model IDLE:BUSY in watts, and give --energy-table table.json; in place of --power-model, --profile "
        f"{' or '.join(known)}, or a profile file of your own that has idle_w and busy_w"
    )


def possible_bytes(layout: TokenLayout) -> frozenset[int]:
    """All that one image of such tokens can send, whichever patches go and whether they are looked for elsewhere."""
    sent = [sent_layout(layout, kept) for kept in KEPT]
    return frozenset(each.count * each.dim + sources * each.patches for each in sent for sources in (0, 2))


def energy_of(
    split: int, precision: str, layout: TokenLayout, table: EnergyTable | None, profile: profiles.Profile | None
) -> Energy:
    """The table's joules; else its seconds times the profile's busy watts; else unknown, with the reason.

    A model's name says nothing of the size of its images: a row that sends what no tokens of this `layout` can is of
    another size, and its joules are not these.
    """
    if table is None:
        return Energy(None, "unknown", "no table of edge-profile was given (--energy-table)")
    row = table.rows.get((split, precision))
    if row is None:
        return Energy(None, "unknown", f"{table.file} has no row of split {split} in {precision}")
    if row.sent_bytes not in possible_bytes(layout):
        return Energy(None, "unknown", f"{table.file} measured split {split} for images of another size")
    if row.energy_j is not None:
        kind = "modelled" if table.is_modelled else "measured"
        return Energy(row.energy_j, kind, f"{table.meter} on {table.device}, without the link ({table.file})")
    if profile is None:
        return Energy(None, "unknown", f"{table.file}: {row.reason}; no --profile gives watts to model them by")
    if profile.power.busy_w is None:
        return Energy(None, "unknown", f"{table.file}: {row.reason}; profile {profile.name} gives no watts")
    source = f"{profile.power.busy_w:g} W of profile {profile.name} x the seconds of {table.file}, without the link"
    return Energy(profile.power.busy_w * row.time_s, "modelled", source)
