"""Write a package and its backend whole or not at all: a hidden folder beside the target, fsync, rename.

What the files hold is decided before; nothing here looks into a model.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save as array_bytes
from safetensors.torch import save, save_file
from torch import Tensor

from contract.errors import ExportError, ManifestError
from contract.manifest import LIMITS, MANIFEST_NAME, SIGNATURE_NAME, FileRecord, Manifest, from_bytes
from contract.output import check_output, naming
from contract.scratch import scratch_folder

ONNX_NAME = "front.onnx"
GOLDEN_NAME = "golden.safetensors"


@dataclass(frozen=True)
class Staging:
    """Hidden folders beside the target: the package, its backend, and scratch space for large intermediate files."""

    package: Path
    backend: Path
    scratch: Path


def backend_path(output: Path) -> Path:
    """The backend's folder: never sent, never inside the package."""
    return output.with_name(output.name + ".backend")


@contextlib.contextmanager
def staging(output: Path) -> Iterator[Staging]:
    """Folders to write into; whatever is still in them at the end is removed, and what a killed export left before.

    Raises UsageError when the target's parent cannot be written.
    """
    check_output(output)
    with scratch_folder(f".{output.name}.", ".tmp", output.parent) as root:
        staged = Staging(root / "package", root / "backend", root / "scratch")
        for folder in (staged.package, staged.backend, staged.scratch):
            folder.mkdir()
        yield staged


def previous_manifest(output: Path) -> Manifest | None:
    """Manifest of the package that an export to `output` would replace.

    Raises ExportError when something else is in the way.
    """
    backend = backend_path(output)
    if backend.exists() and not _is_free(backend) and not (backend / "export.json").is_file():
        raise _in_the_way(backend)
    if not output.exists() or _is_free(output):
        return None
    path = output / MANIFEST_NAME
    if not path.is_file() or path.stat().st_size > LIMITS.size_bytes:
        raise _in_the_way(output)
    try:
        return from_bytes(path.read_bytes())
    except ManifestError as error:
        raise _in_the_way(output) from error


def _is_free(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _in_the_way(path: Path) -> ExportError:
    return ExportError(f"{path} exists and is not a package made by this command", "move it away, or choose another -o")


def next_version(previous: Manifest | None, wanted: int | None, output: Path) -> int:
    """The version to publish. Raises ExportError unless it is higher than the one it replaces."""
    lowest = 1 if previous is None else previous.version + 1
    if wanted is not None and wanted < lowest:
        raise ExportError(
            f"{output} holds version {lowest - 1}, so the next must be {lowest} or more, found {wanted}",
            "leave out --version to count up: devices refuse anything else as a rollback",
        )
    return wanted or lowest


def golden_bytes(pixels: NDArray[np.uint8], tokens: NDArray[np.float32]) -> bytes:
    """golden.safetensors: pictures (n, h, w, 3) as the engine's preprocessing receives them, and their tokens."""
    return array_bytes({"pixels": np.ascontiguousarray(pixels), "tokens": np.ascontiguousarray(tokens)})


def write_package(folder: Path, files: Mapping[str, bytes]) -> tuple[FileRecord, ...]:
    """Write the listed files; records of size and SHA-256 for the manifest, in order of name."""
    for name, data in files.items():
        write_file(folder / name, data)
    return tuple(FileRecord(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in sorted(files.items()))


def write_manifest(staged: Staging, manifest: bytes, signature: bytes) -> None:
    """Manifest and signature into the package, and the manifest into the backend that belongs to it."""
    write_file(staged.package / MANIFEST_NAME, manifest)
    write_file(staged.package / SIGNATURE_NAME, signature)
    write_file(staged.backend / MANIFEST_NAME, manifest)


def write_file(path: Path, data: bytes) -> None:
    """Write and flush to the disk; the folder's own entry is flushed when it is published."""
    with naming(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file of contiguous copies, flushed to the disk."""
    try:
        save_file({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}, path)
    except SafetensorError as error:  # in place of the OSError that it was
        raise OSError(errno.EIO, str(error), str(path)) from error
    _flush(path)


def tensor_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file of contiguous copies, in memory; two names may mean the same storage."""
    return save({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()})


def write_arrays(path: Path, arrays: Mapping[str, NDArray[np.float32]]) -> None:
    """A safetensors file of numpy arrays, flushed to the disk."""
    write_file(path, array_bytes({name: np.ascontiguousarray(value) for name, value in arrays.items()}))


def write_document(path: Path, document: Mapping[str, object]) -> None:
    """JSON for people and programs; NaN is refused."""
    write_file(path, (json.dumps(document, indent=2, allow_nan=False) + "\n").encode())


def replace_document(path: Path, document: Mapping[str, object]) -> None:
    """The same in place of an earlier one, whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_document(draft, document)
        os.replace(draft, path)
        _flush(path.parent)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ExportError(f"{path} cannot be written: {error.strerror}", "make room, or choose another -o") from error


def write_table(path: Path, table: Mapping[str, object]) -> None:
    """A flat TOML table of strings, numbers and lists of strings."""
    # TOML knows JSON's strings, but neither surrogate pairs nor a bare DEL.
    lines = [
        f"{key} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f") for key, value in table.items()
    ]
    write_file(path, ("\n".join(lines) + "\n").encode())


def publish(staged: Staging, output: Path) -> None:
    """Put backend and package in place of earlier ones. The package, which devices see, comes last.

    A failure puts the earlier ones back.

    Raises ExportError when the folders cannot be moved.
    """
    pairs = ((staged.backend, backend_path(output)), (staged.package, output))
    moved: list[tuple[Path, Path]] = []
    try:
        for staged_folder, target in pairs:
            _flush(staged_folder)
            if target.exists():
                aside = staged.scratch / target.name
                target.rename(aside)
                moved.append((aside, target))
            staged_folder.rename(target)
            moved.append((target, staged_folder))
        _flush(output.parent)
    except OSError as error:
        for now, before in reversed(moved):
            now.rename(before)
        raise ExportError(
            f"{output} could not be put in place: {error.strerror}", "check the folder's permissions, then export again"
        ) from error


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
