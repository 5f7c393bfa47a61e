"""What a reproduction of split training works on: an archive of drawn images, each device's share, signed packages.

`quick` is scikit-learn's digits and a very small ResNet; `full` is 5,000 images of CIFAR-10 at 32 px, and a ResNet-18
and a VGG-16 from scratch. A world needs nothing from outside once it is made. Running cells on it is left to
`reproduce_split_rows`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from contract.console import say
from contract.errors import DataError, ExportError
from contract.training import HOLDS
from tools import demo_data
from tools.reproduce_world import ROOT, alone, draw_key, draw_shots, made, members

ARCHIVE = "data/cifar10.zip"
FULL_SHOTS, QUICK_SHOTS = 500, 30  # training images of each class
FULL_CLASSES = 10
DRAW = 0  # every seed deals the same images anew
SMALL = "small_images=True"
ALL = "all"  # centralised training's only device


@dataclass(frozen=True)
class SplitWorld:
    """Models by timm's name with their arguments, devices, and where the training sets are.

    `cuts` are every model's, as export-frontend takes them; the same for all, or by model."""

    name: str
    root: Path
    models: Mapping[str, tuple[str, ...]]
    devices: tuple[str, ...]
    cuts: str | Mapping[str, str]
    note: str

    @property
    def images(self) -> Path:
        """An archive with members .../train/CLASS/FILE and .../test/CLASS/FILE."""
        return self.root / "images.zip"

    def names(self, part: str) -> list[str]:
        """Members of the archive in "train" or "test"."""
        return [name for name in members(self.images) if name.split("/")[-3] == part]

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(sorted({name.split("/")[-2] for name in members(self.images)}))

    def test_folder(self) -> Path:
        return made(self.root / "test", lambda path: take(self.images, self.names("test"), path))

    def train_folder(self, device: str, seed: int) -> Path:
        """A device's images, dealt by the seed; `ALL` has every device's."""
        if device == ALL:
            return made(self.root / "dealt" / ALL, lambda path: take(self.images, self.names("train"), path))
        own = deal(self.names("train"), self.devices, seed)[device]
        return made(self.root / "dealt" / f"seed{seed}" / device, lambda path: take(self.images, own, path))

    def devices_of(self, strategy: str) -> tuple[str, ...]:
        return (ALL,) if strategy == "centralised" else self.devices

    def package(self, model: str, strategy: str) -> Path:
        """The package that a strategy needs; the backend folder lies beside it as NAME.backend."""
        holds = HOLDS[strategy]
        return self.root / (f"{model}-whole" if holds == "whole" else f"{model}-cut{self.cuts_of(model)}")

    def cuts_of(self, model: str) -> str:
        return self.cuts if isinstance(self.cuts, str) else self.cuts[model]

    @property
    def publisher(self) -> Path:
        """Public key of the packages' signer."""
        return self.root / "signing-key.pub.pem"


def quick_split_world(
    root: Path,
    cuts: str | Mapping[str, str],
    devices: tuple[str, ...] = ("device-1", "device-2", "device-3"),
    test_images: int | None = None,
) -> SplitWorld:
    """Digits 5 to 9 on some devices, tested by so many images (None: all); seconds on two cores."""
    # SiLU: with ReLU two engines drift apart, as an input that is rounded to another side of 0 has another gradient.
    models = {"resnet18": (SMALL, "act_layer=silu", "layers=(1,1,1,1)", "channels=(8,16,24,32)")}
    note = f"scikit-learn's digits 5 to 9, {QUICK_SHOTS} training images a class on {len(devices)} devices, 32 px"
    world = SplitWorld("quick", root, models, devices, cuts, note)

    def make(path: Path) -> None:
        folder = root / "digits"
        demo_data.digits(folder, QUICK_SHOTS, DRAW)
        tested = sorted(
            folder.glob("device-*/test/*/*.png"), key=lambda file: draw_key("test", "/".join(file.parts[-2:]))
        )
        with zipfile.ZipFile(path, "w") as archive:
            for file in sorted([*folder.glob("device-*/train/*/*.png"), *tested[:test_images]]):
                archive.write(file, f"digits/{'/'.join(file.parts[-3:])}")
        shutil.rmtree(folder)

    made(world.images, make)
    return world


