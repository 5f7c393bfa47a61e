"""Replace this device's key by a new one; the server takes it because the present key vouches for it."""

from __future__ import annotations

import argparse

from contract.console import ArgumentParser, say
from edge_runtime.commands._settings import add_settings, settle
from edge_runtime.config import check_certificate, check_server


def configure(parser: ArgumentParser) -> None:
    """Where the server is, under which name, and which key."""
    add_settings(parser, "server", "ca", "certificate", "certificate_key", "name", "key")


def run(arguments: argparse.Namespace) -> int:
    """Raises: CutlayerError."""
    from edge_runtime.enrolment import Desk, rotate  # only now: --help needs no sockets

    values = settle(arguments, "server", "name", "key")
    check_server(values["server"])
    check_certificate(values["certificate"], values["certificate_key"])
    desk = Desk(values["server"], values["ca"], values["name"], values["certificate"], values["certificate_key"])
    answer = rotate(desk, values["key"])
    say(f"{values['name']} has key {answer.key_id} now; a running edge-run is to be started again")
    return 0
