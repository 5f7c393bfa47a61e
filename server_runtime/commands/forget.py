"""Forget a device or a site in all runs: features, states and ledger rows; writes a signed receipt of what went."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path

from contract import signature
from contract.canonical import to_json
from contract.console import ArgumentParser, say
from contract.errors import UsageError
from contract.names import check_name
from contract.output import check_output_file

from ..files import DISK_ERRORS, disk_refuses, write_atomic
from ._settings import add_settings, settle


def configure(parser: ArgumentParser) -> None:
    """Who, where, and who vouches for it."""
    add_settings(parser, "runs")
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--device", metavar="NAME")
    who.add_argument("--site", metavar="NAME")
    parser.add_argument("--models", action="store_true", help="delete the site's trained models as well")
    parser.add_argument("--signing-key", type=Path, required=True, metavar="FILE", help="private key that signs (PEM)")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="the receipt; its signature is FILE.sig"
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises: UsageError; ConfigError where a server works on a run; TrainingError where something is left."""
    from ..erasure import Subject, forget

    key = signature.load_private(arguments.signing_key)
    if arguments.output.exists():
        raise UsageError(f"{arguments.output} exists already", "a receipt is never replaced: give another -o")
    check_output_file(arguments.output)
    runs: Path = settle(arguments)["runs"]
    roots = sorted(path for path in runs.glob("*") if (path / "run.toml").exists())
    if not roots:
        raise UsageError(f"there is no run in {runs}", "give the folder that server-run keeps its runs in with --runs")
    subject = Subject(arguments.device, arguments.site)
    check_name(subject.device or subject.site or "", "device" if subject.device else "site")
    erased = []
    for root in roots:
        try:
            erased.append(forget(root, subject, arguments.models))
        except DISK_ERRORS as error:
            raise disk_refuses(root, error) from error
    if not any(each.files or each.rows or each.kept for each in erased):
        raise UsageError(
            f"no run in {runs} holds anything of {subject.device or subject.site!r}: there is nothing to vouch for",
            "look at the name: server-status and server-run devices list them",
        )
    receipt = to_json(
        {
            "schema_version": 1,
            "kind": "erasure",
            "subject": asdict(subject),
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "runs": [asdict(each) for each in erased],
            "note": "Weights that were trained before are not untrained; `kept` lists the models that remain.",
        }
    )
    signed = signature.sign(key, receipt)
    files, rows = sum(each.files for each in erased), sum(each.rows for each in erased)
    gone = f"{files} files and {rows} rows of {len(roots)} runs are gone"
    try:
        write_atomic(arguments.output, receipt)
        write_atomic(arguments.output.with_name(arguments.output.name + ".sig"), signed)
    except OSError as error:  # nothing can be vouched for a second time
        sys.stdout.write(receipt.decode())
        print(f"signature (hex): {signed.hex()}")
        raise UsageError(
            f"{gone}, but {arguments.output} or its signature cannot be written: {error.strerror}",
            "keep what stands on stdout: the receipt's bytes, then its signature",
        ) from error
    say(f"{gone}; receipt: {arguments.output}")
    kept = [f"{each.run}/{name}" for each in erased for name in each.kept]
    if kept:
        say(f"warning: trained models remain ({len(kept)} files, such as {kept[0]}); --models deletes them")
    if subject.device:
        say(f"it may still join: server-run revoke {subject.device}")
    return 0