def full_split_world(
    root: Path, shared: Path, cuts: str | Mapping[str, str], test_images: int,
    devices: tuple[str, ...] = tuple(f"device-{number}" for number in range(1, 8)),
) -> SplitWorld:  # fmt: skip
    """CIFAR-10 on seven devices. Raises: DataError when neither the world nor the archive has the images."""
    models = {"resnet18": (SMALL,), "vgg16_bn": (SMALL,)}
    note = f"CIFAR-10, {FULL_SHOTS} training images a class on {len(devices)} devices, {test_images} test images, 32 px"
    world = SplitWorld("full", root, models, devices, cuts, note)

    def make(path: Path) -> None:
        archive = shared / ARCHIVE
        if not archive.is_file():
            raise DataError(
                f"the full reproduction needs {archive}, which does not exist",
                f"give --shared DIR, where DIR holds {ARCHIVE}; or use --quick, which needs no files",
            )
        pack(archive, path, test_images)

    made(world.images, make)
    if len(world.names("test")) != test_images:
        raise DataError(
            f"{world.images} holds {len(world.names('test'))} test images, asked for are {test_images}",
            "give another -o or --world, or remove that file to draw again",
        )
    return world


def pack(archive: Path, target: Path, test_images: int) -> None:
    """An archive of the drawn images alone: the same number of each class. Raises: DataError when there are too few."""
    chosen = draw_shots(members(archive, "cifar10/train/"), FULL_SHOTS, DRAW)
    chosen += draw_shots(members(archive, "cifar10/test/"), test_images // FULL_CLASSES, DRAW)
    with zipfile.ZipFile(archive) as source, zipfile.ZipFile(target, "w") as packed:
        for name in chosen:
            packed.writestr(name, source.read(name))


def deal(names: Sequence[str], devices: Sequence[str], seed: int) -> dict[str, list[str]]:
    """Every name to one device, in turn, in an order that the seed keys: no device has two more than another."""
    order = sorted(names, key=lambda name: draw_key(f"deal, seed {seed}", name))
    return {device: sorted(order[place :: len(devices)]) for place, device in enumerate(devices)}


def take(archive: Path, names: Sequence[str], folder: Path) -> None:
    """Members .../CLASS/FILE of an archive as FOLDER/CLASS/FILE."""
    with zipfile.ZipFile(archive) as opened:
        for name in names:
            path = folder.joinpath(*name.split("/")[-2:])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(opened.read(name))


def export_part_package(world: SplitWorld, model: str, strategy: str) -> Path:
    """The signed package for a strategy and its backend by the real exporter, once. Raises: ExportError."""
    front = world.package(model, strategy)
    with alone(world.root / "making"):  # the first export makes the key
        if (front / "manifest.json").exists() and front.with_name(f"{front.name}.backend").exists():
            return front
        say(f"== export {front.name}")
        arguments = [word for each in world.models[model] for word in ("--model-arg", each)]
        whole = ["--for", "fed_avg", "--release-whole-model", "--classes", len(world.classes)]
        parts = ["--for", "sequential_split", "--cuts", world.cuts_of(model)]
        words = [
            sys.executable, "-m", "exporter.cli", "--model", model, *arguments,
            *(whole if HOLDS[strategy] == "whole" else parts), "--augment", "crop=4,flip", "--seed", 0, "-o", front,
        ]  # fmt: skip
        code = subprocess.run([str(word) for word in words], stdout=2, cwd=ROOT).returncode
    if code:
        raise ExportError(f"export-frontend ended with exit code {code}", "see the lines above")
    return front
