"""What a reproduction works on: a pre-trained model, the server's public images, sites with few shots, its packages.

Two worlds: `quick` is scikit-learn's digits and a small model, made in minutes from what is installed; `full` has
CIFAR-10 and the photos of PACS as private tasks, a Tiny-ImageNet subset as the public one, and a ViT-S trained on it,
from archives. Running rows on it is left to `reproduce_rows`; the paper's own setting is `reproduce_paper`'s.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from contract import manifest as manifests
from contract.console import say
from contract.errors import DataError, ExportError
from contract.image_folder import scan
from tools import demo, demo_data, demo_model

ROOT = Path(__file__).parents[1]
FULL_MODEL = "vit_small_patch16_224"
TRAINED_ON = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}  # how the weights' images were normalised
FULL_ARGS = {"img_size": 64, "patch_size": 8, "num_classes": 200, "pretrained_cfg_overlay": TRAINED_ON}
FULL_SPLIT = 8
FULL_WORDS = ("--played-sites", "8")  # three, which its size gives by default, do not tell neighbouring rates apart
PUBLIC_ARCHIVE = "data/tinyimagenet_server.zip"
FULL_WEIGHTS = "models/vit_small_p8_64_tin200.safetensors"
DEVICE = "device-a"  # the one device of the full world's site
SHIPPED = "shipped"  # the package as the exporter makes it when it is told nothing


@dataclass(frozen=True)
class Archived:
    """A private task in an archive: where its images lie, as FOLDER/CLASS/FILE; without `test`, half of each class."""

    archive: str
    train: str
    test: str | None
    note: str


TASKS = {
    "cifar10": Archived("data/cifar10.zip", "cifar10/train/", "cifar10/test/", "CIFAR-10 at 64 px"),
    "pacs-photo": Archived("data/pacs64.zip", "pacs64/photo/", None, "photos of PACS at 64 px, half of a class tested"),
}
ARCHIVES = (*(task.archive for task in TASKS.values()), PUBLIC_ARCHIVE, FULL_WEIGHTS)


@dataclass(frozen=True)
class SiteFolders:
    """One site: its devices' training and test images, one folder per class in each, and the class list."""

    train: Mapping[str, Path]
    test: Mapping[str, Path]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class World:
    """Model, public images, and the sites that can be drawn; `site(dataset, shots, seed)` makes its folders on first
    use. `package` names one of the packages that are made of the model, `words` are the exporter's for it, `always`
    those for all of them."""

    name: str
    root: Path
    model: str
    model_args: Mapping[str, Any]
    weights: Path
    public: Path
    notes: Mapping[str, str]  # dataset -> what it is
    site: Callable[[str, int, int], SiteFolders]
    split: int | None = None
    package: str = SHIPPED
    words: tuple[str, ...] = ()
    always: tuple[str, ...] = ()

    @property
    def datasets(self) -> tuple[str, ...]:
        return tuple(self.notes)

    @property
    def package_root(self) -> Path:
        return self.root if self.package == SHIPPED else self.root / "packages" / self.package

    @property
    def front(self) -> Path:
        return self.package_root / "front"

    @property
    def backend(self) -> Path:
        return self.package_root / "front.backend"

    @property
    def publisher(self) -> Path:
        """Public key of the package's signer."""
        return self.package_root / "signing-key.pub.pem"


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Several commands may share a folder: one prepares it while the others wait."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def quick_world(root: Path) -> World:
    """Digits 0 to 4 are public, 5 to 9 private; the model is pre-trained here, as in the demo."""

    def site(dataset: str, shots: int, seed: int) -> SiteFolders:
        folders = made(root / f"digits-{shots}shot-seed{seed}", lambda path: demo_data.digits(path, shots, seed))
        train, test = ({name: folders / name / part for name in demo_data.DEVICES} for part in ("train", "test"))
        return SiteFolders(train, test, tuple(str(digit) for digit in range(5, 10)))

    public = made(root / "digits-public", lambda path: demo_data.digits(path, 1, 1)) / "public"
    arguments = {**demo.DIGITS_ARGS, "num_classes": len(scan(public, None).classes)}

    def pretrain(path: Path) -> None:
        torch.manual_seed(1)
        model = demo.create(demo.DIGITS_MODEL, arguments)
        plan = demo_model.Pretraining(demo.PRETRAIN_STEPS, demo.PRETRAIN_LIMIT_S, 1)
        demo_model.make_weights(path, model, public, demo.rule_of(model), plan)

    weights = made(root / "pretrained.safetensors", pretrain)
    notes = {"digits": "scikit-learn's digits: 0-4 public, 5-9 private, two devices"}
    return World("quick", root, demo.DIGITS_MODEL, arguments, weights, public, notes, site)


def full_world(root: Path, shared: Path, test_images: int | None, datasets: Sequence[str] = tuple(TASKS)) -> World:
    """Private tasks at 64 px, each on one device. Raises: DataError when an archive is missing."""
    needed = [*(TASKS[name].archive for name in datasets), PUBLIC_ARCHIVE, FULL_WEIGHTS]
    for path in (shared / name for name in needed):
        if not path.is_file():
            raise DataError(
                f"the full reproduction needs {path}, which does not exist",
                f"give --shared DIR, where DIR holds {listing(ARCHIVES)}; or use --quick, which needs no files",
            )
    public_archive = shared / PUBLIC_ARCHIVE
    public = made(root / "public", lambda path: unpack(public_archive, path, members(public_archive)))
    draws = {name: open_task(root, name, shared / TASKS[name].archive, test_images) for name in datasets}
    notes = {
        name: f"{TASKS[name].note}, {draw.test_count} test images, one device; Tiny-ImageNet subset public"
        for name, draw in draws.items()
    }
    images = public / "tinyimagenet" / "train"
    return World(
        "full", root, FULL_MODEL, FULL_ARGS, shared / FULL_WEIGHTS, images, notes,
        lambda dataset, shots, seed: draws[dataset].site(shots, seed), FULL_SPLIT, always=FULL_WORDS,
    )  # fmt: skip


