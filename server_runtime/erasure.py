"""Forgets a device or a site: what it sent, what was kept of it, and its rows in the ledgers; says what is left.

Signing what was done is left to `server-run forget`. Weights that were trained with a device's features are not
untrained by this: the site's checkpoints go, so that training would begin anew without it, and the published models
are listed as kept unless they are to go as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from contract.errors import TrainingError

from .files import sync_directory, write_atomic
from .observatory import STATUS_FILE
from .runs import lock_run


@dataclass(frozen=True)
class Subject:
    """Who is forgotten: a device, or all of a site."""

    device: str | None
    site: str | None


@dataclass(frozen=True)
class Erased:
    """What went from one run; `kept` are files that were made with the subject's data, by their SHA-256."""

    run: str
    files: int
    size_bytes: int
    rows: int
    removed: tuple[str, ...]
    kept: dict[str, str]


def forget(root: Path, subject: Subject, with_models: bool) -> Erased:
    """Forget the subject in one run, and look that nothing is left.

    Raises:
        ConfigError: a server works on the run.
        TrainingError: something is left nevertheless.
    """
    lock = lock_run(root)
    try:
        with _ledger(root) as ledger:
            pairs = _pairs(root, ledger, subject)
            sites = sorted({site for site, _ in pairs} | ({subject.site} if subject.site else set()))
            rows = _delete_rows(ledger, subject)
        doomed = [root / "tensors" / site / device for site, device in pairs]
        if subject.site is not None:
            doomed.append(root / "tensors" / subject.site)
        if pairs or subject.site is not None:
            doomed += _states(root, sites)
        if rows or any(path.exists() for path in doomed):  # a name that nothing is of takes nothing with it
            doomed += [root / STATUS_FILE, *root.glob("state.sqlite.damaged-*"), *root.glob("state.sqlite-*.damaged-*")]
        models = [root / "models" / site for site in sites]
        doomed += models if with_models else []
        found = [path for path in doomed if path.exists()]
        files, size_bytes = _measure(found)
        for path in found:
            _remove(path)
        lines = _drop_lines(root, subject.site) if subject.site else 0
        kept = {} if with_models else _digests(root, models)
        removed = (*(str(path.relative_to(root)) for path in found), *(("metrics.jsonl (lines)",) if lines else ()))
        erased = Erased(root.name, files, size_bytes, rows + lines, removed, kept)
        _look_again(root, subject, pairs)
        return erased
    finally:
        os.close(lock)


@contextlib.contextmanager
def _ledger(root: Path) -> Iterator[sqlite3.Connection | None]:
    path = root / "state.sqlite"
    if not path.exists():
        yield None
        return
    connection = sqlite3.connect(path, timeout=30.0, isolation_level=None)
    try:
        connection.execute("PRAGMA secure_delete = ON")  # overwrite, not only unlink
        yield connection
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("VACUUM")
    finally:
        connection.close()


def _pairs(root: Path, ledger: sqlite3.Connection | None, subject: Subject) -> list[tuple[str, str]]:
    """(site, device) of everything that is stored of the subject, by the ledger and by the folders."""
    found = {(path.parent.name, path.name) for path in root.glob("tensors/*/*") if path.is_dir()}
    if ledger is not None:
        found |= set(ledger.execute("SELECT DISTINCT site, device FROM uploads").fetchall())
    wanted = sorted(pair for pair in found if subject.device == pair[1] or subject.site == pair[0])
    if subject.device is not None and not wanted and _has_session(ledger, subject.device):
        # A device that trains sends no uploads: its site's checkpoint and journal hold what is kept of it.
        return sorted((site, subject.device) for site in _sites_of(root, subject.device))
    return wanted


def _sites_of(root: Path, device: str) -> set[str]:
    """The device's site, as the server last told; else every site of the run, as it may be any of them."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        told = json.loads((root / STATUS_FILE).read_text("utf-8"))["devices"]
        return {each["site"] for each in told if each["device"] == device}
    checkpoints = {path.name.split(".")[0] for path in root.glob("checkpoints/*.safetensors")}
    return checkpoints | {path.name for path in root.glob("journal/*")}


def _has_session(ledger: sqlite3.Connection | None, device: str) -> bool:
    return ledger is not None and bool(
        ledger.execute("SELECT count(*) FROM sessions WHERE device = ?", (device,)).fetchone()[0]
    )


def _delete_rows(ledger: sqlite3.Connection | None, subject: Subject) -> int:
    if ledger is None:
        return 0
    if subject.device is not None:
        where, value = "device = ?", subject.device
        statements = [f"DELETE FROM {table} WHERE {where}" for table in ("uploads", "sessions")]
    else:
        assert subject.site is not None
        value = subject.site
        statements = [
            "DELETE FROM sessions WHERE device IN (SELECT device FROM uploads WHERE site = ?)",
            "DELETE FROM uploads WHERE site = ?",
            "DELETE FROM sites WHERE site = ?",
        ]
    ledger.execute("BEGIN IMMEDIATE")
    rows = sum(ledger.execute(statement, (value,)).rowcount for statement in statements)
    ledger.execute("COMMIT")
    return rows


def _states(root: Path, sites: Sequence[str]) -> list[Path]:
    """Checkpoints and journals: they hold what devices answered, and parts that are a device's own."""
    found = [root / "journal" / site for site in sites]
    for site in sites:
        found += sorted((root / "checkpoints").glob(f"{site}.safetensors*"))
        found += sorted((root / "checkpoints").glob(f"{site}.previous.safetensors*"))
    return found


def _measure(paths: Sequence[Path]) -> tuple[int, int]:
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
    unique = set(files)
    return len(unique), sum(file.stat().st_size for file in unique)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if path.parent.is_dir():
        sync_directory(path.parent)


def _drop_lines(root: Path, site: str) -> int:
    path = root / "metrics.jsonl"
    if not path.exists():
        return 0
    lines = path.read_text("utf-8").splitlines(keepends=True)
    left = [line for line in lines if not _is_of(line, site)]
    write_atomic(path, "".join(left).encode())
    return len(lines) - len(left)


def _is_of(line: str, site: str) -> bool:
    try:
        values = json.loads(line)
    except ValueError:
        return True  # a torn line says nothing to anybody
    return isinstance(values, dict) and values.get("site") == site


def _digests(root: Path, folders: Sequence[Path]) -> dict[str, str]:
    return {
        str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest()
        for folder in folders
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def _look_again(root: Path, subject: Subject, pairs: Sequence[tuple[str, str]]) -> None:
    """Raises: TrainingError where something of the subject is still there."""
    left = [
        str(root / "tensors" / site / device) for site, device in pairs if (root / "tensors" / site / device).exists()
    ]
    with _ledger(root) as ledger:
        if ledger is not None:
            name = subject.device or subject.site
            column = "device" if subject.device else "site"
            query = f"SELECT count(*) FROM uploads WHERE {column} = ?"  # noqa: S608  one of two names of our own
            left += ["state.sqlite"] if ledger.execute(query, (name,)).fetchone()[0] else []
    if left:
        raise TrainingError(f"not everything went: {', '.join(left)}", "repair the disk and forget it again")
