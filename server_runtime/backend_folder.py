"""The backend folder that export-frontend wrote beside the package: what it holds, checked before anything starts.

It never leaves the server. Making a torch module of it is left to `backend`; torch is not imported here.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract import canonical, manifest
from contract.canonical import CanonicalError
from contract.errors import ConfigError, PackageError
from contract.manifest import Cut, Manifest

FILES = ("manifest.json", "export.json", "few_shot.json", "statistics.safetensors", "backend.safetensors")
_JSON_BYTES = 16 << 20
_CURE = "give the whole folder NAME.backend that export-frontend wrote, or export again"
DEFAULT_BACKEND_LR, DEFAULT_HEAD_LR = 1e-5, 1e-3  # algorithms.md 1.2 J


@dataclass(frozen=True)
class BackendFolder:
    """A whole backend folder."""

    root: Path
    manifest: Manifest
    package_digest: str  # hex; the package it belongs to
    cut: Cut
    model: str
    model_args: dict[str, Any]
    backend_lr: float
    head_lr: float

    def sha256(self) -> str:
        """Digest of all that training starts from; reads the weights once."""
        digest = hashlib.sha256()
        for name in FILES:
            with open(self.root / name, "rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()


def read(root: Path) -> BackendFolder:
    """Read and check a backend folder.

    Raises:
        ConfigError: it is not there, or is no backend folder.
        PackageError: a file is missing, unreadable, or belongs to another package.
    """
    if not root.is_dir():
        raise ConfigError(f"the backend folder {root} does not exist", _CURE)
    missing = [name for name in FILES if not (root / name).is_file()]
    if missing:
        raise PackageError(f"the backend folder {root} lacks {', '.join(missing)}", _CURE)
    manifest_bytes = (root / "manifest.json").read_bytes()
    package = manifest.from_bytes(manifest_bytes)
    package_digest = manifest.digest(manifest_bytes).hex()
    export = _json(root / "export.json")
    belongs_to = export.get("package_digest", package_digest)
    if belongs_to != package_digest:
        raise PackageError(
            f"{root}: export.json belongs to package {belongs_to}, manifest.json is that of {package_digest}", _CURE
        )
    plan = export.get("plan", export)
    few_shot = _json(root / "few_shot.json")
    try:
        return BackendFolder(
            root=root,
            manifest=package,
            package_digest=package_digest,
            cut=package.cuts[0],
            model=str(plan["model"]),
            model_args={str(name): _frozen(value) for name, value in dict(plan["model_args"]).items()},
            backend_lr=float(few_shot.get("backend_lr", DEFAULT_BACKEND_LR)),
            head_lr=float(few_shot.get("head_lr", DEFAULT_HEAD_LR)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PackageError(f"{root}: export.json or few_shot.json is not as expected: {error!r}", _CURE) from error


def _json(path: Path) -> dict[str, Any]:
    try:
        value = canonical.from_json(path.read_bytes(), _JSON_BYTES)
    except CanonicalError as error:
        raise PackageError(f"{path} cannot be read: {error}", _CURE) from error
    if not isinstance(value, dict):
        raise PackageError(f"{path} cannot be read: expected an object", _CURE)
    return value


def _frozen(value: object) -> object:
    """JSON has no tuples, timm's arguments have."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
