"""What a reproduction of shift-aware prototypes works on: images of four domains, and signed packages of client parts.

`quick` is scikit-learn's digits drawn in four ways and a very small ResNet; `full` is PACS at 64 px and a ResNet-18
pre-trained on Tiny-ImageNet. One domain is held out and never trained on, each of the others is a device's. A world
needs nothing from outside once it is made. Running cells on it is left to `reproduce_prototypes_rows`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from contract.console import say
from contract.errors import DataError, ExportError
from contract.training import PARAMETERS_NAME
from exporter.split import create
from tools import demo, demo_model
from tools.reproduce_world import ROOT, alone, draw_key, made, members, unpack

ARCHIVE, WEIGHTS = "data/pacs64.zip", "models/resnet18_64_tin200.safetensors"
PUBLIC_ARCHIVE = "data/tinyimagenet_server.zip"
PUBLIC_IMAGES = 64
DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
QUICK_DOMAINS = ("plain", "noisy", "tinted", "outlined")
PRIVATE_DIGITS, PUBLIC_DIGITS, QUICK_PER_CLASS = range(5), range(5, 10), 40
# SiLU: with ReLU two engines drift apart, as an input that is rounded to another side of 0 has another gradient.
SMALL_ARGS = {
    "small_images": True, "img_size": 32, "act_layer": "silu", "layers": (1, 1, 1, 1), "channels": (8, 16, 24, 32),
    "num_classes": len(PUBLIC_DIGITS),
}  # fmt: skip
PRETRAIN_STEPS, PRETRAIN_LIMIT_S = 100, 600.0
TRAINED_ON = "pretrained_cfg_overlay={'mean': [0.485, 0.456, 0.406], 'std': [0.229, 0.224, 0.225]}"
CUTS = {"layer1": 4, "layer3": 8}  # layers of ResNet-18 on the device
SMALL_CUTS = {"layer1": 3, "layer3": 5}

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Package:
    """One kind of part: with g or without, which distance, how deep, and how counts are told."""

    normalise: bool
    distance: str = "cosine"
    cut: str = "layer3"
    count_step: int = 1

    @property
    def name(self) -> str:
        rounded = "" if self.count_step == 1 else f"-counts{self.count_step}"
        return f"{self.cut}-{'g' if self.normalise else 'plain'}-{self.distance}{rounded}"


@dataclass(frozen=True)
class DomainWorld:
    """Domains, the model with its exporter words, and how many of a domain's images are used.

    `pool` images of a domain are in the archive at most; a seed draws `train` of them for a device, and `test` of the
    held-out domain are tested, the same for all seeds.
    """

    name: str
    root: Path
    model: tuple[str, ...]
    cuts: Mapping[str, int]
    domains: tuple[str, ...]
    train: int
    test: int
    note: str
    augment: str = "none"
    shared: Path | None = None  # where archives lie that only an export needs

    @property
    def images(self) -> Path:
        """An archive with members DOMAIN/CLASS/FILE."""
        return self.root / "images.zip"

    @property
    def public(self) -> Path:
        """A folder of images of no domain, as the model's owner has them: the scale of g is taken on these."""
        return self.root / "public"

    @cached_property
    def _members(self) -> list[str]:
        return members(self.images)

    def names(self, domain: str) -> list[str]:
        return [name for name in self._members if name.startswith(f"{domain}/")]

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(sorted({name.split("/")[1] for name in self._members}))

    def devices(self, held_out: str) -> tuple[str, ...]:
        """One for each domain that is trained on, by its name."""
        return tuple(domain.replace("_", "-") for domain in self.domains if domain != held_out)

    def train_folder(self, root: Path, device: str, seed: int, classes: Sequence[str] | None = None) -> Path:
        """A device's images below `root`, drawn by the seed; `classes` names those that it has, all by default."""
        (domain,) = (each for each in self.domains if each.replace("_", "-") == device)
        order = sorted(self.names(domain), key=lambda name: draw_key(f"train, seed {seed}", name))
        chosen = [name for name in order[: self.train] if classes is None or name.split("/")[1] in classes]
        label = "" if classes is None else "-" + "-".join(classes)
        return made(root / f"{device}-seed{seed}{label}", lambda path: self._take(chosen, path))

    def test_folder(self, root: Path, domain: str) -> Path:
        """Images of a held-out domain below `root`: the same for every seed."""
        chosen = sorted(self.names(domain), key=lambda name: draw_key("test", name))[: self.test]
        return made(root / f"{domain}-test", lambda path: self._take(chosen, path))

    def _take(self, names: Sequence[str], folder: Path) -> None:
        with zipfile.ZipFile(self.images) as opened:
            for name in names:
                path = folder.joinpath(*name.split("/")[1:])
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(opened.read(name))

    def front(self, package: Package) -> Path:
        """The signed package; the backend folder lies beside it as NAME.backend."""
        return self.root / "packages" / package.name

    @property
    def publisher(self) -> Path:
        """Public key of the packages' signer."""
        return self.root / "packages" / "signing-key.pub.pem"


