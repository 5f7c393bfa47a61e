"""Make this device's key and have it enrolled, with the one-time claim that `server-run claim` printed."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from contract.console import ArgumentParser, say
from contract.errors import UsageError, why
from contract.signature import PrivateKey, read_claim
from edge_runtime.commands._settings import add_settings, settle
from edge_runtime.config import check_certificate, check_server

VARIABLE = "CUTLAYER_CLAIM"
TOKEN_BYTES = 4096


def configure(parser: ArgumentParser) -> None:
    """Where the server is, under which name, and with which claim."""
    add_settings(parser, "server", "ca", "certificate", "certificate_key", "name", "key")
    parser.add_argument(
        "--claim", metavar="FILE", help=f"file that holds the claim, - for stdin; default: the variable {VARIABLE}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises: CutlayerError."""
    from edge_runtime.enrolment import Desk, enrol  # only now: --help needs no sockets

    values = settle(arguments, "server", "name", "key")
    check_server(values["server"])
    check_certificate(values["certificate"], values["certificate_key"])
    desk = Desk(values["server"], values["ca"], values["name"], values["certificate"], values["certificate_key"])
    answer = enrol(desk, values["key"], find_claim(arguments.claim))
    say(f"enrolled as {values['name']} of site {answer.site}, with key {answer.key_id} in {values['key']}")
    return 0


def find_claim(file: str | None) -> PrivateKey:
    """The claim from where it was given; never from the command line, which every user of a machine can read.

    Raises: UsageError.
    """
    if file is None:
        if VARIABLE not in os.environ:
            raise UsageError("no claim was given", f"give --claim FILE, or set {VARIABLE}")
        return read_claim(os.environ[VARIABLE])
    try:
        text = sys.stdin.read(TOKEN_BYTES) if file == "-" else Path(file).read_bytes()[:TOKEN_BYTES].decode("utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the claim in {file} cannot be read: {why(error, file)}", "give --claim a text file, or -"
        ) from error
    return read_claim(text)
