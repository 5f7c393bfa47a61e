"""Keeps the update that a server offers, beside the roster, and reads the package's files for who fetches it.

    ROSTER/.update/offer.json      what `server-run update` wrote: a running server looks at it as at the roster
                   progress.json   what the server knows of it: who was offered it, who said what

Whose turn it is, is `rollout`'s part. The package stays where it is, as it may be large, and is checked by its digests
when it is taken up.
"""

from __future__ import annotations

import hashlib
import json
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from contract.errors import PackageError, RefusedError, RollbackError, why
from contract.manifest import LIMITS, MANIFEST_NAME, SIGNATURE_NAME, Manifest, digest, from_bytes
from contract.messages import PIECE_BYTES, Fetch, Piece

from .files import remove, write_atomic
from .rollout import OK, Offered, Rollout

FOLDER, OFFER, PROGRESS = ".update", "offer.json", "progress.json"
CURE = "give the package folder as export-frontend wrote it"


@dataclass(frozen=True)
class Box:
    """Where the offer of a roster lies."""

    root: Path  # the roster

    def version(self) -> int:
        """A value that changes when an offer came, went or was replaced."""
        try:
            return (self.root / FOLDER / OFFER).stat().st_mtime_ns
        except OSError:
            return 0

    def put(self, offered: Offered) -> None:
        """Offer a package; one that was offered before makes way.

        Raises: RollbackError when devices have a newer one from here, or this version with other content.
        """
        known = self.read()
        if known is not None and known.offered.name == offered.name and OK in {w for w, _ in known.verdicts.values()}:
            before = known.offered
            if before.version > offered.version or (
                before.version == offered.version and before.package != offered.package
            ):
                raise RollbackError(
                    f"package {offered.name} version {offered.version} is not newer than version {before.version} "
                    f"({before.package[:12]}), which devices have from here",
                    "export the frontend again with a higher version: devices refuse an older one",
                )
        write_atomic(self.root / FOLDER / OFFER, json.dumps(asdict(offered), indent=1).encode() + b"\n")

    def withdraw(self) -> bool:
        """Offer nothing any more; False where nothing was offered. What was said of it stays."""
        path = self.root / FOLDER / OFFER
        was = path.exists()
        remove(path)
        return was

    def read(self) -> Rollout | None:
        """What is offered, and how far it is; None where nothing is.

        Raises: PackageError where the files are not as they were written.
        """
        try:
            told = json.loads((self.root / FOLDER / OFFER).read_bytes())
            offered = Offered(**{**told, "devices": tuple(told["devices"])})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise PackageError(
                f"the offer {self.root / FOLDER / OFFER} cannot be read: {why(error)}", "give server-run update again"
            ) from error
        try:
            told = json.loads((self.root / FOLDER / PROGRESS).read_bytes())
            verdicts = {name: (str(word), str(reason)) for name, (word, reason) in told["verdicts"].items()}
            known = Rollout(offered, list(told["canaries"]), list(told["others"]), verdicts)
            if told["package"] != offered.package:
                return Rollout(offered)
            return known if told["issue"] == offered.issue else known.again()
        except (OSError, ValueError, TypeError, KeyError):
            return Rollout(offered)  # nobody was offered it so far, or what was known of it is lost: all are asked

    def keep(self, rollout: Rollout) -> None:
        """So that a server that is started again goes on where it was. Raises: OSError."""
        told = {
            "package": rollout.offered.package, "issue": rollout.offered.issue, "canaries": rollout.canaries,
            "others": rollout.others, "verdicts": rollout.verdicts,
        }  # fmt: skip
        write_atomic(self.root / FOLDER / PROGRESS, json.dumps(told, indent=1).encode() + b"\n")


def package_folder(given: Path) -> Path:
    """The folder that `--package` names, itself or by a file in it. Raises: PackageError where there is neither."""
    try:
        mode = given.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a name that no system takes
        raise PackageError(f"there is no package {given}: {why(error)}", CURE) from error
    return given if stat.S_ISDIR(mode) else given.parent


