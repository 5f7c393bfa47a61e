"""Make this machine the device that `edge-run backup` copied; the other one must not run any more."""

from __future__ import annotations

import argparse
from pathlib import Path

from contract.console import ArgumentParser, say
from edge_runtime.commands._settings import add_settings, settle


def configure(parser: ArgumentParser) -> None:
    """From where, and whereto."""
    add_settings(parser, "state", "key")
    parser.add_argument("copy", type=Path, help="the file of edge-run backup")


def run(arguments: argparse.Namespace) -> int:
    """Raises: CutlayerError."""
    from edge_runtime.identity_copy import put_back, read_copy
    from edge_runtime.state import open_state

    values = settle(arguments, "state", "key")
    copy = read_copy(arguments.copy)
    state = open_state(values["state"])
    try:
        put_back(copy, state, values["key"])
    finally:
        state.close()
    say(f"this is {copy.device} now, with the noise and the releases that it had when the copy was made")
    say("warning: stop the machine that the copy was made of; what it released since is not in the ledger here")
    return 0
