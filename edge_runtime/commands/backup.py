"""Copy what makes this device itself (secrets, key, release ledger) to one file; keep it as safe as the key."""

from __future__ import annotations

import argparse
from pathlib import Path

from contract.console import ArgumentParser, say
from contract.errors import UsageError
from edge_runtime.commands._settings import add_settings, settle


def configure(parser: ArgumentParser) -> None:
    """Whose, and where to."""
    add_settings(parser, "state", "key", "name")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the copy")


def run(arguments: argparse.Namespace) -> int:
    """Raises: CutlayerError."""
    from edge_runtime.identity_copy import write_copy
    from edge_runtime.state import open_state

    values = settle(arguments, "state", "key", "name")
    if arguments.output.exists():
        raise UsageError(f"{arguments.output} exists already", "a copy is never replaced: give another -o")
    state = open_state(values["state"])
    try:
        count = write_copy(state, values["key"], values["name"], arguments.output)
    finally:
        state.close()
    say(f"{count} files of {values['name']} are in {arguments.output}: whoever has it can speak as this device")
    say("warning: without it, a new secret draws other noise for the same images: a second copy of each")
    return 0
