"""A campaign of faults in one run: drawn from a seed, struck one after the other, the result compared bit for bit.

    tools/chaos --faults 200 --strategy ssl --seed 1 --format json

The same work runs twice, from the same secrets: undisturbed, and under the faults. Each fault waits for a number of
messages that the server has on record (batches, gradients, steps), not for a time, and most for work to have gone on
after the one before. Adapting (sa): features on the server, records and trained weights must be equal, no batch twice
or missing. Sequential split training (ssl): records, the whole model, and each device's part with its optimiser.
Exit code 7 where anything differs, a program ended that no fault explains, or the work was done before all faults
had struck.
"""

from __future__ import annotations

import argparse
import math
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from contract.canonical import INT_MAX
from contract.console import ArgumentParser, print_document, run_command, say
from contract.errors import TrainingError, UsageError
from contract.output import open_output
from server_runtime.report import Table, to_text
from tests.over_loopback.deployment import Deployment, copy_secrets
from tools.chaos_faults import KINDS, Fault, draw_faults
from tools.chaos_strikes import Strikes
from tools.chaos_verdict import differences
from tools.chaos_world import WORKS, Work, World, make_package

STOPPED = 143  # exit code, as a shell tells it


@dataclass(frozen=True)
class Outcome:
    """How a campaign went."""

    applied: list[tuple[Fault, bool]]  # with whether it struck during the upload
    recovery_s: dict[str, list[float]]
    differences: list[str]
    calm_s: float
    disturbed_s: float
    server_starts: int


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))  # so that no program is left behind
    options = parse(sys.argv[1:])
    root = open_output(options.output)
    package = options.package or made_package(root)
    work = WORKS[options.strategy](options.faults)
    faults = draw_faults(options.faults, options.seed, options.kind or tuple(KINDS))
    outcome = campaign(package, root / options.strategy, work, faults, options.minutes * 60)
    document = summarise(outcome, options)
    if options.format == "json":
        print_document("chaos", document)
    else:
        print_tables(document)
    return 0 if document["equal"] else TrainingError.exit_code


def parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser("tools/chaos", "Disturb one run with a seeded list of faults, and compare the result.")
    parser.add_argument("--faults", type=int, default=200, metavar="N", help="default: %(default)s")
    parser.add_argument("--strategy", choices=sorted(WORKS), default="sa", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of the faults (default: %(default)s)")
    parser.add_argument("--kind", action="append", choices=sorted(KINDS), help="only this kind; may be repeated")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, metavar="N", help="begin no fault later than this; default: no limit"
    )
    parser.add_argument("--package", type=Path, metavar="DIR", help="of python -m tests.make_package; default: made")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    default = Path(tempfile.gettempdir()) / "cutlayer-chaos"
    parser.add_argument("-o", "--output", type=Path, default=default, help="folder to work in (default: %(default)s)")
    options = parser.parse_args(argv)
    if options.faults < 1:
        raise UsageError(f"--faults is {options.faults}, expected 1 or more", "correct --faults")
    if not options.minutes > 0:  # NaN is not, either
        raise UsageError(f"--minutes is {options.minutes:g}, expected more than 0", "correct --minutes")
    if not 0 <= options.seed <= INT_MAX:
        raise UsageError(f"--seed is {options.seed}, expected 0 to {INT_MAX}", "correct --seed")
    return options


def made_package(root: Path) -> Path:
    """The tests' small packages, made once."""
    if not (root / "made").exists():
        draft = root / "made.partial"
        shutil.rmtree(draft, ignore_errors=True)
        say("== packages")
        subprocess.run([sys.executable, "-m", "tests.make_package", str(draft)], check=True)
        draft.rename(root / "made")
    return root / "made"


def campaign(given: Path, root: Path, work: Work, faults: list[Fault], limit_s: float = math.inf) -> Outcome:
    """The work undisturbed and under the faults, none of which begins after `limit_s`; `root` is emptied.

    Raises: TrainingError when the work stands still.
    """
    shutil.rmtree(root, ignore_errors=True)
    calm, disturbed = root / "undisturbed", root / "disturbed"
    for each in (calm, disturbed):
        each.mkdir(parents=True)
    package = make_package(given, root, work)
    say("== undisturbed")
    began_s = time.monotonic()
    with World(Deployment(package, calm, front=work.front), work, say) as world:
        world.finish()
        calm_s = time.monotonic() - began_s
    unexpected = world.unexpected
    copy_secrets(calm, disturbed)
    say("== disturbed")
    applied, began_s = [], time.monotonic()
    with World(Deployment(package, disturbed, front=work.front), work, say) as world:
        strikes = Strikes(world)
        for fault in faults:
            uploading, struck_s = world.uploading, time.monotonic()
            if struck_s - began_s > limit_s:
                break
            if not strikes.strike(fault):
                early = f"the work was done before {len(faults) - len(applied)} of {len(faults)} faults"
                world.unexpected.append(early)
                break
            applied.append((fault, uploading))
            passed_s = time.monotonic() - struck_s
            say(f"{fault.number}: {fault.kind}, {fault.target} ({passed_s:.1f} s)")
        world.finish()
        disturbed_s = time.monotonic() - began_s
    found = unexpected + world.unexpected + differences(calm, disturbed)
    return Outcome(applied, strikes.recovery_s, found, calm_s, disturbed_s, world.starts)


def summarise(outcome: Outcome, options: argparse.Namespace) -> dict[str, Any]:
    """The document of a campaign."""
    return {
        "strategy": options.strategy,
        "seed": options.seed,
        "equal": not outcome.differences,
        "differences": outcome.differences,
        "faults_asked": options.faults,
        "faults": len(outcome.applied),
        "faults_by_kind": dict(sorted(Counter(fault.kind for fault, _ in outcome.applied).items())),
        "faults_during_upload": sum(uploading for _, uploading in outcome.applied),
        "followed_at_once": sum(fault.hasty for fault, _ in outcome.applied),
        "server_starts": outcome.server_starts,
        "recovery_s": {kind: spread(values) for kind, values in sorted(outcome.recovery_s.items())},
        "undisturbed_s": round(outcome.calm_s, 1),
        "disturbed_s": round(outcome.disturbed_s, 1),
    }


def spread(values_s: list[float]) -> dict[str, float | int]:
    """Of at least one duration."""
    median, p90, most = (round(float(each), 2) for each in np.quantile(values_s, (0.5, 0.9, 1.0)))
    return {"measured": len(values_s), "p50": median, "p90": p90, "max": most}


def print_tables(document: dict[str, Any]) -> None:
    """For a person on a terminal."""
    verdict = "equal to the undisturbed run" if document["equal"] else "DIFFERENT"
    title = f"{document['faults']} faults in one run ({document['strategy']}, seed {document['seed']}): {verdict}"
    print(to_text(Table(title, ("fault", "times"), tuple(document["faults_by_kind"].items()))))
    rows = tuple((kind, *figures.values()) for kind, figures in document["recovery_s"].items())
    head = ("killed", "measured", "p50", "p90", "max")
    print("\n" + to_text(Table("Seconds from SIGKILL to the first message that the new server has", head, rows)))
    for name in ("faults_during_upload", "followed_at_once", "server_starts", "undisturbed_s", "disturbed_s"):
        print(f"{name.replace('_', ' ')}: {document[name]}")
    for each in document["differences"]:
        print(f"difference: {each}")


if __name__ == "__main__":
    sys.exit(run_command(partial(main)))
