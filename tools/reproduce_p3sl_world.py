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
PUBLIC_SHOTS = 600  # images of a class that the attacks have: of CIFAR-10's training part, none of them a device's
STRATEGY = "sequential_split"  # whose package has the parts that all of these methods train


@dataclass(frozen=True)
class Attacks:
    """How hard parts are attacked for their table."""

    names: tuple[str, ...]
    strengths: tuple[float, ...]
    images: int
    learn: int
    steps: int | None


QUICK_ATTACKS = Attacks(("ridge",), (0.0, 0.5, 1.0, 2.5), 150, 600, None)
FULL_ATTACKS = Attacks(("ridge", "inverse_net"), leakage.COARSE, 1000, 2000, 500)


@dataclass(frozen=True)
class P3slWorld:
    """`split` has images, devices and packages; `public` is an archive or a folder that the public images come from."""

    split: SplitWorld
    attacks: Attacks

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

    world = quick_split_world(root, CUTS["quick"], devices)
    made(root / "public.zip", make_public)
    return P3slWorld(world, QUICK_ATTACKS)


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
        for split in package.splits:
            kept = path.with_name(f"{path.stem}-split{split.index}.json")
            with claim(kept) as is_mine:
                if is_mine and not kept.exists():
                    _keep_rows(kept, _profiler(world, package, [split.index], threads))
        rows = [each for split in package.splits for each in _rows_of(path, split.index)]
        profiler = _profiler(world, package, [split.index for split in package.splits], threads)
        if len(rows) < len(profiler.planned()):
            return None
        write_table(path, profiler.table(rows, "not asked for"))
    return read_table(path)


def _profiler(world: P3slWorld, package: Package, splits: Sequence[int], threads: int) -> leakage.Profiler:
    attacks = world.attacks
    folder, device = scan(world.public_folder, None), choose_device(threads)
    settings = Settings(
        package.digest.hex(), publics.digest_of(folder), attacks.names, attacks.strengths, package.alpha,
        attacks.images, attacks.learn, attacks.steps, 0,
    )  # fmt: skip
    public = publics.read_public(folder, package.image, attacks.images, attacks.learn, 0, show_progress)
    chosen = replace(package, splits=tuple(split for split in package.splits if split.index in splits))
    beside = backend_folder.read(package.root.with_name(f"{package.root.name}.backend"))
    return leakage.Profiler(chosen, public, settings, device, show_progress, None, beside)


def _keep_rows(path: Path, profiler: leakage.Profiler) -> None:
    rows = list(profiler.rows(()))
    write_atomic(path, to_json([encode(row) for row in rows]))


def _rows_of(path: Path, split: int) -> list[Row]:
    kept = path.with_name(f"{path.stem}-split{split}.json")
    if not kept.exists():
        return []
    found = from_json(kept.read_bytes(), TABLE_BYTES_MAX)
    assert isinstance(found, list)
    return [decode(Row, each) for each in found]