@dataclass(frozen=True)
class Draw:
    """A task whose test images are chosen, ready to draw shots from."""

    root: Path
    name: str
    archive: Path
    train: tuple[str, ...]
    test: Path
    test_count: int

    def site(self, shots: int, seed: int) -> SiteFolders:
        """Raises: DataError when a class has too few images."""
        drawn = draw_shots(self.train, shots, seed)
        folder = made(self.root / f"{self.name}-{shots}shot-seed{seed}", lambda path: unpack(self.archive, path, drawn))
        classes = tuple(sorted({name.rsplit("/", 2)[-2] for name in self.train}))
        task = TASKS[self.name]
        return SiteFolders({DEVICE: folder / task.train}, {DEVICE: self.test / (task.test or task.train)}, classes)


def open_task(root: Path, name: str, archive: Path, test_images: int | None) -> Draw:
    """A task of an archive; `test_images` of its test images, the first in a keyed order (None: all)."""
    task = TASKS[name]
    if task.test is None:
        train, tested = halves(members(archive, task.train))
    else:
        train, tested = members(archive, task.train), members(archive, task.test)
    chosen = tested if test_images is None else sorted(tested, key=lambda name: draw_key("test", name))[:test_images]
    test = made(root / f"{name}-test-{len(chosen)}", lambda path: unpack(archive, path, chosen))
    return Draw(root, name, archive, tuple(train), test, len(chosen))


def halves(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """(train, test): in a keyed order, the first half of each class is tested, whatever is drawn from the other."""
    train, test = [], []
    for files in by_class(names).values():
        ordered = sorted(files, key=lambda name: draw_key("half", name))
        test += ordered[: len(ordered) // 2]
        train += ordered[len(ordered) // 2 :]
    return sorted(train), sorted(test)


def by_class(names: Sequence[str]) -> dict[str, list[str]]:
    """Files named .../CLASS/FILE under the names of their classes."""
    classes: dict[str, list[str]] = {}
    for name in names:
        classes.setdefault(name.rsplit("/", 2)[-2], []).append(name)
    return classes


def listing(names: Sequence[str]) -> str:
    """Names in words."""
    return f"{', '.join(names[:-1])} and {names[-1]}"


def draw_shots(names: Sequence[str], shots: int, seed: int) -> list[str]:
    """`shots` files a class, named .../CLASS/FILE. Keyed by name: fewer shots are a part of more, and an archive that
    lacks files which are not drawn gives the same ones. Raises: DataError when a class has too few."""
    classes = by_class(names)
    fewest = min(map(len, classes.values()), default=0)
    if fewest < shots:
        raise DataError(f"expected {shots} training images in each class, found {fewest}", "lower --shots")
    return [
        name
        for label in sorted(classes)
        for name in sorted(classes[label], key=lambda name: draw_key(f"seed {seed}", name))[:shots]
    ]


def draw_key(purpose: str, name: str) -> bytes:
    """Where a file stands in a keyed order."""
    return hashlib.sha256(f"cutlayer-reproduce-1\0{purpose}\0{name}".encode()).digest()


def members(archive: Path, start: str = "") -> list[str]:
    """The files of an archive below a folder, sorted."""
    with zipfile.ZipFile(archive) as opened:
        return sorted(name for name in opened.namelist() if name.startswith(start) and not name.endswith("/"))


def unpack(archive: Path, target: Path, names: Sequence[str]) -> None:
    """These files of an archive, below `target`."""
    with zipfile.ZipFile(archive) as opened:
        for name in names:
            opened.extract(name, target)


def digest_of(front: Path) -> str:
    """Of a package's manifest, and so of the package, in hex."""
    return manifests.digest((front / manifests.MANIFEST_NAME).read_bytes()).hex()


def made(path: Path, make: Callable[[Path], object]) -> Path:
    """`path`, made whole by `make(partial)` if it is not there."""
    if not path.exists():
        partial = path.with_name(f"partial-{path.name}")
        if partial.is_dir():
            shutil.rmtree(partial)
        path.parent.mkdir(parents=True, exist_ok=True)
        make(partial)
        os.replace(partial, path)
    return path


def export_package(world: World) -> None:
    """The signed package and its backend by the real exporter, once; kappa_max and alpha are its defaults.

    Raises: ExportError.
    """
    if (world.front / "manifest.json").exists() and (world.backend / "backend.safetensors").exists():
        return
    say(f"== export, {world.package}")
    world.package_root.mkdir(parents=True, exist_ok=True)
    arguments = [word for key, value in world.model_args.items() for word in ("--model-arg", f"{key}={value}")]
    split = [] if world.split is None else ["--split", world.split]
    words = [
        sys.executable, "-m", "exporter.cli", "--model", world.model, *arguments, *split, "--weights", world.weights,
        "--int8", "--calibration", world.public, "--seed", 1, *world.always, *world.words, "-o",
        world.front,
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    texts = [str(word) for word in words]
    environment = {**os.environ, "PYTHONPATH": path}
    code = subprocess.run(texts, stdout=2, cwd=world.package_root, env=environment).returncode
    if code:
        raise ExportError(f"export-frontend ended with exit code {code}", "see the lines above")
