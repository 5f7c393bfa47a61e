"""edge-doctor: which energy meter this device has, what it sees and shows now, and why the others are not usable.

What each meter is and needs is its own file's; `--root` looks into another file system, such as a recorded board's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from contract.console import ArgumentParser, print_document, run_command
from contract.errors import UsageError
from edge_runtime.meters import Meter, Plug, open_plug, probe

WATCH_S = 2.5  # long enough for a plug, which shows a new value about once a second


@dataclass(frozen=True)
class Diagnosis:
    """The meter that edge-run would use; `power_w` None when unknown, and then `reason` says why."""

    meter: str
    scope: str
    quality: str
    power_w: float | None
    reason: str | None
    not_used: tuple[str, ...]


def examine(
    root: Path, clock: Callable[[], float], wait: Callable[[float], None], plug: Plug | None = None
) -> Diagnosis:
    """Find the meter under `root` and watch it for a moment."""
    found = probe(root, plug)
    power_w, reason = _watch(found.meter, clock, wait)
    meter = found.meter
    return Diagnosis(meter.name, meter.scope, meter.quality, power_w, reason, found.reasons)


def _watch(meter: Meter, clock: Callable[[], float], wait: Callable[[float], None]) -> tuple[float | None, str | None]:
    began_s = clock()
    first = meter.read(began_s)
    if first.energy_j is None and first.reason is not None and meter.name == "none":
        return None, first.reason
    wait(WATCH_S)
    ended_s = clock()
    last = meter.read(ended_s)
    if first.energy_j is None or last.energy_j is None:
        return None, last.reason or first.reason
    return (last.energy_j - first.energy_j) / (ended_s - began_s), last.reason


def edge_doctor(arguments: argparse.Namespace) -> int:
    """The command behind its command line. Raises: UsageError when --root is no folder; ConfigError."""
    if not arguments.root.is_dir():
        raise UsageError(f"--root should be a folder, {str(arguments.root)!r} is none", "correct --root")
    plug = open_plug(arguments.plug, arguments.plug_account)
    diagnosis = examine(arguments.root, time.monotonic, time.sleep, plug)
    if arguments.format == "json":
        print_document("edge-doctor", asdict(diagnosis))
    else:
        print(in_words(diagnosis))
    return 0


def in_words(diagnosis: Diagnosis) -> str:
    """The diagnosis as a person reads it."""
    power = "unknown" if diagnosis.power_w is None else f"{diagnosis.power_w:.2f} W now"
    lines = [
        f"meter     {diagnosis.meter}",
        f"scope     {diagnosis.scope}",
        f"quality   {diagnosis.quality}",
        f"power     {power}",
    ]
    if diagnosis.reason and diagnosis.meter != "none":
        lines.append(f"          {diagnosis.reason}")
    return "\n".join(lines + [f"not used  {line}" for line in diagnosis.not_used])


def main() -> int:
    """Entry point of edge-doctor."""
    commands = ArgumentParser("edge-doctor", "Say which energy meter this device has, and why not another.")
    commands.add_argument("--root", type=Path, default=Path("/"), metavar="DIR", help="file system to look in")
    commands.add_argument("--plug", metavar="HOST[:PORT][/OUTLET]", help="TP-Link smart plug that feeds this device")
    commands.add_argument("--plug-account", type=Path, metavar="FILE", help="two lines: its owner's name and password")
    commands.add_argument("--format", choices=("table", "json"), default="table", help="form of the answer")
    return run_command(lambda: edge_doctor(commands.parse_args()))
