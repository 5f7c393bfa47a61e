"""Offer a package to devices: some try it first, the others get it when those are content. A running server sees it.

How it goes is told by server-status; devices verify the publisher's signature by their own key, and refuse older ones.
"""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path

from contract.console import ArgumentParser, say
from contract.errors import UsageError

from ..files import DISK_ERRORS, disk_refuses
from ..offers import Box, offered_of
from ..rollout import choose_devices
from ..roster import read_roster
from ._settings import add_settings, settle


def configure(parser: ArgumentParser) -> None:
    """What, and for whom."""
    add_settings(parser, "roster")
    parser.add_argument("--package", type=Path, metavar="DIR", help="its folder, or a file in it")
    who = parser.add_mutually_exclusive_group()
    who.add_argument("--devices", metavar="A,B", help="only these")
    who.add_argument("--site", metavar="NAME", help="only the devices of this site")
    parser.add_argument(
        "--canary",
        type=int,
        default=1,
        metavar="N",
        help="how many try it first (default: %(default)s); 0: none",
    )
    parser.add_argument("--stop", action="store_true", help="offer nothing any more; devices keep what they have taken")


def run(arguments: argparse.Namespace) -> int:
    """Raises: UsageError; ConfigError; PackageError, RollbackError."""
    if (arguments.package is None) != arguments.stop:
        raise UsageError("either --package or --stop is to be given", "see server-run update --help")
    if arguments.canary < 0:
        raise UsageError(f"--canary should be 0 or more, found {arguments.canary}", "correct --canary")
    roster = read_roster(settle(arguments, "roster")["roster"])
    box = Box(roster.root)
    if arguments.stop:
        say("nothing is offered any more" if box.withdraw() else "nothing was offered")
        return 0
    named = None if arguments.devices is None else [name.strip() for name in arguments.devices.split(",")]
    sites = {device.name: device.site for device in roster.devices.values() if not device.revoked}
    devices, unknown = choose_devices(sites, named, arguments.site)
    if unknown or not devices:
        raise UsageError(
            f"no such device: {', '.join(unknown)}" if unknown else f"site {arguments.site!r} has no device",
            "see server-run devices",
        )
    offered = offered_of(arguments.package, devices, arguments.canary, secrets.token_hex(8))
    try:
        box.put(offered)
    except DISK_ERRORS as error:
        raise disk_refuses(roster.root, error) from error
    first = f", {min(offered.canary, len(devices))} first" if offered.canary else ""
    say(
        f"{offered.name} version {offered.version} ({offered.package[:12]}, {offered.size_bytes / 1e6:.1f} MB) is "
        f"offered to {len(devices)} devices{first}; server-status tells how it goes"
    )
    say(f"leave {offered.folder} where it is until all have it")
    return 0
