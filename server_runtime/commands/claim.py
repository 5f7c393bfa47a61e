"""Issue a one-time claim: with its token a device enrols a key that it makes itself. Prints the token on stdout."""

from __future__ import annotations

import argparse
import time

from contract.console import ArgumentParser, say
from contract.errors import UsageError

from ..enrolment import issue_claim
from ..files import DISK_ERRORS, disk_refuses
from ._settings import add_settings, settle

HOURS = 24.0


def configure(parser: ArgumentParser) -> None:
    """Which device, and for how long."""
    add_settings(parser, "roster")
    parser.add_argument("device", help="name of the device; one that has a key gets another by the claim")
    parser.add_argument("--site", required=True, help="the site that it belongs to")
    parser.add_argument(
        "--hours", type=float, default=HOURS, metavar="H", help="how long the claim is good (default: %(default)g)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises: ConfigError; UsageError."""
    if not 0 < arguments.hours <= 24 * 365:
        raise UsageError(f"--hours should be more than 0, at most a year, found {arguments.hours:g}", "correct --hours")
    root = settle(arguments, "roster")["roster"]
    if not root.is_dir():
        raise UsageError(f"there is no roster at {root}", "give the roster's folder, or make an empty one there")
    try:
        token = issue_claim(root, arguments.site, arguments.device, time.time() + 3600 * arguments.hours)
    except DISK_ERRORS as error:
        raise disk_refuses(root, error) from error
    print(token)
    say(
        f"on {arguments.device}: edge-run enrol --name {arguments.device} --key device.key --server wss://... "
        f"--ca ca.pem --claim FILE, with that line in FILE; good once, within {arguments.hours:g} h"
    )
    say("a server-run that was started before this device was in the roster lets it join once it is started again")
    return 0
