"""server-run: adapt the shipped backend to each site's features, and answer inference.

Reading flags and files, and saying how it went; everything that decides is left to `plan`, `runs` and the processes.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from contract import commands
from contract.config import Resolved, check_inputs, find_file, resolve
from contract.console import ArgumentParser, print_document, run_command, say
from contract.extras import require
from contract.training import HOLDS, OWN_HEADS

from . import backend_folder, pipe, plan, strategies
from . import commands as server_commands
from .acceptance import Expected
from .admission import Terms
from .backend_folder import BackendFolder, TrainingFolder
from .belongs import STRATEGIES_OF, check_given
from .evaluation import check_same, digest_of
from .files import DISK_ERRORS, disk_refuses
from .pipe import PipeFrame
from .plan import FIELDS, Plan, parse_listen
from .roster import read_roster
from .runs import Run, choose_run, lock_run
from .schedule import SCHEDULES
from .server import Job, Outcome, Server
from .store import Store


def main(arguments: Sequence[str] | None = None) -> int:
    """The server-run command; returns its exit code."""
    return run_command(partial(_main, arguments))


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="server-run",
        description="Adapt the backend to the features of enrolled devices, site by site, and answer their inference.",
        epilog="Settings that are left out come from CUTLAYER_SERVER_* and [server] of cutlayer.toml. "
        + commands.epilog("server-run", commands.names(server_commands)),
    )
    choices = {
        "strategy": strategies.names(),
        "label_mode": plan.LABEL_MODES,
        "schedule": SCHEDULES,
        "server_copies": plan.SERVER_COPIES,
        "average_by": plan.AVERAGE_BY,
        "average_into": plan.AVERAGE_INTO,
        "norms": plan.NORMS,
        "sampling": plan.SAMPLINGS,
    }
    metavars = dict.fromkeys(choices) | {"replaced": "SHARE", "run": "ID", "cuts": "CUTS", "sigma": "SIGMA"}
    metavars |= dict.fromkeys(("listen", "metrics"), "HOST:PORT")
    kinds = {Path: "PATH", int: "N", float: "X"}
    groups: dict[frozenset[str], argparse._ArgumentGroup] = {}
    for field in FIELDS:
        name = "--" + field.name.replace("_", "-")
        metavar = metavars.get(field.name, kinds.get(field.type))
        add = parser.add_argument
        if (owners := STRATEGIES_OF.get(field.name)) is not None:
            if owners not in groups:
                groups[owners] = parser.add_argument_group(_title(owners))
            add = groups[owners].add_argument
        add(name, choices=choices.get(field.name), metavar=metavar, help=field.described)
    parser.add_argument(
        "--exit-when-done", action="store_true", help="exit when every site is trained and inference is answered"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="json: one document on stdout")
    parser.add_argument("--config", type=Path, metavar="FILE", help="default: ./cutlayer.toml, where it exists")
    parser.add_argument("--show-config", action="store_true", help="print each setting and where it comes from")
    return parser


def _title(owners: frozenset[str]) -> str:
    """Of the settings that mean something to these strategies alone; the shorter list of names."""
    others = [name for name in strategies.names() if name not in owners]
    return f"for {', '.join(sorted(owners))} only" if len(owners) <= len(others) else f"not for {', '.join(others)}"


def _main(arguments: Sequence[str] | None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    code = commands.run_named("server-run", server_commands, words)
    return _serve(words) if code is None else code


def _serve(arguments: Sequence[str]) -> int:
    flags = vars(_parser().parse_args(arguments))
    file = find_file(flags["config"], Path())
    resolved = resolve(
        "server",
        FIELDS,
        {field.name: flags.get(field.name) for field in FIELDS},
        os.environ,
        file,
        flags["show_config"],
    )
    if flags["show_config"]:
        print(resolved.show())
        return 0
    as_json = flags["format"] == "json"
    values = resolved.values
    listen = parse_listen(values["listen"], values["certificate"], values["certificate_key"], values["client_ca"])
    check_inputs(FIELDS, resolved)
    roster = read_roster(values["roster"])
    strategies.check(values["strategy"])
    check_given(values["strategy"], resolved.origin)
    folder = backend_folder.read(values["backend"])
    wanted = _plan(resolved, folder)
    devices = {device for names in roster.sites.values() for device in names}
    leakage = folder.leakage if isinstance(folder, TrainingFolder) else None
    wanted.check(folder.manifest.transforms, folder.manifest.label_modes, folder.training, devices, leakage)
    given = frozenset(name for name, origin in resolved.origin.items() if origin != "default")
    require("torch", "timm")
    run = choose_run(values["runs"], values["run"], wanted, given, list(roster.sites), _new_name, say)
    check_same(run.plan.evaluation_sha256, values["public"])
    say(f"{'starting' if run.is_new else 'going on with'} run {run.name} in {run.root}")
    try:
        lock = lock_run(run.root)
        store = Store(run.root, lambda text: say(f"warning: {text}"))
    except DISK_ERRORS as error:
        raise disk_refuses(run.root, error) from error
    try:
        job = Job(
            root=run.root,
            listen=listen,
            roster=roster,
            terms=_terms(run),
            expected=Expected(folder.layout, run.plan.label_mode),
            start=_start_frame(run, folder, roster.sites, values["public"] if run.plan.evaluation_sha256 else None),
            threads=run.plan.threads,
            exit_when_done=flags["exit_when_done"],
            metrics=None if values["metrics"] is None else plan.parse_address("metrics", values["metrics"]),
        )
        announce: Callable[[str], None] = say if as_json else _print_now
        outcome = asyncio.run(Server(job, store, announce, say).run())
    finally:
        store.close()
        os.close(lock)
    if as_json:
        print_document("server-run", _document(run, outcome, tuple(roster.sites)))
    return 0


def _print_now(text: str) -> None:
    print(text, flush=True)


def _plan(resolved: Resolved, folder: BackendFolder | TrainingFolder) -> Plan:
    own = {field.name for field in dataclasses.fields(Plan)}
    values = {name: value for name, value in resolved.values.items() if name in own}
    if values["kappa"] is None:
        values["kappa"] = folder.manifest.transforms.kappa
    if values["threads"] is None:
        values["threads"] = len(os.sched_getaffinity(0))
    public = resolved.values["public"]
    if public is not None and values["strategy"] in plan.JUDGING:
        values["evaluation_sha256"] = digest_of(public)
    return Plan(backend_sha256=folder.sha256(), package_digest=folder.package_digest, **values)


def _new_name() -> str:
    return time.strftime("%Y%m%dT%H%M%S") + "-" + secrets.token_hex(3)


def _terms(run: Run) -> Terms:
    return Terms(
        run=run.name,
        strategy=run.plan.strategy,
        label_mode=run.plan.label_mode,  # type: ignore[arg-type]  # checked against the list of modes
        package_digest=run.plan.package_digest,
        kappa=run.plan.kappa,
        seed=run.plan.seed,
        own_classes=HOLDS[run.plan.strategy] in OWN_HEADS,
    )


def _start_frame(
    run: Run, folder: BackendFolder | TrainingFolder, sites: dict[str, tuple[str, ...]], public: Path | None
) -> PipeFrame:
    start = {
        "run": run.name,
        "root": str(run.root.resolve()),
        "backend": str(folder.root.resolve()),
        "plan": run.plan.values(),
        "sites": sites,
        "public": None if public is None else str(public.resolve()),
    }
    return PipeFrame(pipe.START, text=json.dumps(start))


def _document(run: Run, outcome: Outcome, names: Sequence[str]) -> dict[str, object]:
    sites: dict[str, object] = {site: {"state": "unfinished"} for site in names}
    sites |= {site: {"state": "trained", **values} for site, values in outcome.ended.items()}
    sites |= {site: {"state": "failed", "cause": error.cause} for site, error in outcome.failed.items()}
    return {"run": run.name, "directory": str(run.root), "plan": run.plan.values(), "sites": sites}


if __name__ == "__main__":
    sys.exit(main())
