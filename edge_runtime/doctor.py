"""edge-doctor: which device this is, what does not work there, who owns TensorRT; its meter, and why not another.

What each meter is and needs is its own file's, what is known of a device its profile's; `--root` looks into another
file system, such as a recorded board's.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from contract.console import ArgumentParser, print_document, run_command
from contract.errors import UsageError
from edge_runtime.meters import Meter, Plug, open_plug, probe, recording
from edge_runtime.tensorrt_find import look
from profiles import Profile, load
from profiles.detect import applies, detect, find_l4t

WATCH_S = 2.5  # long enough for a plug, which shows a new value about once a second


@dataclass(frozen=True)
class Device:
    """The profile that fits; `status` says what was ever run on such a device, `unsupported` what does not work there,
    why, and what to do."""

    profile: str
    title: str
    status: str
    runtime: str
    engine: str
    unsupported: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """The meter that edge-run would use; `power_w` None when unknown, and then `reason` says why.

    `device` None: no profile fits, so that what works there is unknown.
    """

    device: Device | None
    meter: str
    scope: str
    quality: str
    power_w: float | None
    reason: str | None
    not_used: tuple[str, ...]
    tensorrt: tuple[str, ...]  # which Python has it, and what is missing


def examine(
    root: Path, clock: Callable[[], float], wait: Callable[[float], None], plug: Plug | None = None
) -> Diagnosis:
    """Name the device under `root`, find its meter and watch it for a moment."""
    found, name = probe(root, plug), detect(root)
    power_w, reason = _watch(found.meter, clock, wait)
    device = None if name is None else describe(load(name), root)
    meter = found.meter
    return Diagnosis(device, meter.name, meter.scope, meter.quality, power_w, reason, found.reasons, look(root))


def describe(profile: Profile, root: Path) -> Device:
    """What is known of such a device, with the release under `root`."""
    software = profile.software
    unsupported = applies(profile, find_l4t(root))
    return Device(profile.name, profile.title, profile.status, software.runtime, software.engine, unsupported)


def _watch(meter: Meter, clock: Callable[[], float], wait: Callable[[float], None]) -> tuple[float | None, str | None]:
    """Watts of all that it tells in a moment, which is of a while before where it lags; None with the reason."""
    if meter.quality == "unknown":
        return None, meter.note
    with recording(meter) as trace:
        wait(WATCH_S)
        last = meter.read(clock())
    power_w = trace.powers(-math.inf, math.inf).mean_w
    if last.energy_j is None or power_w is None:
        return None, last.reason or meter.failure or f"it told nothing within {WATCH_S:g} s"
    return power_w, last.reason


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
    device = diagnosis.device
    lines = ["device    no profile fits it"]
    if device is not None:
        lines = [
            f"device    {device.title}: profile {device.profile}, {device.status}",
            f"runtime   {device.runtime}, {device.engine}",
            *(f"unsupported {line}" for line in device.unsupported),
        ]
    lines += [
        *(f"{'' if place else 'tensorrt':<9} {line}" for place, line in enumerate(diagnosis.tensorrt)),
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
    commands = ArgumentParser(
        "edge-doctor", "Say which device this is, what does not work there, and how energy is measured."
    )
    commands.add_argument("--root", type=Path, default=Path("/"), metavar="DIR", help="file system to look in")
    commands.add_argument("--plug", metavar="HOST[:PORT][/OUTLET]", help="TP-Link smart plug that feeds this device")
    commands.add_argument("--plug-account", type=Path, metavar="FILE", help="two lines: its owner's name and password")
    commands.add_argument("--format", choices=("table", "json"), default="table", help="form of the answer")
    return run_command(lambda: edge_doctor(commands.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
