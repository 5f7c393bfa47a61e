"""The leakage table: its document as leakage-profile writes it and as a package carries it, and which package it is of.

A server measures it, a publisher signs it into the package, a device may choose by it. How it is measured, and how it
looks to a person, is left to `server_runtime.leakage`.

A table is of what a package sends, not of one signature: adding a file that tells of the package (the table itself),
signing anew and choosing another default strength change the package digest and leave `subject_digest` as it is.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from contract.canonical import CanonicalError, decode_document, encode, to_json
from contract.errors import PackageError
from contract.leakage_check import faults
from contract.manifest import Manifest
from contract.training import TRAINING_NAME

KIND = "leakage-profile"
LEAKAGE_NAME = "leakage.json"
TABLE_BYTES_MAX = 64 << 20
PACKAGED_BYTES_MAX = 4 << 20  # of a table inside a package: a small device reads it whole


@dataclass(frozen=True)
class Figures:
    """How like the pictures are, as means over images; LPIPS is None where its weights are not there."""

    psnr_db: float
    ssim: float
    fsim: float
    lpips: float | None


@dataclass(frozen=True)
class Settings:
    """What a table depends on; rows of other settings are never mixed in. `package_digest` is the subject's."""

    package_digest: str
    public_digest: str  # of the names and sizes of the public files
    attacks: tuple[str, ...]
    strengths: tuple[float, ...]
    alpha: float
    images: int
    learn_images: int
    steps: int | None
    seed: int


@dataclass(frozen=True)
class Attacked:
    """What one attack read. `right`: of how many of its pictures the classifier told the class, None without one."""

    attack: str
    figures: Figures
    right: int | None
    time_s: float


@dataclass(frozen=True)
class Row:
    """One split at one strength of noise. `protected` False: sent in full, without noise on weights or tokens."""

    split: int
    strength: float
    protected: bool
    images: int
    learnt_from: int
    attacks: tuple[Attacked, ...]


@dataclass(frozen=True)
class Baselines:
    """The same figures for guesses that see nothing of the picture: the public mean colour, and another picture."""

    mean_colour: Figures
    unrelated: Figures
    chance_right: float | None  # 1 / classes


@dataclass(frozen=True)
class Point:
    """The strongest attack's figures on the fine grid, levelled and interpolated."""

    split: int
    strength: float
    psnr_db: float
    ssim: float
    fsim: float


@dataclass(frozen=True)
class Threshold:
    """T_FSIM with its reason, and the accuracy of the classifier that found it on the pictures themselves."""

    fsim: float | None
    reason: str
    classes: int | None
    classifier_accuracy: float | None


@dataclass(frozen=True)
class Enough:
    """T_sigma: the least noise of a split whose FSIM is at most T_FSIM; None where none is, or T_FSIM is unknown."""

    split: int
    strength: float | None


@dataclass(frozen=True)
class Table:
    """The whole document; `attacks_s` is the time of all attacks, over all runs that it took."""

    package: str
    model: str
    unit: Literal["kappa", "sigma"]
    settings: Settings
    lpips_unknown: str  # why LPIPS is null; empty where it is not
    baselines: Baselines
    threshold: Threshold
    rows: tuple[Row, ...]
    curve: tuple[Point, ...]
    least_noise: tuple[Enough, ...]
    attacks_s: float


def to_document(table: Table) -> dict[str, object]:
    """The JSON document."""
    return {"schema_version": 1, "kind": KIND, **encode(table)}


def to_bytes(table: Table) -> bytes:
    """The document as a file."""
    return to_json(to_document(table)) + b"\n"


def from_bytes(data: bytes, max_bytes: int = TABLE_BYTES_MAX) -> Table:
    """A table that leakage-profile wrote. Raises: CanonicalError."""
    return decode_document(Table, data, max_bytes, KIND)


def strongest(row: Row) -> Figures:
    """For each figure the attack that reads most."""
    figures = [each.figures for each in row.attacks]
    return Figures(
        max(each.psnr_db for each in figures),
        max(each.ssim for each in figures),
        max(each.fsim for each in figures),
        min((each.lpips for each in figures if each.lpips is not None), default=None),
    )


def subject_digest(manifest: Manifest) -> bytes:
    """SHA-256 (32 bytes) of what a package sends: its cuts, the files that they run (with parts, every file), how its
    images are made, and the noise that is allowed; not the default strength, as each release names its own."""
    value, runs = encode(manifest), {cut.onnx for cut in manifest.cuts}
    if any(each.name == TRAINING_NAME for each in manifest.files):
        runs = {each.name for each in manifest.files} - {LEAKAGE_NAME}
    files = {each.name: each.sha256 for each in manifest.files if each.name in runs}
    rules = manifest.transforms
    noise = [rules.alpha, rules.kappa_max, rules.weight_noise]
    sent = {name: value[name] for name in ("model", "family", "cuts", "image")}
    return hashlib.sha256(to_json({**sent, "noise": noise, "files": files})).digest()


def of_package(data: bytes, manifest: Manifest) -> Table:
    """The table from its bytes, if it is one of this package.

    Raises: PackageError.
    """
    try:
        table = from_bytes(data, PACKAGED_BYTES_MAX)
    except CanonicalError as error:
        raise PackageError(
            f"{LEAKAGE_NAME} is no table of leakage-profile: {error}", "measure the package again, and add that table"
        ) from error
    fault = next(faults(table), None)
    if fault is not None:
        raise PackageError(f"the leakage table is not sound: {fault}", "measure the package again, and add that table")
    wanted = subject_digest(manifest).hex()
    if table.settings.package_digest != wanted:
        raise PackageError(
            f"the leakage table is of a package {table.package} with content {table.settings.package_digest[:16]}, "
            f"this is {manifest.name} with content {wanted[:16]}",
            "measure this very package with leakage-profile, and add that table",
        )
    return table