def read_package(folder: Path) -> tuple[Manifest, bytes]:
    """A package that may be offered: whole, byte by byte. Its signature is the devices' to check, by their own key.

    Raises: PackageError; ManifestError.
    """
    try:
        data = (folder / MANIFEST_NAME).read_bytes()[: LIMITS.size_bytes + 1]
        (folder / SIGNATURE_NAME).read_bytes()
        manifest = from_bytes(data)
        for record in manifest.files:
            if _sha256(folder / record.name) != record.sha256:
                raise PackageError(f"{folder / record.name} is not as the manifest lists it", CURE)
    except OSError as error:
        raise PackageError(f"{folder} is no whole package: {error.strerror} ({error.filename})", CURE) from error
    return manifest, digest(data)


class Stock:
    """The files of the package that is offered, as devices fetch them."""

    def __init__(self, offered: Offered) -> None:
        """Raises: PackageError where the package is no longer what was offered."""
        manifest, found = read_package(Path(offered.folder))
        if found.hex() != offered.package:
            raise PackageError(
                f"{offered.folder} is another package ({found.hex()[:12]}) than was offered ({offered.package[:12]})",
                "give server-run update again",
            )
        self._offered = offered
        folder = Path(offered.folder)
        self._digests = {record.name: record.sha256 for record in manifest.files}
        try:
            self._digests |= {name: _sha256(folder / name) for name in (MANIFEST_NAME, SIGNATURE_NAME)}
        except OSError as error:  # it went this moment: a server must not end by it
            raise PackageError(f"{folder} is no whole package: {why(error)}", CURE) from error
        self._as_read = {name: _stamp(folder / name) for name in self._digests}

    def piece(self, fetch: Fetch) -> Piece:
        """The bytes that a device asks for.

        Raises: RefusedError where they are not of this package; PackageError where the folder has changed since it was
        read: every device would fetch it in vain, again and again.
        """
        path = Path(self._offered.folder) / fetch.file
        try:
            if fetch.package != self._offered.package or fetch.file not in self._as_read:
                raise _gone(f"{fetch.file} is no file of the package that is offered now")
            if not self._is_as_offered(path, fetch.file):
                raise PackageError(
                    f"{path} has changed since it was offered",
                    "put the package back as export-frontend wrote it, and give server-run update again",
                )
            with path.open("rb") as stream:
                size_bytes = path.stat().st_size
                stream.seek(fetch.offset)
                data = stream.read(PIECE_BYTES)
        except OSError as error:
            raise _gone(f"{fetch.file} cannot be read here: {error.strerror}") from error
        if not data:
            raise _gone(f"{fetch.file} ends before byte {fetch.offset}")
        return Piece(fetch.package, fetch.file, fetch.offset, size_bytes, np.frombuffer(data, np.uint8))

    def _is_as_offered(self, path: Path, name: str) -> bool:
        """By its stamp where that is as it was; else by its bytes: one that was touched or copied anew has the same.

        Raises: OSError.
        """
        stamp = _stamp(path)  # before its bytes: what is written meanwhile changes it again
        if stamp == self._as_read[name]:
            return True
        if stamp is None or _sha256(path) != self._digests[name]:
            return False
        self._as_read[name] = stamp  # each piece of a large file would read all of it else
        return True


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file is written or replaced; None where it is gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _gone(why: str) -> RefusedError:
    return RefusedError(f"package: {why}", "nothing is to be done: the device asks again later", "offer", 60.0)


def offered_of(folder: Path, devices: tuple[str, ...], canary: int, issue: str) -> Offered:
    """What `server-run update` offers. Raises: PackageError, ManifestError."""
    folder = package_folder(folder)
    manifest, found = read_package(folder)
    size_bytes = sum(record.size_bytes for record in manifest.files)
    return Offered(
        found.hex(), manifest.name, manifest.version, size_bytes, str(folder.resolve()), devices, canary, issue
    )
