"""What each image has released so far: one line per (image, package, cut, kind, scale), appended before it is sent.

A second scale of the same noise draw would give the signal by subtraction, so every further one counts as another
release and is capped by the device's own config. It counts and refuses; the noise is drawn by `transforms.laplace`.
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from contract.errors import DataError, DeviceError


@dataclass(frozen=True)
class Release:
    """What a draw of noise is keyed by, but for the image; the same release twice discloses nothing new."""

    package_digest: str
    cut: int
    kind: str  # e.g. "laplace alpha=0.1"; a fresh draw adds the upload it belongs to
    scale: float

    def text(self) -> str:
        return f"{self.package_digest}\t{self.cut}\t{self.kind}\t{self.scale!r}"


def pack_line(sample_id: bytes, release_text: str) -> bytes:
    """`crc32<TAB>wire id<TAB>package<TAB>cut<TAB>kind<TAB>scale<LF>`; the CRC covers what follows it."""
    body = f"{sample_id.hex()}\t{release_text}".encode()
    return b"%08x\t%s\n" % (zlib.crc32(body), body)


def parse_line(line: bytes) -> tuple[bytes, str] | None:
    """(wire id, release text), or None for a line that is not whole."""
    crc, _, body = line.partition(b"\t")
    if crc != b"%08x" % zlib.crc32(body):
        return None
    sample_id, _, release_text = body.decode().partition("\t")
    return bytes.fromhex(sample_id), release_text


class ReleaseLedger:
    """The releases of every image that this device ever uploaded."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        """Read the ledger; a torn last line is cut off, spoiled lines before it are skipped, and both are said."""
        self._path = path
        self._released: dict[bytes, set[str]] = defaultdict(set)
        if path.exists():
            self._recover(path.read_bytes(), say)

    def _recover(self, data: bytes, say: Callable[[str], None]) -> None:
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            say(f"release ledger: a torn last line of {len(data) - whole} bytes is cut off")
            os.truncate(self._path, whole)
        spoiled = 0
        for line in data[:whole].splitlines():
            entry = parse_line(line)
            if entry is None:
                spoiled += 1
            else:
                self._released[entry[0]].add(entry[1])
        if spoiled:
            say(f"release ledger: {spoiled} unreadable lines are skipped; what they counted may go out once more")

    def releases(self, sample_id: bytes) -> int:
        """How many different releases of this image are on record."""
        return len(self._released.get(sample_id, ()))

    def check(self, sample_ids: Iterable[bytes], release: Release, max_releases: int) -> None:
        """May all these images be released so?

        Raises: DataError with the counts when some would go over the cap; nothing is recorded.
        """
        text, asked, refused, earlier = release.text(), 0, 0, set[str]()
        for sample_id in sample_ids:
            asked += 1
            known = self._released.get(sample_id, set())
            if text not in known and len(known) >= max_releases:
                refused += 1
                earlier |= known
        if refused:
            shown = ", ".join(sorted(describe(known) for known in earlier)[:3])
            raise DataError(
                f"{refused} of {asked} images would be released {max_releases + 1} times, "
                f"max_releases is {max_releases}: they went out with {shown}; asked now: {describe(text)}",
                "let the server use the earlier scale and package, or raise --max-releases knowing that two releases "
                "of an image together disclose more than either",
            )

    def record(self, sample_ids: Sequence[bytes], release: Release) -> None:
        """Put these releases on the disk (one fsync) before anything of them is sent; known ones cost nothing.

        Raises: DeviceError when the disk refuses.
        """
        text = release.text()
        fresh = [sample_id for sample_id in sample_ids if text not in self._released.get(sample_id, ())]
        if not fresh:
            return
        try:
            with self._path.open("ab") as stream:
                os.chmod(self._path, 0o600)
                stream.write(b"".join(pack_line(sample_id, text) for sample_id in fresh))
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise DeviceError(
                f"{self._path} cannot be written: {error.strerror}", "make room on the disk and start again"
            ) from error
        for sample_id in fresh:
            self._released[sample_id].add(text)


def describe(release_text: str) -> str:
    """A release in words for an operator."""
    package_digest, cut, kind, scale = release_text.split("\t")
    return f"{kind} kappa={scale} cut {cut} of package {package_digest[:12]}"
