"""What a reproduction of P3SL works on: split training's world with parts at many splits, public images, and for each
model the leakage table of its parts. A fleet says which devices there are. Rows are `reproduce_p3sl_rows`' part.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from contract.canonical import decode, encode, from_json, to_json
from contract.image_folder import scan
from contract.leakage import TABLE_BYTES_MAX, Row, Settings, Table
from server_runtime import backend_folder
from server_runtime.backend import choose_device
from server_runtime.files import write_atomic
from server_runtime.leakage import profiler as leakage
from server_runtime.leakage import public as publics
from server_runtime.leakage.cli import show_progress
from server_runtime.leakage.package import Package, read_package
from server_runtime.leakage.table import read_table, write_table
from tools import demo_data
from tools.kept_rows import claim
from tools.reproduce_split_world import (
    ARCHIVE,
    DRAW,
    FULL_SHOTS,
    SplitWorld,
    export_part_package,
    full_split_world,
    quick_split_world,
    take,
)
from tools.reproduce_world import draw_shots, made, members

CUTS = {"quick": "1-4", "full": {"vgg16_bn": "1-10", "resnet18": "1-6"}}
PUBLIC_SHOTS = 500  # images of a class that the attacks have: of CIFAR-10's training part, none of them a device's
STRATEGY = "sequential_split"  # whose package has the parts that all of these methods train


@dataclass(frozen=True)
class Attacks:
    """How hard parts are attacked for their table; `splits` None are all. A split that is not attacked is taken to show
    what the next shallower one shows. `at_once`: by one command, which trains the judging classifier once; else several
    may share the work, and each trains it for each piece."""

    names: tuple[str, ...]
    strengths: tuple[float, ...]
    images: int
    learn: int
    steps: int | None
    splits: tuple[int, ...] | None = None
    at_once: bool = False


QUICK_TESTED = 150
QUICK_STANDS_FOR = 34  # a device has 21 digits there, and 714 images in the full world
QUICK_ATTACKS = Attacks(("ridge",), (0.0, 1.0, 2.5), 40, 160, None, (1, 4), at_once=True)
FULL_ATTACKS = Attacks(("ridge", "inverse_net"), (0.0, 0.5, 1.0, 1.75, 2.5), 1000, 1200, 250)


@dataclass(frozen=True)
class P3slWorld:
    """`split` has images, devices and packages. In a fleet's seconds and joules each image stands for so many."""

    split: SplitWorld
    attacks: Attacks
    stands_for: int = 1

    @property
    def public_folder(self) -> Path:
        """Images by class that are no device's."""
        archive = self.split.root / "public.zip"
        return made(self.split.root / "public", lambda path: take(archive, members(archive), path))

    def package(self, model: str) -> Path:
        return export_part_package(self.split, model, STRATEGY)

    def table_path(self, model: str) -> Path:
        return self.split.root / f"leakage-{model}.json"


def quick_p3sl_world(root: Path, devices: tuple[str, ...]) -> P3slWorld:
    """Digits: 5 to 9 on the devices, 0 to 4 public."""

    def make_public(path: Path) -> None:
        _zip_folder(made(root / "digits-public", lambda folder: demo_data.digits(folder, 1, DRAW)) / "public", path)

    world = quick_split_world(root, CUTS["quick"], devices, QUICK_TESTED)
    made(root / "public.zip", make_public)
    return P3slWorld(world, QUICK_ATTACKS, QUICK_STANDS_FOR)


def full_p3sl_world(root: Path, shared: Path, test_images: int, devices: tuple[str, ...]) -> P3slWorld:
    """CIFAR-10. Raises: DataError when neither the world nor the archive has the images."""
    world = full_split_world(root, shared, CUTS["full"], test_images, devices)

    def make_public(path: Path) -> None:
        archive = shared / ARCHIVE
        names = members(archive, "cifar10/train/")
        private = set(draw_shots(names, FULL_SHOTS, DRAW))
        chosen = [name for name in draw_shots(names, FULL_SHOTS + PUBLIC_SHOTS, DRAW) if name not in private]
        with zipfile.ZipFile(archive) as source, zipfile.ZipFile(path, "w") as packed:
            for name in chosen:
                packed.writestr("/".join(name.split("/")[-2:]), source.read(name))

    made(root / "public.zip", make_public)
    return P3slWorld(world, FULL_ATTACKS)


def _zip_folder(folder: Path, path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.glob("*/*.png")):
            archive.write(file, "/".join(file.parts[-2:]))


def leakage_table(world: P3slWorld, model: str, threads: int) -> Table | None:
    """The table of a model's parts, made once; several commands may measure splits of it at once, and those who come
    to no end of it get None: another command is at what is missing."""
    path = world.table_path(model)
    if not path.exists():
        package = read_package(world.package(model))
        splits = [split.index for split in package.splits if split.index in (world.attacks.splits or [split.index])]
        strengths = world.attacks.strengths
        if world.attacks.at_once:
            profiler = _profiler(world, package, splits, strengths, threads)
            write_table(path, profiler.table(list(profiler.rows(())), "not asked for"))
            return read_table(path)
        pieces = [(split, own) for split in splits for own in (strengths[::2], strengths[1::2])]
        for split, own in pieces:
            kept = _kept_path(path, split, own)
            with claim(kept) as is_mine:
                if is_mine and not kept.exists():
                    rows = list(_profiler(world, package, [split], own, threads).rows(()))
                    write_atomic(kept, to_json([encode(row) for row in rows]))
        rows = [row for split, own in pieces for row in _rows_in(_kept_path(path, split, own))]
        if len(rows) < len(splits) * len(strengths):
            return None
        write_table(path, _profiler(world, package, splits, strengths, threads).table(rows, "not asked for"))
    return read_table(path)


def _profiler(
    world: P3slWorld, package: Package, splits: Sequence[int], strengths: tuple[float, ...], threads: int
) -> leakage.Profiler:
    attacks = world.attacks
    folder, device = scan(world.public_folder, None), choose_device(threads)
    settings = Settings(
        package.digest.hex(), publics.digest_of(folder), attacks.names, strengths, package.alpha,
        attacks.images, attacks.learn, attacks.steps, 0,
    )  # fmt: skip
    public = publics.read_public(folder, package.image, attacks.images, attacks.learn, 0, show_progress)
    chosen = replace(package, splits=tuple(split for split in package.splits if split.index in splits))
    beside = backend_folder.read(package.root.with_name(f"{package.root.name}.backend"))
    return leakage.Profiler(chosen, public, settings, device, show_progress, None, beside)


def _kept_path(path: Path, split: int, strengths: Sequence[float]) -> Path:
    return path.with_name(f"{path.stem}-split{split}-sigma{strengths[0]:g}.json")


def _rows_in(path: Path) -> list[Row]:
    if not path.exists():
        return []
    found = from_json(path.read_bytes(), TABLE_BYTES_MAX)
    assert isinstance(found, list)
    return [decode(Row, each) for each in found]
