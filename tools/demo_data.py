"""Image folders for the demo: public classes, two devices' few shots, and private test images.

Training and running are left to the other demo files; nothing here knows a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from contract.console import say
from contract.errors import DataError, UsageError
from contract.image_folder import scan
from contract.images import load_pixels

DIGIT_SIDE_PX = 32
CROPS_PER_PICTURE = 48
TEST_PER_CLASS = 160  # enough for an error below two points with five classes, in seconds
DEVICES = ("device-a", "device-b")

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class DemoFolders:
    """Where the images lie: each folder has one subfolder per class; test images are divided between the devices."""

    public: Path
    train: tuple[Path, ...]  # one per device
    test: tuple[Path, ...]  # one per device
    classes: tuple[str, ...]  # private classes, code-point order
    note: str


def digits(root: Path, shots: int, seed: int) -> DemoFolders:
    """scikit-learn's digits: 0 to 4 are the server's public set, 5 to 9 the site's private task."""
    classes = digit_classes()
    note = "scikit-learn's digits: 0-4 public, 5-9 private"
    return divide(root, classes, [str(digit) for digit in range(5)], shots, seed, note)


def digit_classes() -> dict[str, list[Pixels]]:
    """scikit-learn's digits by class, in its order."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    small = (images.reshape(-1, 8, 8) * (255 / 16)).round().astype(np.uint8)
    size = (DIGIT_SIDE_PX, DIGIT_SIDE_PX)
    pixels = [np.asarray(Image.fromarray(each).resize(size, Image.Resampling.BICUBIC).convert("RGB")) for each in small]
    return {str(digit): [pixels[i] for i in np.flatnonzero(labels == digit)] for digit in range(10)}


def all_digits(root: Path) -> None:
    """All of them as ROOT/DIGIT/NUMBER.png."""
    for name, images in digit_classes().items():
        for number, image in enumerate(images):
            write(root / name / f"{number:04}.png", image)


def user_folder(root: Path, source: Path, shots: int, seed: int) -> DemoFolders:
    """The user's own images. Class folders: half of the classes become public, the rest the private task.

    A flat folder of pictures has no labels: then every picture is a class and random crops of it are its samples.

    Raises: DataError when there are too few classes or images.
    """
    folder = scan(source, None)
    if folder.classes:
        classes: dict[str, list[Pixels]] = {name: [] for name in folder.classes}
        for image in folder.images:
            if image.class_index is not None and len(classes[folder.classes[image.class_index]]) < 400:
                read_into(classes[folder.classes[image.class_index]], image.path, image.relative)
        note = f"{source.name}: first half of the classes public, second half private"
    else:
        pictures: list[Pixels] = []
        names = [image.relative for image in folder.images if read_into(pictures, image.path, image.relative)]
        rng = np.random.default_rng(seed)
        classes = {
            Path(name).stem: [crop(picture, rng) for _ in range(CROPS_PER_PICTURE)]
            for name, picture in zip(names, pictures, strict=True)
        }
        note = f"{source.name} has no class folders: each picture is a class, random crops are its samples"
    usable = sorted(name for name, images in classes.items() if len(images) >= shots + 1)
    if len(usable) < 4:
        raise DataError(
            f"{source}: the demo needs 4 classes with at least {shots + 1} images each, found {len(usable)}",
            "give a folder with one subfolder per class, or lower --shots",
        )
    return divide(root, {name: classes[name] for name in usable}, usable[: len(usable) // 2], shots, seed, note)


def read_into(images: list[Pixels], path: Path, name: str) -> bool:
    """Append a picture of at most 256 px; an unreadable one is skipped with a word, as on a device."""
    try:
        pixels = load_pixels(path, name)
    except DataError as error:
        say(f"skipped: {error.cause}")
        return False
    picture = Image.fromarray(pixels)
    picture.thumbnail((256, 256), Image.Resampling.BICUBIC)
    images.append(np.asarray(picture))
    return True


def crop(picture: Pixels, rng: np.random.Generator) -> Pixels:
    """A random square of 30 to 60 % of the shorter side."""
    height, width = picture.shape[:2]
    side = max(8, int(min(height, width) * rng.uniform(0.3, 0.6)))
    top, left = rng.integers(0, height - side + 1), rng.integers(0, width - side + 1)
    return picture[top : top + side, left : left + side]


def divide(
    root: Path, classes: dict[str, list[Pixels]], public: Sequence[str], shots: int, seed: int, note: str
) -> DemoFolders:
    """Write public classes whole, `shots` private images a class dealt to the devices in turn, the rest as test."""
    if shots < 1:
        raise UsageError(f"--shots must be 1 or more, found {shots}", "5 is the usual number")
    rng = np.random.default_rng(seed)
    for name in public:
        for number, image in enumerate(classes[name]):
            write(root / "public" / name / f"{number:04}.png", image)
    private = sorted(set(classes) - set(public))
    dealt = 0
    for name in private:
        order = rng.permutation(len(classes[name]))
        for number in order[:shots]:
            write(root / DEVICES[dealt % len(DEVICES)] / "train" / name / f"{number:04}.png", classes[name][number])
            dealt += 1
        for place, number in enumerate(order[shots : shots + TEST_PER_CLASS]):
            write(root / DEVICES[place % len(DEVICES)] / "test" / name / f"{number:04}.png", classes[name][number])
    return DemoFolders(
        public=root / "public",
        train=tuple(root / device / "train" for device in DEVICES),
        test=tuple(root / device / "test" for device in DEVICES),
        classes=tuple(private),
        note=note,
    )


def write(path: Path, pixels: Pixels) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
