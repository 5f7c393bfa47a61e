"""The backend folder that export-frontend wrote beside the package: what it holds, checked before anything starts.

There are two kinds: a backend behind a frozen frontend, and, with a `training.json`, the whole model of a package whose
parts devices train. Neither leaves the server. Making a torch module of them is left to `backend` and `split_model`;
torch is not imported here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from contract import canonical, manifest, training
from contract.canonical import CanonicalError
from contract.errors import ConfigError, PackageError, why
from contract.leakage import LEAKAGE_NAME, Table, of_package
from contract.manifest import Cut, Manifest
from contract.tokens import TokenLayout, sent_layout
from contract.training import TRAINING_NAME, TrainingPlan

FILES = ("manifest.json", "export.json", "few_shot.json", "statistics.safetensors", "backend.safetensors")
TRAINING_FILES = ("manifest.json", "export.json", TRAINING_NAME, "model.safetensors")
_JSON_BYTES = 16 << 20
_CURE = "give the whole folder NAME.backend that export-frontend wrote, or export again"
DEFAULT_BACKEND_LR, DEFAULT_HEAD_LR = 1e-5, 1e-3  # algorithms.md 1.2 J


@dataclass(frozen=True)
class BackendFolder:
    """A whole folder of a backend behind a frozen frontend."""

    training: ClassVar[None] = None

    root: Path
    manifest: Manifest
    package_digest: str  # hex; the package it belongs to
    cut: Cut
    model: str
    model_args: dict[str, Any]
    backend_lr: float
    head_lr: float

    @property
    def layout(self) -> TokenLayout:
        """The tokens of one image that devices send."""
        return sent_layout(self.cut.tokens, self.cut.sent.kept)

    def sha256(self) -> str:
        """Digest of all that training starts from; reads the weights once."""
        return _digest(self.root, FILES)


@dataclass(frozen=True)
class TrainingFolder:
    """A whole folder of a model whose parts devices train."""

    layout: ClassVar[None] = None  # its packages send no tokens

    root: Path
    manifest: Manifest
    package_digest: str  # hex; the package it belongs to
    training: TrainingPlan
    model: str
    model_args: dict[str, Any]
    peft: str = "all"  # what of the whole model is trained
    leakage: Table | None = None  # of the package's parts

    def sha256(self) -> str:
        """Digest of all that training starts from; reads the weights once."""
        return _digest(self.root, TRAINING_FILES if self.leakage is None else (*TRAINING_FILES, LEAKAGE_NAME))


def read(root: Path) -> BackendFolder | TrainingFolder:
    """Read and check a backend folder.

    Raises:
        ConfigError: it is not there, or is no backend folder.
        PackageError: a file is missing, unreadable, or belongs to another package.
    """
    if not root.is_dir():
        raise ConfigError(f"the backend folder {root} does not exist", _CURE)
    trains = (root / TRAINING_NAME).is_file()
    missing = [name for name in (TRAINING_FILES if trains else FILES) if not (root / name).is_file()]
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
    try:
        plan = export.get("plan", export)
        model = str(plan["model"])
        model_args = {str(name): _frozen(value) for name, value in dict(plan["model_args"]).items()}
        if trains:
            peft = str(dict(plan.get("training") or {}).get("peft", "all"))
            parts, leakage = _training(root, package), _leakage(root, package)
            return TrainingFolder(root, package, package_digest, parts, model, model_args, peft, leakage)
        return _frontend(root, package, package_digest, model, model_args)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise PackageError(f"{root}: export.json or few_shot.json is not as expected: {error!r}", _CURE) from error


def _frontend(root: Path, package: Manifest, digest: str, model: str, model_args: dict[str, Any]) -> BackendFolder:
    few_shot = _json(root / "few_shot.json")
    backend_lr = float(few_shot.get("backend_lr", DEFAULT_BACKEND_LR))
    head_lr = float(few_shot.get("head_lr", DEFAULT_HEAD_LR))
    return BackendFolder(root, package, digest, package.cuts[0], model, model_args, backend_lr, head_lr)


def _training(root: Path, package: Manifest) -> TrainingPlan:
    data = (root / TRAINING_NAME).read_bytes()
    listed = {file.name: file.sha256 for file in package.files}
    if listed.get(TRAINING_NAME) != hashlib.sha256(data).hexdigest():
        raise PackageError(f"{root}: {TRAINING_NAME} is not the one that manifest.json lists", _CURE)
    return training.from_bytes(data, package)


def _leakage(root: Path, package: Manifest) -> Table | None:
    path = root / LEAKAGE_NAME
    return of_package(path.read_bytes(), package) if path.is_file() else None


def _digest(root: Path, names: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        with open(root / name, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _json(path: Path) -> dict[str, Any]:
    try:
        value = canonical.from_json(path.read_bytes(), _JSON_BYTES)
    except CanonicalError as error:
        raise PackageError(f"{path} cannot be read: {why(error, path)}", _CURE) from error
    if not isinstance(value, dict):
        raise PackageError(f"{path} cannot be read: expected an object", _CURE)
    return value


def _frozen(value: object) -> object:
    """JSON has no tuples, timm's arguments have."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
