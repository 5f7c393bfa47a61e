"""Which image files a folder holds, and which class each belongs to.

Opening them is `contract.images`'s part; this file reads names only.

Folders directly below the root are classes, and everything below them, at any depth, belongs to them; without such
folders the files at the root are unlabelled. Names count as NFC and sort by code point, so class numbers depend on
neither disk order, locale, nor the machine the folder was copied from.
"""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from contract.errors import DataError, suggest

SUFFIXES = frozenset(  # of contract.images.FORMATS, compared without case
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif")
    + (".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm")
)
IGNORED_NAMES = frozenset(("__macosx", "thumbs.db", "desktop.ini"))  # besides all that start with a dot


@dataclass(frozen=True)
class ImageFile:
    """One image: where it is, what reports call it (NFC, relative to the root, with /), and its class number."""

    path: Path
    relative: str
    class_index: int | None


@dataclass(frozen=True)
class Folder:
    """The images below `root`, sorted by `relative`, the class list, and how many entries were passed over."""

    root: Path
    classes: tuple[str, ...]
    images: tuple[ImageFile, ...]
    ignored: int

    def digest(self) -> str:
        """SHA-256 in hex over the images' names and sizes: is it still the same folder? Raises: OSError."""
        digest = hashlib.sha256()
        for image in self.images:
            digest.update(f"{image.relative}\0{image.path.stat().st_size}\n".encode())
        return digest.hexdigest()


def scan(root: Path, classes: Sequence[str] | None) -> Folder:
    """List the images below a folder.

    Args:
        root: holds one folder per class, or unlabelled images.
        classes: the class list, whose order gives the numbers; a class may have no folder here, or an empty one. None
            takes the folders' names in code-point order.

    Raises:
        DataError: the folder is missing, unreadable or without images, a class folder is not in the list, or the list
            names a class twice.
    """
    try:
        folder = _scan(root, classes)
    except OSError as error:
        raise DataError(
            f"the image folder {error.filename or root} cannot be read: {error.strerror}",
            "check the path and its permissions",
        ) from error
    if not folder.images:
        raise DataError(
            f"{root} must hold images ({' '.join(sorted(SUFFIXES))}), found none",
            "give the folder that holds one folder of images per class, or the images themselves",
        )
    return folder


def _scan(root: Path, classes: Sequence[str] | None) -> Folder:
    ignored: list[str] = []
    folders, files = _entries(root, ignored)
    folders = [folder for folder in folders if not _leads_above(folder, root, ignored)]
    if classes is None:
        names = tuple(sorted({_text(folder.name) for folder in folders}))
    else:
        names = _class_list(classes)
    images: list[ImageFile] = []
    if folders:
        ignored.extend(str(path) for path in files)
        for folder in folders:
            number = _class_number(folder, names, root)
            images.extend(_image_file(path, root, number) for path in _walk(folder, root, ignored))
    else:
        images.extend(_image_file(path, root, None) for path in _pictures(files, ignored))
    images.sort(key=lambda image: (image.relative, str(image.path)))
    return Folder(root, names, tuple(images), len(ignored))


def _entries(folder: Path, ignored: list[str]) -> tuple[list[Path], list[Path]]:
    """The folders and the other entries of a folder, less the names to be passed over."""
    folders: list[Path] = []
    others: list[Path] = []
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.startswith(".") or entry.name.casefold() in IGNORED_NAMES:
                ignored.append(entry.path)
            else:
                (folders if os.path.isdir(entry) else others).append(Path(entry.path))
    return folders, others


def _pictures(files: list[Path], ignored: list[str]) -> Iterator[Path]:
    for path in files:
        if path.suffix.casefold() in SUFFIXES and os.path.isfile(path):  # no broken link, pipe or socket
            yield path
        else:
            ignored.append(str(path))


def _walk(top: Path, root: Path, ignored: list[str]) -> Iterator[Path]:
    """Image files at any depth; a folder met again, as in a loop of links, is passed over."""
    seen: set[tuple[int, int]] = set()
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        if _identity(folder) in seen:
            ignored.append(str(folder))
            continue
        seen.add(_identity(folder))
        below, files = _entries(folder, ignored)
        waiting.extend(each for each in below if not _leads_above(each, root, ignored))
        yield from _pictures(files, ignored)


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _leads_above(folder: Path, root: Path, ignored: list[str]) -> bool:
    """Whether a link leads to the root or above it, where the images of other classes are."""
    above = folder.is_symlink() and root.resolve().is_relative_to(folder.resolve())
    if above:
        ignored.append(str(folder))
    return above


def _class_list(classes: Sequence[str]) -> tuple[str, ...]:
    names = tuple(unicodedata.normalize("NFC", name) for name in classes)
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise DataError(f"a class list must name each class once, found {name!r} twice", "remove one of them")
        seen.add(name)
    return names


def _class_number(folder: Path, names: tuple[str, ...], root: Path) -> int:
    name = _text(folder.name)
    if name not in names:
        raise DataError(
            f"every folder in {root} must be a class, found {name!r}{suggest(name, names)}",
            "rename or move the folder, or add it to the class list of every device of the site",
        )
    return names.index(name)


def _image_file(path: Path, root: Path, class_index: int | None) -> ImageFile:
    return ImageFile(path, _text(path.relative_to(root).as_posix()), class_index)


def _text(name: str) -> str:
    """A file name as printable NFC: bytes that are no UTF-8, and control characters, come out as backslash escapes."""
    text = unicodedata.normalize("NFC", os.fsencode(name).decode("utf-8", "backslashreplace"))
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
