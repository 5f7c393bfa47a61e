"""What was ever released of each image: an append-only file of CRC lines, on the disk before anything of it is sent.

A second scale of the same noise draw would give the signal by subtraction, so every further one counts as another
release and is capped by the device's own config, as is the share of an image's patches that all of them show. It counts
and refuses; the noise is drawn by `transforms.laplace`, what is told of the counts is `releases`' part.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from contract.errors import DataError, DeviceError
from edge_runtime.released_patches import UNKNOWN, share_shown

# Kinds of releases of a part that the device trains. Each epoch shows the image anew, by other weights, and
# max_releases, which counts draws before one frontend, does not cap them. Of a strength of noise there is one line for
# an image, and another for each batch of each draw. The scale is a standard deviation.
WITHOUT_NOISE = "activations without noise"
UNDER_NOISE = "activations under laplace noise, draws counted"
UNCOUNTED = "activations under laplace noise"  # of an earlier version, which kept no count of its draws
OF_PARTS = (WITHOUT_NOISE, UNDER_NOISE, UNCOUNTED)
_DRAW = "draw"
WIRE_ID_BYTES = 16


@dataclass(frozen=True)
class Release:
    """What a draw of noise is keyed by, but for the image; the same release twice discloses nothing new.

    `patches` says which ones it shows (`released_patches`); it follows from package and cut, and is no part of the key.
    `draws` is how many draws of noise it stands for, where that is counted; it is no part of the key either.
    """

    package_digest: str
    cut: int
    kind: str  # e.g. "laplace alpha=0.1"; a fresh draw adds the upload it belongs to
    scale: float
    patches: str = UNKNOWN
    draws: int | None = None

    def text(self) -> str:
        return f"{self.package_digest}\t{self.cut}\t{self.kind}\t{self.scale!r}"


def release_of(text: str, patches: str) -> Release:
    """The inverse of `Release.text`. Raises: ValueError for another text."""
    package_digest, cut, kind, scale = text.split("\t")
    return Release(package_digest, int(cut), kind, float(scale), patches)


def pack_draw(sample_ids: Sequence[bytes], release_text: str, mark: str) -> bytes:
    """`crc32<TAB>draw<TAB>package<TAB>cut<TAB>kind<TAB>scale<TAB>mark<TAB>wire ids in Base64<LF>`: these images get a
    draw of noise more. As every batch of every epoch has such a line, an image takes no more than 22 bytes of it."""
    body = f"{_DRAW}\t{release_text}\t{mark}\t".encode() + base64.b64encode(b"".join(sample_ids))
    return b"%08x\t%s\n" % (zlib.crc32(body), body)


def parse_draw(line: bytes) -> tuple[list[bytes], str, str] | None:
    """(wire ids, release text, mark), or None for a line that is not whole, or of an image."""
    crc, _, body = line.partition(b"\t")
    if crc != b"%08x" % zlib.crc32(body):
        return None
    try:
        word, *release, mark, packed = body.decode().split("\t")
        ids = base64.b64decode(packed, validate=True)
        release_of("\t".join(release), UNKNOWN)
    except ValueError:  # whole, and not of this form
        return None
    if word != _DRAW or len(ids) % WIRE_ID_BYTES:
        return None
    return [ids[n : n + WIRE_ID_BYTES] for n in range(0, len(ids), WIRE_ID_BYTES)], "\t".join(release), mark


def pack_line(sample_id: bytes, release_text: str, patches: str) -> bytes:
    """`crc32<TAB>wire id<TAB>package<TAB>cut<TAB>kind<TAB>scale<TAB>patches<LF>`; the CRC covers what follows it.

    Earlier versions wrote no patches.
    """
    body = f"{sample_id.hex()}\t{release_text}\t{patches}".encode()
    return b"%08x\t%s\n" % (zlib.crc32(body), body)


def parse_line(line: bytes) -> tuple[bytes, str, str] | None:
    """(wire id, release text, patches), or None for a line that is not whole."""
    crc, _, body = line.partition(b"\t")
    if crc != b"%08x" % zlib.crc32(body):
        return None
    try:
        sample_id, *release = body.decode().split("\t")
        text, patches = "\t".join(release[:4]), release[4] if len(release) > 4 else UNKNOWN
        if not math.isfinite(release_of(text, patches).scale):
            return None
        return bytes.fromhex(sample_id), text, patches
    except ValueError:  # whole, and not of this form
        return None


class ReleaseLedger:
    """The releases of every image that this device ever uploaded."""

    def __init__(self, path: Path, say: Callable[[str], None], read_only: bool = False) -> None:
        """Read the ledger; a torn last line is cut off, spoiled lines before it are skipped, and both are said.

        `read_only` leaves the file as it is: someone else may be writing it.
        """
        self._path, self._read_only = path, read_only
        self._released: dict[bytes, dict[str, str]] = defaultdict(dict)  # by image and release text: the patches
        self._draws: dict[tuple[bytes, str], tuple[int, str]] = {}  # by image and release text: how many, and the last
        self._texts: dict[str, str] = {}  # each text once, however many images have it
        self.unreadable = 0  # lines, whose images are not known
        if path.exists():
            self._recover(path.read_bytes(), say)

    def _recover(self, data: bytes, say: Callable[[str], None]) -> None:
        whole = data.rfind(b"\n") + 1
        if whole < len(data) and not self._read_only:
            say(f"release ledger: a torn last line of {len(data) - whole} bytes is cut off")
            os.truncate(self._path, whole)
        for line in data[:whole].splitlines():
            if (entry := parse_line(line)) is not None:
                self._remember(*entry)
            elif (drawn := parse_draw(line)) is not None:
                self._count(*drawn)
            else:
                self.unreadable += 1
        if self.unreadable:
            say(
                f"release ledger: unreadable lines are skipped: {self.unreadable}; what they counted may go out once "
                "more"
            )

    def _remember(self, sample_id: bytes, release_text: str, patches: str) -> None:
        text, shown = (self._texts.setdefault(each, each) for each in (release_text, patches))
        self._released[sample_id][text] = shown

    def _count(self, sample_ids: Iterable[bytes], release_text: str, mark: str) -> None:
        text, last = (self._texts.setdefault(each, each) for each in (release_text, mark))
        for sample_id in sample_ids:
            count, before = self._draws.get((sample_id, text), (0, ""))
            self._draws[sample_id, text] = (count + (last != before), last)

    @property
    def images(self) -> tuple[bytes, ...]:
        """The wire ids of all images of which anything was ever released."""
        return tuple(self._released)

    def releases(self, sample_id: bytes) -> int:
        """How many different releases of this image are on record that max_releases counts."""
        return len(_counted(self._released.get(sample_id, {})))

    def of(self, sample_id: bytes) -> tuple[Release, ...]:
        """All releases of this image on record, oldest first."""
        found = []
        for text, patches in self._released.get(sample_id, {}).items():
            release = release_of(text, patches)
            count = self._draws.get((sample_id, text), (0, ""))[0] if release.kind == UNDER_NOISE else None
            found.append(replace(release, draws=count))
        return tuple(found)

    def share(self, sample_id: bytes) -> float:
        """Share of the image's patches that all its releases together show."""
        return share_shown(self._released.get(sample_id, {}).values())

    def check(
        self, sample_ids: Iterable[bytes], release: Release, max_releases: int, max_patch_share: float = 1.0
    ) -> None:
        """May all these images be released so?

        Raises: DataError with the counts when some would go over a cap; nothing is recorded.
        """
        text, asked, refused, earlier = release.text(), 0, 0, set[str]()
        for sample_id in sample_ids:
            asked += 1
            known = _counted(self._released.get(sample_id, {}))
            if text not in known and len(known) >= max_releases:
                refused += 1
                earlier.update(known)
            self._check_share(sample_id, release.patches, max_patch_share)
        if refused:
            shown = ", ".join(sorted(describe(known) for known in earlier)[:3])
            raise DataError(
                f"{refused} of {asked} images would be released {max_releases + 1} times, "
                f"max_releases is {max_releases}: they went out with {shown}; asked now: {describe(text)}",
                "let the server use the earlier scale and package, or raise --max-releases knowing that two releases "
                "of an image together disclose more than either",
            )

    def check_patches(self, sample_ids: Sequence[bytes], patches: Sequence[str], max_patch_share: float) -> None:
        """The same for releases without noise, image by image. Raises: DataError."""
        for sample_id, shown in zip(sample_ids, patches, strict=True):
            self._check_share(sample_id, shown, max_patch_share)

    def _check_share(self, sample_id: bytes, patches: str, max_patch_share: float) -> None:
        if max_patch_share >= 1.0:
            return
        known = self._released.get(sample_id, {}).values()
        share = share_shown((*known, patches))
        if share > max_patch_share:
            raise DataError(
                f"{share:.0%} of an image's patches would have left this device, {share_shown(known):.0%} did so far; "
                f"max_patch_share is {max_patch_share:.0%} (image {sample_id.hex()[:12]})",
                "use a package that sends fewer patches, the one whose patches were sent before, or raise "
                "--max-patch-share",
            )

    def record(
        self, sample_ids: Sequence[bytes], release: Release, patches: Sequence[str] | None = None, draw: str = ""
    ) -> None:
        """Put these releases on the disk (one fsync) before anything of them is sent; known ones cost nothing.

        `patches` are those of each image, where they differ. `draw` names a draw of noise where the release stands for
        many; the last one again is no further draw. Raises: DeviceError when the disk refuses.
        """
        text = release.text()
        each = patches or [release.patches] * len(sample_ids)
        fresh = [
            (sample_id, shown)
            for sample_id, shown in zip(sample_ids, each, strict=True)
            if text not in self._released.get(sample_id, ())
        ]
        mark = hashlib.blake2b(draw.encode(), digest_size=8).hexdigest() if draw else ""
        drawn = [each for each in sample_ids if draw and self._draws.get((each, text), (0, ""))[1] != mark]
        if not fresh and not drawn:
            return
        lines = [pack_line(sample_id, text, shown) for sample_id, shown in fresh]
        lines += [pack_draw(drawn, text, mark)] if drawn else []
        try:
            with self._path.open("ab") as stream:
                os.chmod(self._path, 0o600)
                stream.write(b"".join(lines))
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise DeviceError(
                f"{self._path} cannot be written: {error.strerror}", "make room on the disk and start again"
            ) from error
        for sample_id, shown in fresh:
            self._remember(sample_id, text, shown)
        self._count(drawn, text, mark)


def _counted(released: dict[str, str]) -> list[str]:
    """Those that max_releases counts."""
    return [text for text in released if not any(kind in text for kind in OF_PARTS)]


def describe(release_text: str) -> str:
    """A release in words for an operator."""
    package_digest, cut, kind, scale = release_text.split("\t")
    return f"{kind} kappa={scale} cut {cut} of package {package_digest[:12]}"
