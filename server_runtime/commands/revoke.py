"""Revoke a device: a running server refuses it within seconds, and forgets its open claim."""

from __future__ import annotations

import argparse

from contract.console import ArgumentParser, say

from ..enrolment import revoke
from ._settings import add_settings, settle


def configure(parser: ArgumentParser) -> None:
    """Which device."""
    add_settings(parser, "roster")
    parser.add_argument("device", help="name of the device")


def run(arguments: argparse.Namespace) -> int:
    """Raises: ConfigError."""
    device = revoke(settle(arguments, "roster")["roster"], arguments.device)
    if device.revoked:
        say(f"{device.name} of site {device.site} was revoked before: it stays so")
        return 0
    say(f"{device.name} of site {device.site} is revoked; what it sent stays (server-run forget removes it)")
    say("a run that waits for it goes on without it once server-run is started again")
    return 0