def quick_domains(root: Path, train: int, test: int) -> DomainWorld:
    """Digits 0 to 4 in four ways; minutes on two cores."""
    weights = root / "weights.safetensors"
    words = [
        "--model",
        "resnet18",
        *(word for each in SMALL_ARGS.items() for word in ("--model-arg", "=".join(map(str, each)))),
    ]
    words += ["--weights", str(weights)]
    note = f"scikit-learn's digits 0 to 4 in four ways, {train} training images a device, 32 px; pre-trained on 5 to 9"
    world = DomainWorld("quick", root, tuple(words), SMALL_CUTS, QUICK_DOMAINS, train, test, note)
    made(world.images, _draw_domains)
    made(world.public, _draw_public)
    return world


def full_domains(root: Path, shared: Path, train: int, test: int, pool: int | None = None) -> DomainWorld:
    """PACS. Raises: DataError when neither the world nor the archive has the images."""
    words = ("--model", "resnet18", "--model-arg", "num_classes=200", "--model-arg", "img_size=64")
    words = (*words, "--model-arg", TRAINED_ON, "--weights", str(shared / WEIGHTS))
    note = f"PACS at 64 px, {train} training images a domain, {test} tested; ResNet-18 pre-trained on Tiny-ImageNet"
    world = DomainWorld("full", root, words, CUTS, DOMAINS, train, test, note, "crop=4,flip", shared)
    made(world.images, lambda path: _pack(_needed(shared / ARCHIVE), path, pool))
    return world


def _needed(path: Path) -> Path:
    """Raises: DataError."""
    if not path.is_file():
        raise DataError(
            f"the full reproduction needs {path}, which does not exist",
            f"give --shared DIR, where DIR holds {ARCHIVE}, {PUBLIC_ARCHIVE} and {WEIGHTS}; or use --quick",
        )
    return path


def _take_public(archive: Path, folder: Path) -> None:
    names = members(archive, "tinyimagenet/train/")
    unpack(archive, folder, sorted(names, key=lambda name: draw_key("public", name))[:PUBLIC_IMAGES])


def _pack(archive: Path, target: Path, pool: int | None) -> None:
    """Members pacs64/DOMAIN/CLASS/FILE as DOMAIN/CLASS/FILE, at most `pool` of a domain, classes in proportion."""
    with zipfile.ZipFile(archive) as source, zipfile.ZipFile(target, "w") as packed:
        for domain in DOMAINS:
            names = members(archive, f"pacs64/{domain}/")
            for name in sorted(names, key=lambda name: draw_key("pool", name))[:pool]:
                packed.writestr(name.removeprefix("pacs64/"), source.read(name))


