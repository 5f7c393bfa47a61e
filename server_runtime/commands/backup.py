"""Write a run to one file, also while its server works; `server-run unpack` brings it back."""

from __future__ import annotations

import argparse
from pathlib import Path

from contract.console import ArgumentParser, say
from contract.errors import ConfigError, UsageError
from contract.names import check_name
from contract.output import check_output_file

from ._settings import add_settings, settle


def configure(parser: ArgumentParser) -> None:
    """Which run, and where to."""
    add_settings(parser, "runs")
    parser.add_argument("run", help="name of the run, a folder in RUNS")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the archive")


def run(arguments: argparse.Namespace) -> int:
    """Raises: ConfigError; UsageError."""
    from ..archive import back_up

    root: Path = settle(arguments)["runs"] / check_name(
        arguments.run, "run", "give the folder's name alone, and --runs"
    )
    if not (root / "run.toml").exists():
        raise ConfigError(f"{root} is no run", "give the name of a folder in --runs")
    if arguments.output.exists():
        raise UsageError(f"{arguments.output} exists already", "a backup is never replaced: give another -o")
    check_output_file(arguments.output)
    count = back_up(root, arguments.output)
    say(f"{count} files of run {arguments.run} are in {arguments.output}; it holds features: keep it safe")
    return 0
