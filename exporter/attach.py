"""Put a document about a package into it: a higher version, signed anew, everything else as it was.

Only the key that signed the package may do so, and only on files that are those its manifest lists: a new signature
must not cover what somebody changed. Moving the folders into place is exporter.package's.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from contract.errors import ExportError, PackageError, UsageError
from contract.leakage import LEAKAGE_NAME, PACKAGED_BYTES_MAX, Table, of_package
from contract.manifest import LIMITS, MANIFEST_NAME, SIGNATURE_NAME, FileRecord, Manifest, digest, from_bytes, to_bytes
from contract.signature import PrivateKey, key_id, sign, verify
from exporter.package import Staging, backend_path, publish, staging, write_document, write_file, write_manifest

_CURE = "give the folder that export-frontend wrote, as it wrote it"


@dataclass(frozen=True)
class Signed:
    """A package whose signature and files were checked."""

    root: Path
    manifest: Manifest


@dataclass(frozen=True)
class Attached:
    """What was published."""

    output: str
    name: str
    version: int
    package_digest: str
    added: str


def read_signed(root: Path, signer: PrivateKey) -> Signed:
    """Open a package that this key signed. Raises: PackageError; UsageError for no package, or another key."""
    if not (root / MANIFEST_NAME).is_file():
        raise UsageError(f"{root} is no package: it has no {MANIFEST_NAME}", _CURE)
    data, signature = _read(root / MANIFEST_NAME, LIMITS.size_bytes), _read(root / SIGNATURE_NAME, 4096)
    manifest, own = from_bytes(data), key_id(signer.public_key())
    if manifest.signer != own:
        raise UsageError(
            f"{root} was signed by key {manifest.signer}, and the key that would sign it anew is {own}",
            "give the key that signed it: --signing-key",
        )
    verify(data, signature, {own: signer.public_key()})
    for record in manifest.files:
        if hashlib.sha256(_read(root / record.name, record.size_bytes)).hexdigest() != record.sha256:
            raise PackageError(f"{root / record.name} is not the file that the manifest lists", _CURE)
    return Signed(root, manifest)


def add_table(table: Path, root: Path, signer: PrivateKey, now: Callable[[], datetime]) -> Attached:
    """Put a table of leakage-profile into the package that it is of, in place of an earlier one; the package's version
    goes up by one. Its backend, beside it, is told of the new digest.

    Raises: PackageError for a table of another package, and a package that is damaged; UsageError; ExportError.
    """
    package = read_signed(root, signer)
    backend = backend_path(root)
    if not (backend / "export.json").is_file():
        raise UsageError(
            f"{backend} is missing: a server with it would refuse devices that have the package signed anew",
            "run this where export-frontend wrote both folders",
        )
    data = _read_table(table)
    _check_strength(of_package(data, package.manifest), package.manifest)
    files = [each for each in package.manifest.files if each.name != LEAKAGE_NAME]
    files.append(FileRecord(LEAKAGE_NAME, len(data), hashlib.sha256(data).hexdigest()))
    manifest = replace(
        package.manifest, version=package.manifest.version + 1, created=now().isoformat(timespec="seconds"),
        files=tuple(sorted(files, key=lambda each: each.name)),
    )  # fmt: skip
    signed = to_bytes(manifest)
    with staging(root) as staged:
        _copy(root, [each.name for each in files if each.name != LEAKAGE_NAME], staged.package)
        _copy(backend, [each.name for each in backend.iterdir() if each.name not in _WRITTEN], staged.backend)
        write_file(staged.package / LEAKAGE_NAME, data)
        write_file(staged.backend / LEAKAGE_NAME, data)  # a server assigns noise by it
        write_manifest(staged, signed, sign(signer, signed))
        _tell_backend(backend, staged, manifest.version, digest(signed).hex())
        publish(staged, root)
    return Attached(str(root), manifest.name, manifest.version, digest(signed).hex(), LEAKAGE_NAME)


_WRITTEN = (MANIFEST_NAME, "export.json", LEAKAGE_NAME)  # of the backend, anew


def _tell_backend(backend: Path, staged: Staging, version: int, package_digest: str) -> None:
    path = backend / "export.json"
    try:
        document = json.loads(_read(path, LIMITS.size_bytes))
        document["package_digest"] = package_digest
        document["plan"]["version"] = version
    except (ValueError, KeyError, TypeError) as error:
        raise ExportError(f"{path} is not as export-frontend wrote it: {error!r}", _CURE) from error
    write_document(staged.backend / path.name, document)


def _read_table(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(PACKAGED_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError(f"the table {path} cannot be read: {error.strerror}", "correct the path") from error
    if len(data) > PACKAGED_BYTES_MAX:
        raise PackageError(
            f"a table in a package may have {PACKAGED_BYTES_MAX} bytes, {path} has more",
            "measure fewer strengths (leakage-profile --noise) or attacks",
        )
    return data


def _check_strength(table: Table, manifest: Manifest) -> None:
    """Raises: PackageError where the table says nothing of the noise that devices use unless told otherwise."""
    kappa = manifest.transforms.kappa
    if manifest.cuts and kappa not in table.settings.strengths:
        measured = ",".join(f"{each:g}" for each in table.settings.strengths)
        raise PackageError(
            f"the leakage table has no row at kappa {kappa:g}, the noise of package {manifest.name}; it has {measured}",
            f"measure again with leakage-profile --noise {measured},{kappa:g}",
        )


def _copy(source: Path, names: list[str], target: Path) -> None:
    """The same files under another name of their folder; copied where the disk knows no second name for one file."""
    for name in names:
        try:
            os.link(source / name, target / name)
        except OSError:
            shutil.copyfile(source / name, target / name)


def _read(path: Path, limit_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limit_bytes + 1)
    except OSError as error:
        raise PackageError(f"{path} cannot be read: {error.strerror}", _CURE) from error
    if len(data) > limit_bytes:
        raise PackageError(f"{path} should have at most {limit_bytes} bytes, found more", _CURE)
    return data
