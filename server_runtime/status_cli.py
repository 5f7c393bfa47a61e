"""server-status: how a run stands, from what its server writes beside it; works on the same machine, without a network.

What is written is `status`'s part. A server that is gone says nothing of itself, so its lock is looked at.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contract.console import ArgumentParser, print_document, run_command
from contract.errors import ConfigError
from contract.names import check_name
from contract.scratch import is_locked

from .observatory import STATUS_FILE
from .status import in_words

STALE_S = 30.0  # a file that is older says that its server hangs


def main(arguments: Sequence[str] | None = None) -> int:
    """The server-status command; returns its exit code."""
    return run_command(lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    parser = ArgumentParser("server-status", "Say how a run stands: sites, devices, and what is waited for.")
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="default: ./runs")
    parser.add_argument("--run", metavar="ID", help="which run; default: the one that was written last")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="json: one document on stdout")
    chosen: argparse.Namespace = parser.parse_args(arguments)
    document = read_status(chosen.runs, chosen.run)
    if chosen.format == "json":
        print_document("server-status", document)
    else:
        print(in_words(document))
    return 0


def read_status(runs: Path, run: str | None) -> dict[str, Any]:
    """The document of a run, with its `state` ("running", "stopped", "hangs") and the age of what it says.

    Raises: ConfigError where there is none.
    """
    if run is not None:
        check_name(run, "run", "give the folder's name alone, and --runs")
    files = list(runs.glob(f"*/{STATUS_FILE}")) if run is None else [runs / run / STATUS_FILE]
    files = [file for file in files if file.exists()]
    if not files:
        raise ConfigError(
            f"no run in {runs} has a {STATUS_FILE}", "give the --runs of server-run; it is written once it has started"
        )
    path = max(files, key=lambda file: file.stat().st_mtime)
    try:
        document: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}", "look again in a few seconds") from error
    age_s = max(0.0, time.time() - path.stat().st_mtime)
    try:
        at_work = is_locked(path.parent / "lock")
    except OSError:  # a run that was copied without its lock
        at_work = False
    state = "stopped" if not at_work else "running" if age_s <= STALE_S else "hangs"
    return {**document, "state": state, "age_s": age_s}


if __name__ == "__main__":
    sys.exit(main())