def _draw_digits(folder: Path, digits: range) -> None:
    """Files WAY/DIGIT/NUMBER.png: no picture of a digit is drawn in two ways."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    small = (images.reshape(-1, 8, 8) * (255 / 16)).round().astype(np.uint8)
    rng = np.random.default_rng(0)
    ways: dict[str, Callable[[Pixels], Pixels]] = {
        "plain": lambda grey: np.repeat(grey[..., None], 3, 2),
        "noisy": lambda grey: _disturb(grey, rng),
        "tinted": lambda grey: _tint(grey, rng),
        "outlined": _outline,
    }
    for digit in digits:
        chosen = np.flatnonzero(labels == digit)
        for place, (way, draw) in enumerate(ways.items()):
            for number in chosen[place * QUICK_PER_CLASS : (place + 1) * QUICK_PER_CLASS]:
                grey = np.asarray(Image.fromarray(small[number]).resize((32, 32), Image.Resampling.BICUBIC))
                path = folder / way / str(digit) / f"{number:04}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(draw(grey)).save(path)


def _draw_domains(target: Path) -> None:
    """An archive of the private digits."""
    folder = target.with_name("digits")
    _draw_digits(folder, PRIVATE_DIGITS)
    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted(folder.rglob("*.png")):
            archive.write(path, "/".join(path.parts[-3:]))
    shutil.rmtree(folder)


def _draw_public(folder: Path) -> None:
    """The public digits in all ways, as FOLDER/DIGIT/WAY-NUMBER.png."""
    drawn = folder.with_name("public-digits")
    _draw_digits(drawn, PUBLIC_DIGITS)
    for path in sorted(drawn.rglob("*.png")):
        way, digit, name = path.parts[-3:]
        (folder / digit).mkdir(parents=True, exist_ok=True)
        path.rename(folder / digit / f"{way}-{name}")
    shutil.rmtree(drawn)


def _pretrain(path: Path, public: Path) -> None:
    """The owner's model: a classifier of the public digits."""
    torch.manual_seed(0)
    model = create("resnet18", False, SMALL_ARGS)
    plan = demo_model.Pretraining(PRETRAIN_STEPS, PRETRAIN_LIMIT_S, 0)
    demo_model.make_weights(path, model, public, demo.rule_of(model), plan)


def _tint(pixels: Pixels, rng: np.random.Generator) -> Pixels:
    """In a bright colour on a dark one."""
    ground, ink = rng.uniform(0, 100, 3), rng.uniform(140, 255, 3)
    share = pixels[..., None] / 255.0
    return (ground * (1 - share) + ink * share).astype(np.uint8)


def _disturb(pixels: Pixels, rng: np.random.Generator) -> Pixels:
    """Fainter, under noise."""
    return np.clip(0.6 * pixels[..., None] + 40 + rng.normal(scale=40, size=(*pixels.shape, 3)), 0, 255).astype(
        np.uint8
    )


def _outline(pixels: Pixels) -> Pixels:
    """Bright lines where the grey value changes."""
    rows, columns = np.gradient(pixels.astype(np.float64))
    edges = np.hypot(rows, columns)
    return np.repeat((255 * edges / max(edges.max(), 1.0)).astype(np.uint8)[..., None], 3, 2)


def export_domain_package(world: DomainWorld, package: Package) -> Path:
    """The signed package and its backend by the real exporter, once. Raises: ExportError."""
    front = world.front(package)
    with alone(front.parent):  # the first export makes the key
        if (front / "manifest.json").exists() and front.with_name(f"{front.name}.backend").exists():
            return front
        say(f"== export {front.name}")
        if world.shared is not None:
            _needed(world.shared / WEIGHTS)
            made(world.public, lambda path: _take_public(_needed(world.shared / PUBLIC_ARCHIVE), path))
        else:
            made(world.root / "weights.safetensors", lambda path: _pretrain(path, world.public))
        words = [
            sys.executable, "-m", "exporter.cli", *world.model, "--for", "prototypes", "--cuts",
            world.cuts[package.cut], "--distance", package.distance, "--count-step", package.count_step,
            *(["--calibration", world.public] if package.normalise else ["--no-normalise"]),
            "--augment", world.augment, "--name", front.name, "--seed", 0, "-o", front,
        ]  # fmt: skip
        code = subprocess.run([str(word) for word in words], stdout=2, cwd=ROOT).returncode
        if code:
            raise ExportError(f"export-frontend ended with exit code {code}", "see the lines above")
        for own in (front / PARAMETERS_NAME, front.with_name(f"{front.name}.backend") / "model.safetensors"):
            _share(own, front.parent)
    return front


def _share(own: Path, packages: Path) -> None:
    """One file on the disk for equal weights: packages of one cut differ by their graphs alone."""
    for other in sorted(packages.glob(f"*/{own.name}")):
        if other != own and other.read_bytes() == own.read_bytes():
            own.unlink()
            os.link(other, own)
            return
