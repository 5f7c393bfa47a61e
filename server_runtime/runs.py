"""Which run directory is used: the newest unfinished run of the same plan, the one that is named, or a new one.

What a run directory holds is left to `store` and `run_directory`; what a plan is to `plan`.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tomllib
from safetensors import SafetensorError, safe_open

from contract.errors import ConfigError
from contract.names import check_name

from .files import set_aside, write_atomic
from .plan import Plan
from .store import Store

_PLAN_FILES = ("run.toml", "run.toml.copy")
RUN_NAME_CHARACTERS = 40  # a run's name is the start of ask ids, which have 64


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that is to be taken up or started; `plan` is what its record says."""

    name: str
    root: Path
    plan: Plan
    is_new: bool


def choose_run(
    runs: Path,
    named: str | None,
    plan: Plan,
    given: frozenset[str],
    sites: Sequence[str],
    new_name: Callable[[], str],
    say: Callable[[str], None],
) -> Run:
    """The run to work on; a new one is created with its run.toml.

    `given` names the settings that were chosen and are not defaults: a recorded run keeps its own for all others.

    Raises:
        ConfigError: the named run was made with another backend or other settings, or RUNS cannot be written.
    """
    if named is not None:
        return _choose_named(runs / check_name(named, "run"), plan, given, say)
    finished, other = None, ""
    for root in sorted((path for path in runs.glob("*") if path.is_dir()), reverse=True):
        recorded = read_plan(root, say)
        if recorded is None:
            say(f"{root} has no readable run.toml: passed over")
        elif differences := plan.differences(recorded, given):
            of_this_backend = not plan.differences(recorded, frozenset())
            if of_this_backend and not other and not is_finished(root, sites):
                other = f"run {root.name} is not finished and was started with {'; '.join(differences)}"
        elif not is_finished(root, sites):
            return _take_up(root, recorded, plan, given)
        else:
            finished = finished or root.name
    if finished is not None:
        say(f"run {finished} of the same plan is finished; to answer inference with it: --run {finished}")
    run = _create(runs / new_name(), plan)
    if other:
        say(f"{other}: run {run.name} is a new one; to go on with the other, give its settings")
    return run


def _choose_named(root: Path, plan: Plan, given: frozenset[str], say: Callable[[str], None]) -> Run:
    if len(root.name) > RUN_NAME_CHARACTERS:
        raise ConfigError(f"the run name {root.name!r} is too long", f"use at most {RUN_NAME_CHARACTERS} characters")
    recorded = read_plan(root, say)
    if recorded is not None:
        return _take_up(root, recorded, plan, given)
    if (root / "run.toml").exists() or (root / "state.sqlite").exists():
        raise ConfigError(
            f"{root / 'run.toml'} cannot be read, nor can its copy", "restore one of them, or choose another --run"
        )
    return _create(root, plan)


def _take_up(root: Path, recorded: dict[str, Any], plan: Plan, given: frozenset[str]) -> Run:
    differences = plan.differences(recorded, given)
    if differences:
        raise ConfigError(
            f"run {root.name} was started with " + "; ".join(differences),
            "leave --run out to start a new run, or use the settings and the backend of this one",
        )
    try:
        values = {name: type(default)(recorded[name]) for name, default in plan.values().items()}
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{root / 'run.toml'} is not as it was written: {error}", "start another --run") from error
    return Run(root.name, root, Plan(**values), is_new=False)  # type: ignore[arg-type]


def _create(root: Path, plan: Plan) -> Run:
    try:
        root.mkdir(parents=True, exist_ok=True)
        write_plan(root, plan)
    except OSError as error:
        raise ConfigError(
            f"the run directory {root} cannot be made: {error.strerror}", "give a writable folder with --runs"
        ) from error
    return Run(root.name, root, plan, is_new=True)


def write_plan(root: Path, plan: Plan) -> None:
    """Write run.toml and its copy; JSON's texts and numbers are TOML's as well."""
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in plan.values().items()]
    for name in _PLAN_FILES:
        write_atomic(root / name, "".join(lines).encode())


def read_plan(root: Path, say: Callable[[str], None] = lambda text: None) -> dict[str, Any] | None:
    """Values of run.toml, from its copy where it is damaged (then it is restored); None when neither can be read.

    Settings that are newer than the run have their defaults, by which it was trained.
    """
    for name in _PLAN_FILES:
        try:
            data = (root / name).read_bytes()
            recorded = tomllib.loads(data.decode())
        except (OSError, ValueError):
            continue
        known = {field.name: field.default for field in dataclasses.fields(Plan)}
        newer = {name: default for name, default in known.items() if name not in recorded}
        if recorded.keys() - known.keys() or dataclasses.MISSING in newer.values():
            continue
        if name != _PLAN_FILES[0]:
            if (root / _PLAN_FILES[0]).exists():
                say(f"{root.name}/run.toml was unreadable: kept as {set_aside(root / _PLAN_FILES[0]).name}, restored")
            write_atomic(root / _PLAN_FILES[0], data)
        return newer | recorded
    return None


def lock_run(root: Path) -> int:
    """Take the run for this process, until it ends; returns the open descriptor that holds the lock.

    Raises:
        ConfigError: another server-run works on it.
    """
    descriptor = os.open(root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(
            f"run {root.name} is in use by another server-run", "stop that one, or start another run with --run NAME"
        ) from error
    return descriptor


def is_finished(root: Path, sites: Sequence[str]) -> bool:
    """Whether every site's strategy has ended and every inference request was answered."""
    for site in sites:
        try:
            with safe_open(root / "checkpoints" / f"{site}.safetensors", framework="numpy") as stream:
                if not json.loads((stream.metadata() or {})["values"])["ended"]:
                    return False
        except (SafetensorError, OSError, KeyError, ValueError):
            return False
    store = Store(root)
    try:
        return not any(store.records(site, "infer", unanswered=True) for site in sites)
    finally:
        store.close()
