"""Bring a run back from the file that `server-run backup` wrote; server-run then goes on with it as before."""

from __future__ import annotations

import argparse
from pathlib import Path

from contract.console import ArgumentParser, say
from contract.errors import UsageError
from contract.output import open_output

from ._settings import add_settings, settle


def configure(parser: ArgumentParser) -> None:
    """From where, and whereto."""
    add_settings(parser, "runs")
    parser.add_argument("archive", type=Path, help="the file")


def run(arguments: argparse.Namespace) -> int:
    """Raises: ConfigError; UsageError."""
    from ..archive import restore

    if not arguments.archive.is_file():
        raise UsageError(f"there is no file {arguments.archive}", "give the one that server-run backup wrote")
    runs = open_output(settle(arguments)["runs"])
    root = restore(arguments.archive, runs)
    say(f"run {root.name} is back in {root}; devices send again what came after the backup")
    return 0
