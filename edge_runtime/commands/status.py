"""Say how the run on this device stands: connected or why not, what it waits for, what is kept, and its energy."""

from __future__ import annotations

import argparse

from contract.console import ArgumentParser, print_document
from edge_runtime.commands._settings import add_settings, settle


def configure(parser: ArgumentParser) -> None:
    """Of which state, and in which form."""
    add_settings(parser, "state")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="json: one document on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Raises: ConfigError."""
    from edge_runtime.standing import in_words
    from edge_runtime.status_file import read_status

    found = read_status(settle(arguments, "state")["state"])
    if arguments.format == "json":
        print_document("edge-run-status", found)
    else:
        print(in_words(found))
    return 0
