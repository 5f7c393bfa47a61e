"""Let a revoked device join again, with the key that it had."""

from __future__ import annotations

import argparse

from contract.console import ArgumentParser, say

from ..enrolment import restore
from ._settings import add_settings, settle


def configure(parser: ArgumentParser) -> None:
    """Which device."""
    add_settings(parser, "roster")
    parser.add_argument("device", help="name of the device")


def run(arguments: argparse.Namespace) -> int:
    """Raises: ConfigError."""
    device = restore(settle(arguments, "roster")["roster"], arguments.device)
    if not device.revoked:
        say(f"{device.name} of site {device.site} is not revoked, but {device.state}: it stays so")
        return 0
    say(f"{device.name} of site {device.site} may join again")
    return 0
