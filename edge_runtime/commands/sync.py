"""Send what was made offline, from this device's state or from a copied spool folder; sending twice counts once."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from contract.console import ArgumentParser, print_document, say
from edge_runtime.commands._settings import add_settings, settle
from edge_runtime.config import check_certificate, check_server


def configure(parser: ArgumentParser) -> None:
    """Where the server is, whose features, and from where."""
    add_settings(parser, "server", "ca", "certificate", "certificate_key", "name", "key", "state", "max_mb_per_day")
    parser.add_argument(
        "--spool",
        type=Path,
        metavar="DIR",
        help="a copy of STATE/offline, brought here from a device without a network; needs the device's name and key, "
        "and no --state",
    )
    parser.add_argument("--once", action="store_true", help="give up when the server cannot be reached (exit code 8)")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="json: one document on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Raises: CutlayerError."""
    from edge_runtime.syncing import Errand, is_empty, nothing_sent, sync  # only now: --help needs no sockets

    needed = ("server", "name", "key") if arguments.spool else ("server", "name", "key", "state")
    values = settle(arguments, *needed)
    check_server(values["server"])
    check_certificate(values["certificate"], values["certificate_key"])
    errand = Errand(
        values["server"], values["ca"], values["name"], values["key"], values["state"], arguments.spool, arguments.once,
        values["max_mb_per_day"], values["certificate"], values["certificate_key"],
    )  # fmt: skip
    nothing_left = arguments.spool is None and is_empty(values["state"])
    done = nothing_sent() if nothing_left else asyncio.run(sync(errand, say))
    if arguments.format == "json":
        print_document("edge-run-sync", done)
    elif nothing_left:
        print(f"nothing to send: {values['state']} holds no features that were made offline, or they were sent before")
    else:
        print(f"{done['outcome']}: {done['images']} images of run {done['run']}, {done['bytes_on_wire']} bytes sent")
    return 0
