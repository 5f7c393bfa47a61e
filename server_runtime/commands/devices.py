"""List the devices of the roster: site, name, state (enrolled, claimed, revoked), and the key's name."""

from __future__ import annotations

import argparse
from datetime import datetime, timezone

from contract.console import ArgumentParser, print_document

from ..roster import Device, read_roster
from ._settings import add_settings, settle


def configure(parser: ArgumentParser) -> None:
    """In which form."""
    add_settings(parser, "roster")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="json: one document on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Raises: ConfigError."""
    roster = read_roster(settle(arguments, "roster")["roster"], may_be_empty=True)
    rows = [row(roster.devices[name]) for name in sorted(roster.devices)]
    if arguments.format == "json":
        print_document("server-run-devices", {"devices": rows})
        return 0
    for each in rows:
        until = f"claim until {each['claim_until']}" if each["claim_until"] else ""
        print(f"{each['site']}  {each['device']}  {each['state']}  {each['key_id'] or '-'}  {until}".rstrip())
    return 0


def row(device: Device) -> dict[str, str | None]:
    """What is told of a device."""
    until = None if device.claim is None else datetime.fromtimestamp(device.claim.expires_s, timezone.utc)
    return {
        "site": device.site,
        "device": device.name,
        "state": device.state,
        "key_id": device.key_id or None,
        "claim_until": None if until is None else f"{until:%Y-%m-%dT%H:%M:%SZ}",
    }
