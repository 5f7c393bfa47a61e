"""The images of one device: a folder becomes samples with stable opaque ids; bad files are named and counted.

Which files a folder holds and how one is decoded are contract.image_folder's and contract.images's rules; here is what
a device does about bad files (ED-02), duplicates and its class list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from contract.errors import ConfigError, DataError, why
from contract.image_folder import Folder, ImageFile, scan
from contract.images import load_pixels, pixel_digest
from contract.keyed_noise import wire_id

SHOWN_FILES = 10


@dataclass(frozen=True)
class DataLimits:
    """How much may be wrong with a folder, and how long a class list may be."""

    bad_share: float = 0.2  # above this the folder is not what the user meant
    class_list_bytes: int = 1 << 20


@dataclass(frozen=True)
class Sample:
    """One image: its file, what names it on the wire, what keys its noise, and its class (None: unlabelled)."""

    path: Path
    relative: str
    sample_id: bytes
    pixel_digest: bytes
    label: int | None


@dataclass(frozen=True)
class Skipped:
    """A file that could not be used."""

    file: str
    reason: str


@dataclass(frozen=True)
class Duplicate:
    """A file whose pixels are those of another, which stands for both."""

    file: str
    same_as: str


@dataclass(frozen=True)
class Dataset:
    """A folder's samples in upload order: by wire id, which says nothing of names, classes or dates."""

    classes: tuple[str, ...]
    samples: tuple[Sample, ...]
    skipped: tuple[Skipped, ...]
    duplicates: tuple[Duplicate, ...]
    ignored: int

    def class_counts(self) -> tuple[int, ...]:
        """Samples of each class; a class without pictures counts 0 (ED-07)."""
        labels = [sample.label for sample in self.samples]
        return tuple(labels.count(number) for number in range(len(self.classes)))


def load_image(path: Path, name: str, max_pixels: int) -> NDArray[np.uint8]:
    """Upright RGB pixels (H, W, 3), before resizing. Raises: DataError naming the file."""
    return load_pixels(path, name, max_pixels)


def load_dataset(
    root: Path,
    classes: Sequence[str] | None,
    secret: bytes,
    max_pixels: int,
    on_image: Callable[[], object],
    limits: DataLimits | None = None,
) -> Dataset:
    """Decode every image of a folder once, to name it and to find the bad ones before any hours are spent.

    `classes` None takes the folder's own class folders; `on_image` is called after each file.
    Raises: DataError for a folder without images, a folder outside the class list, too many bad files or no good one.
    """
    folder = scan(root, classes)
    samples: dict[bytes, Sample] = {}
    skipped: list[Skipped] = []
    duplicates: list[Duplicate] = []
    for image in folder.images:
        try:
            digest = pixel_digest(load_image(image.path, image.relative, max_pixels))
        except DataError as error:
            skipped.append(Skipped(image.relative, error.cause.removeprefix(f"{image.relative} ")))
        else:
            if digest in samples:
                duplicates.append(Duplicate(image.relative, samples[digest].relative))
            else:
                samples[digest] = make_sample(image, digest, secret)
        on_image()
    refuse_bad_folder(folder, skipped, (limits or DataLimits()).bad_share)
    ordered = sorted(samples.values(), key=lambda sample: sample.sample_id)
    return Dataset(folder.classes, tuple(ordered), tuple(skipped), tuple(duplicates), folder.ignored)


def class_folders(root: Path) -> tuple[str, ...]:
    """Names of the class folders there are, in code-point order. Raises: DataError as `load_dataset`."""
    return scan(root, None).classes


def without_labels(dataset: Dataset, known: int) -> Dataset:
    """The same, with images of classes beyond the first `known` taken for unlabelled ones."""
    samples = tuple(
        replace(sample, label=None) if sample.label is not None and sample.label >= known else sample
        for sample in dataset.samples
    )
    return replace(dataset, classes=dataset.classes[:known], samples=samples)


def make_sample(image: ImageFile, digest: bytes, secret: bytes) -> Sample:
    """The sample that an image with these pixels is on this device."""
    return Sample(image.path, image.relative, wire_id(secret, digest), digest, image.class_index)


def refuse_bad_folder(folder: Folder, skipped: Sequence[Skipped], bad_share: float) -> None:
    """Raises: DataError with a summary when no image is good, or more than `bad_share` of them are bad."""
    if len(skipped) <= bad_share * len(folder.images) and len(skipped) < len(folder.images):
        return
    shown = "".join(f"\n    {each.file}: {each.reason}" for each in skipped[:SHOWN_FILES])
    more = f"\n    and {len(skipped) - SHOWN_FILES} more" if len(skipped) > SHOWN_FILES else ""
    raise DataError(
        f"{len(skipped)} of {len(folder.images)} images in {folder.root} cannot be used, "
        f"at most {bad_share:.0%} may be bad:{shown}{more}",
        "remove or repair these files, or name another folder",
    )


def require_labels(dataset: Dataset, root: Path) -> None:
    """Raises: DataError when images have no class: adaptation learns from class folders."""
    unlabelled = [sample.relative for sample in dataset.samples if sample.label is None]
    if unlabelled:
        raise DataError(
            f"adaptation needs a class for each image, {len(unlabelled)} in {root} have none (first: {unlabelled[0]})",
            "put the images into one folder per class, or predict with --infer",
        )


def read_class_list(path: Path, limits: DataLimits | None = None) -> tuple[str, ...]:
    """Class names of a UTF-8 file, one a line; the order gives the numbers. Blank lines do not count.

    Raises: ConfigError when the file cannot be read, names no class, or is too long.
    """
    limit_bytes = (limits or DataLimits()).class_list_bytes
    try:
        data = path.read_bytes()
        names = tuple(line.strip() for line in data.decode("utf-8-sig").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the class list {path} cannot be read: {why(error, path)}", "give a UTF-8 text file, one class a line"
        ) from error
    if not names or len(data) > limit_bytes:
        raise ConfigError(
            f"the class list {path} should name classes in at most {limit_bytes} bytes, "
            f"found {len(names)} in {len(data)}",
            "one class a line",
        )
    return names
