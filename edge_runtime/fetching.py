"""A package on its way from the server: its files as far as they have come, and what is still wanted; no sockets.

    STATE/fetched/<digest>/   as a package folder; it goes on where it was stopped, at the byte

The manifest comes first. Before anything of it is believed, or anything else fetched, its digest must be the offer's
and its signature the publisher's; then the files that it lists, each checked by its digest. Trying it is left to
`update`.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from contract.errors import DeviceError, PackageError, RemoteProtocolError, SignatureError
from contract.manifest import LIMITS, MANIFEST_NAME, SIGNATURE_NAME, FileRecord, Manifest, from_bytes
from contract.messages import Fetch, Piece
from contract.signature import PublicKey, verify
from edge_runtime.install import LIMITS_OF_INSTALL, check_file

PART = ".part"
CURE = "let the operator of the server offer it again"


class Fetched:
    """One package's files here."""

    def __init__(
        self, folder: Path, package: str, trusted: Mapping[str, PublicKey], admit: Callable[[Manifest], None]
    ) -> None:
        """`admit` refuses a manifest whose files are not worth fetching. Other packages' files make way.

        Raises: DeviceError when the disk refuses.
        """
        self.folder = folder / package
        self.package = package
        self._trusted, self._admit = trusted, admit
        self._files: dict[str, FileRecord | None] = {MANIFEST_NAME: None, SIGNATURE_NAME: None}  # None: size unknown
        self._manifest: Manifest | None = None
        with _disk(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for other in folder.iterdir():
                if other != self.folder:
                    shutil.rmtree(other, ignore_errors=True)

    def next(self) -> Fetch | None:
        """What to ask for; None once everything is here.

        Raises: SignatureError, ManifestError, and what `admit` raises, where the package is not let in; DeviceError
        when the disk refuses; RemoteProtocolError when what came is not what was listed.
        """
        for name in (MANIFEST_NAME, SIGNATURE_NAME):
            if not (self.folder / name).exists():
                return Fetch(self.package, name, self._size(name))
        if self._manifest is None:
            self._manifest = self._read()
        with _disk(self.folder):
            for record in self._manifest.files:
                if (self.folder / record.name).exists():
                    continue
                size_bytes = self._size(record.name)
                if size_bytes < record.size_bytes:
                    return Fetch(self.package, record.name, size_bytes)
                self._finish(record)
        return None

    def put(self, piece: Piece, asked: Fetch) -> None:
        """Keep the bytes that came. Not synced: what a power cut loses is fetched again, and digests tell.

        Raises: RemoteProtocolError when they are others than were asked for; DeviceError when the disk refuses.
        """
        name = piece.file
        if (piece.package, name, piece.offset) != (asked.package, asked.file, asked.offset):
            raise RemoteProtocolError(f"expected {asked.file} from byte {asked.offset}, found others", CURE)
        most = {MANIFEST_NAME: LIMITS.size_bytes, SIGNATURE_NAME: LIMITS_OF_INSTALL.signature_bytes}.get(name)
        if self._manifest is not None:
            most = next(record.size_bytes for record in self._manifest.files if record.name == name)
        if most is not None and piece.size_bytes > most:
            raise RemoteProtocolError(f"{name}: expected at most {most} bytes, found {piece.size_bytes}", CURE)
        with _disk(self.folder):
            with (self.folder / (name + PART)).open("ab") as stream:
                stream.write(piece.data.data)
            if self._manifest is None and piece.offset + len(piece.data) == piece.size_bytes:
                (self.folder / (name + PART)).replace(self.folder / name)

    def drop(self) -> None:
        """Delete what is here."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _size(self, name: str) -> int:
        part = self.folder / (name + PART)
        return part.stat().st_size if part.exists() else 0

    def _read(self) -> Manifest:
        signed = (self.folder / MANIFEST_NAME).read_bytes()
        if hashlib.sha256(signed).hexdigest() != self.package:
            self.drop()
            raise RemoteProtocolError(f"the manifest that came is not that of package {self.package[:12]}", CURE)
        try:
            verify(signed, (self.folder / SIGNATURE_NAME).read_bytes(), self._trusted)
        except SignatureError:
            self.drop()
            raise
        manifest = from_bytes(signed)
        self._admit(manifest)
        return manifest

    def _finish(self, record: FileRecord) -> None:
        part = self.folder / (record.name + PART)
        part.touch()  # a file of 0 bytes is never asked for
        try:
            check_file(part, record, None)
        except PackageError as error:
            part.unlink()  # it is fetched anew
            raise RemoteProtocolError(f"on its way something happened to it: {error.cause}", CURE) from error
        part.replace(self.folder / record.name)


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """Turns the disk's errors into this device's."""
    try:
        yield
    except OSError as error:
        raise DeviceError(
            f"the package cannot be kept in {folder}: {error.strerror}", "make room on the disk"
        ) from error
