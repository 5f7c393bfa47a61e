"""What a reproduction works on: a pre-trained model, the server's public images, sites with few shots, one package.

Two worlds: `quick` is scikit-learn's digits and a small model, made in minutes from what is installed; `full` is
CIFAR-10 as the private task, a Tiny-ImageNet subset as the public one, and a ViT-S trained on it, from archives.
Running rows on it is left to `reproduce_rows`.
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

import torch

from contract.console import say
from contract.errors import DataError, ExportError
from contract.image_folder import scan
from tools import demo, demo_data, demo_model

ROOT = Path(__file__).parents[1]
FULL_MODEL = "vit_small_patch16_224"
FULL_ARGS = {"img_size": 64, "patch_size": 8, "num_classes": 200}
FULL_SPLIT = 8
ARCHIVES = ("data/cifar10.zip", "data/tinyimagenet_server.zip", "models/vit_small_p8_64_tin200.safetensors")
DEVICE = "device-a"  # the one device of the full world's site


@dataclass(frozen=True)
class SiteFolders:
    """One site: its devices' training and test images, one folder per class in each, and the class list."""

    train: Mapping[str, Path]
    test: Mapping[str, Path]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class World:
    """Model, public images, and the sites that can be drawn; `site(shots, seed)` makes its folders on first use."""

    name: str
    root: Path
    model: str
    model_args: Mapping[str, int]
    weights: Path
    public: Path
    note: str
    site: Callable[[int, int], SiteFolders]

    @property
    def front(self) -> Path:
        return self.root / "front"

    @property
    def backend(self) -> Path:
        return self.root / "front.backend"

    @property
    def publisher(self) -> Path:
        """Public key of the package's signer."""
        return self.root / "signing-key.pub.pem"


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Several commands may share a folder: one prepares it while the others wait."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def quick_world(root: Path) -> World:
    """Digits 0 to 4 are public, 5 to 9 private; the model is pre-trained here, as in the demo."""

    def site(shots: int, seed: int) -> SiteFolders:
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
    note = "scikit-learn's digits: 0-4 public, 5-9 private, two devices"
    return World("quick", root, demo.DIGITS_MODEL, arguments, weights, public, note, site)


def full_world(root: Path, shared: Path, test_images: int | None) -> World:
    """CIFAR-10 at 64 px on one device. Raises: DataError when an archive is missing."""
    archive, public_archive, weights = (shared / name for name in ARCHIVES)
    for path in (archive, public_archive, weights):
        if not path.is_file():
            raise DataError(
                f"the full reproduction needs {path}, which does not exist",
                f"give --shared DIR, where DIR holds {listing(ARCHIVES)}; or use --quick, which needs no files",
            )
    public = made(root / "public", lambda path: unpack(public_archive, path, members(public_archive)))
    tested = members(archive, "cifar10/test/")
    chosen = tested if test_images is None else sorted(tested, key=lambda name: draw_key("test", name))[:test_images]
    test = made(root / f"cifar10-test-{len(chosen)}", lambda path: unpack(archive, path, chosen))
    classes = tuple(sorted({name.split("/")[2] for name in tested}))

    def site(shots: int, seed: int) -> SiteFolders:
        drawn = draw_shots(members(archive, "cifar10/train/"), shots, seed)
        train = made(root / f"cifar10-{shots}shot-seed{seed}", lambda path: unpack(archive, path, drawn))
        folders = ({DEVICE: train / "cifar10" / "train"}, {DEVICE: test / "cifar10" / "test"})
        return SiteFolders(*folders, classes)

    note = f"CIFAR-10 at 64 px, {len(chosen)} test images, one device; Tiny-ImageNet subset public"
    images = public / "tinyimagenet" / "train"
    return World("full", root, FULL_MODEL, FULL_ARGS, weights, images, note, site)


def listing(names: Sequence[str]) -> str:
    """Names in words."""
    return f"{', '.join(names[:-1])} and {names[-1]}"


def draw_shots(names: Sequence[str], shots: int, seed: int) -> list[str]:
    """`shots` files a class, named .../CLASS/FILE. Keyed by name: fewer shots are a part of more, and an archive that
    lacks files which are not drawn gives the same ones. Raises: DataError when a class has too few."""
    by_class: dict[str, list[str]] = {}
    for name in names:
        by_class.setdefault(name.rsplit("/", 2)[-2], []).append(name)
    fewest = min(map(len, by_class.values()), default=0)
    if fewest < shots:
        raise DataError(f"expected {shots} training images in each class, found {fewest}", "lower --shots")
    return [
        name
        for label in sorted(by_class)
        for name in sorted(by_class[label], key=lambda name: draw_key(f"seed {seed}", name))[:shots]
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
    say("== export")
    arguments = [word for key, value in world.model_args.items() for word in ("--model-arg", f"{key}={value}")]
    split = ["--split", FULL_SPLIT] if world.name == "full" else []
    words = [
        sys.executable, "-m", "exporter.cli", "--model", world.model, *arguments, *split, "--weights", world.weights,
        "--int8", "--calibration", world.public, "--seed", 1, "-o", world.front,
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    texts = [str(word) for word in words]
    code = subprocess.run(texts, stdout=sys.stderr, cwd=world.root, env={**os.environ, "PYTHONPATH": path}).returncode
    if code:
        raise ExportError(f"export-frontend ended with exit code {code}", "see the lines above")
