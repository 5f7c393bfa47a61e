"""A run as one file, and back: also while its server works, as every file of a run is whole at any moment.

    run/<name>/...        the files, the ledger as one snapshot
    manifest.json         name, format, and the SHA-256 of each file; it comes last, so that a torn archive has none

The ledger is copied first: every batch that it names is on the disk before. What devices send meanwhile is sent again.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sqlite3
import tarfile
from collections.abc import Iterator
from pathlib import Path

from contract.errors import ConfigError, why

from .files import sync_directory

FORMAT = 1
MANIFEST = "manifest.json"
MANIFEST_BYTES = 64 << 20
_LEFT_OUT = ("lock", "status.json", "state.sqlite", "state.sqlite-wal", "state.sqlite-shm")
_CURE = "make the backup again, or take another one"


def back_up(root: Path, target: Path) -> int:
    """Write the run's archive, whole or not at all; the number of files in it.

    Raises: ConfigError where the run or the target cannot be used.
    """
    draft = target.with_name(target.name + ".part")
    snapshot = draft.with_name(draft.name + ".sqlite")
    digests: dict[str, str] = {}
    try:
        with tarfile.open(draft, "w") as archive:
            if (root / "state.sqlite").exists():
                _snapshot(root / "state.sqlite", snapshot)
                _add(archive, digests, "state.sqlite", snapshot.read_bytes())
            for path in _files(root):
                try:
                    data = path.read_bytes()
                except FileNotFoundError:
                    continue  # it was answered, or a newer checkpoint took its place
                _add(archive, digests, str(path.relative_to(root)), data)
            manifest = json.dumps({"format": FORMAT, "run": root.name, "files": digests}).encode()
            _append(archive, MANIFEST, manifest)
        descriptor = os.open(draft, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        os.replace(draft, target)
        sync_directory(target.resolve().parent)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(
            f"{root} cannot be backed up to {target}: {why(error, target)}", "make room, or give another -o"
        ) from error
    finally:
        for left in (draft, snapshot):
            left.unlink(missing_ok=True)
    return len(digests)


def restore(source: Path, runs: Path) -> Path:
    """Put the run of an archive into RUNS, every file checked first; gives its folder.

    Raises: ConfigError where the archive is damaged, or the run is there already.
    """
    try:
        with tarfile.open(source, "r:") as archive:
            manifest = _read_manifest(archive, source)
            root = runs / manifest["run"]
            if root.exists():
                raise ConfigError(f"run {root} is there already", "move it away first: a run is never replaced")
            draft = runs / f".{manifest['run']}.part"
            shutil.rmtree(draft, ignore_errors=True)
            try:
                for name, digest in manifest["files"].items():
                    _extract(archive, name, digest, draft, source)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
    except (OSError, tarfile.TarError) as error:
        raise ConfigError(f"the backup {source} cannot be used: {why(error, source)}", _CURE) from error
    for folder in (path for path in (draft, *draft.rglob("*")) if path.is_dir()):
        sync_directory(folder)
    os.replace(draft, root)
    sync_directory(runs)
    return root


def _snapshot(path: Path, target: Path) -> None:
    source, copy = sqlite3.connect(path, timeout=30.0), sqlite3.connect(target)
    try:
        source.backup(copy)
    finally:
        source.close()
        copy.close()


def _files(root: Path) -> Iterator[Path]:
    """Checkpoints before journals, which are emptied once there is a newer checkpoint."""
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.name not in _LEFT_OUT and not path.name.endswith(".part"):
            yield path


def _add(archive: tarfile.TarFile, digests: dict[str, str], name: str, data: bytes) -> None:
    digests[name] = hashlib.sha256(data).hexdigest()
    _append(archive, f"run/{name}", data)


def _append(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), 0o600
    archive.addfile(entry, io.BytesIO(data))


def _read_manifest(archive: tarfile.TarFile, source: Path) -> dict:  # type: ignore[type-arg]
    try:
        entry = archive.getmember(MANIFEST)
        stream = archive.extractfile(entry)
        manifest = json.loads(stream.read(MANIFEST_BYTES)) if stream else None
        names = [*manifest["files"], manifest["run"]]
        if manifest["format"] != FORMAT or not all(map(_is_inside, names)) or "/" in manifest["run"]:
            raise ValueError("another format")
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"the backup {source} is not whole: {error}", _CURE) from error
    return manifest


def _is_inside(name: str) -> bool:
    """No name of an archive leads out of the run's folder, whoever made it."""
    parts = Path(name).parts
    return bool(parts) and not Path(name).is_absolute() and ".." not in parts and not parts[0].startswith(".")


def _extract(archive: tarfile.TarFile, name: str, digest: str, draft: Path, source: Path) -> None:
    try:
        entry = archive.getmember(f"run/{name}")
    except KeyError as error:
        raise ConfigError(f"the backup {source} lacks {name}", _CURE) from error
    stream = archive.extractfile(entry) if entry.isfile() else None
    data = stream.read() if stream else b""
    if hashlib.sha256(data).hexdigest() != digest:
        raise ConfigError(f"the backup {source} is damaged at {name}", _CURE)
    path = draft / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
