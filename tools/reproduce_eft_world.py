"""What a reproduction of EFTViT works on: an archive of drawn images, Dirichlet shares of devices, signed packages.

`quick` is scikit-learn's digits 5 to 9 and a small ViT that is pre-trained here on 0 to 4; `full` is 5,000 images of
CIFAR-10 at 64 px and a ViT-S that was pre-trained on Tiny-ImageNet; `pacs` is the four domains of PACS with that ViT-S,
each domain on devices of its own. A world needs nothing from outside once it is made.
Running cells on it is left to `reproduce_eft_rows`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from contract.console import say
from contract.errors import DataError, ExportError
from tools import demo
from tools.reproduce_split_world import ARCHIVE, FULL_CLASSES, FULL_SHOTS, pack, take
from tools.reproduce_world import (
    FULL_ARGS,
    FULL_MODEL,
    FULL_WEIGHTS,
    ROOT,
    alone,
    draw_key,
    made,
    members,
    quick_world,
)

QUICK_TRAIN, QUICK_TEST = 80, 60  # of each digit
PACS, DOMAINS = "data/pacs64.zip", ("art_painting", "cartoon", "photo", "sketch")
PACS_TRAIN, PACS_TEST = 180, 30  # of each class of each domain, at most
LEAST_IMAGES = {"quick": 2, "full": 10, "pacs": 10}  # of a device; a draw with fewer is drawn again
DRAWS = 1000
PEFT = {"fed_head": "head", "fed_bias": "bias", "fed_prompt": "prompt", "fed_lora": "lora"}
METHODS = ("eft_vit", *PEFT, "fed_full", "fed_bfpt")


@dataclass(frozen=True)
class Variant:
    """What of a cell decides about the package: method, mask ratio r, and for EFTViT the local blocks M_l."""

    method: str
    ratio: float
    local: int

    @property
    def name(self) -> str:
        masked = f"-r{self.ratio:g}" if self.ratio else ""
        return f"eft_vit-{self.local}-r{self.ratio:g}" if self.method == "eft_vit" else f"{self.method}{masked}"

    @property
    def words(self) -> tuple[str, ...]:
        """The exporter's, beyond model and weights."""
        kept = f"{1 - self.ratio:g}"
        if self.method == "eft_vit":
            coded = ("--activations", "float16", "--gradient", "float16")
            return ("--for", "eft_vit", "--split", str(self.local), "--keep-patches", kept, *coded)
        if self.method == "fed_bfpt":
            return ("--for", "fed_bfpt")
        masked = ("--keep-patches", kept) if self.ratio else ()
        return ("--for", "fed_avg", "--peft", PEFT.get(self.method, "all"), *masked)


@dataclass(frozen=True)
class EftWorld:
    """Model and weights, devices, images."""

    name: str
    root: Path
    model: str
    model_args: Mapping[str, Any]
    weights: Path
    devices: tuple[str, ...]
    note: str
    domains: tuple[str, ...] = ()  # files and devices are then named DOMAIN-...

    @property
    def images(self) -> Path:
        """An archive with members .../train/CLASS/FILE and .../test/CLASS/FILE."""
        return self.root / "images.zip"

    def names(self, part: str) -> list[str]:
        return [name for name in members(self.images) if name.split("/")[-3] == part]

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(sorted({name.split("/")[-2] for name in members(self.images)}))

    def test_folder(self) -> Path:
        return made(self.root / "test", lambda path: take(self.images, self.names("test"), path))

    def train_folder(self, device: str, beta: float, seed: int) -> Path:
        """A device's images, dealt by beta and seed."""
        folder = self.root / "dealt" / f"beta{beta:g}-seed{seed}"

        def make(path: Path) -> None:
            for each, own in self.deal(beta, seed).items():
                (path / each).mkdir(parents=True)
                take(self.images, own, path / each)

        return made(folder, make) / device

    def deal(self, beta: float, seed: int) -> dict[str, list[str]]:
        """Of each class a share of Dirichlet(beta) to every device, domain by domain. Raises: DataError when no draw
        leaves enough."""
        names = sorted(self.names("train"), key=lambda name: draw_key(f"deal, seed {seed}", name))
        rng = np.random.default_rng([seed, round(1000 * beta)])
        if not self.domains:
            return self._deal(rng, names, self.devices, beta)
        dealt: dict[str, list[str]] = {}
        for domain in self.domains:
            own = [name for name in names if name.split("/")[-1].startswith(f"{domain}-")]
            devices = [device for device in self.devices if device.startswith(f"{domain}-")]
            dealt |= self._deal(rng, own, devices, beta)
        return dealt

    def _deal(
        self, rng: np.random.Generator, names: Sequence[str], devices: Sequence[str], beta: float
    ) -> dict[str, list[str]]:
        least = LEAST_IMAGES[self.name]
        for _ in range(DRAWS):
            dealt: dict[str, list[str]] = {device: [] for device in devices}
            for label in self.classes:
                own = [name for name in names if name.split("/")[-2] == label]
                edges = np.rint(np.cumsum(rng.dirichlet([beta] * len(devices))) * len(own)).astype(int)
                for device, start, end in zip(devices, [0, *edges[:-1]], edges, strict=True):
                    dealt[device] += own[start:end]
            if min(map(len, dealt.values())) >= least:
                return {device: sorted(own) for device, own in dealt.items()}
        raise DataError(f"no deal of Dirichlet({beta:g}) leaves every device {least} images", "raise --betas")

    def package(self, variant: Variant) -> Path:
        """The package; the backend folder lies beside it as NAME.backend."""
        return self.root / "packages" / variant.name

    @property
    def publisher(self) -> Path:
        return self.root / "packages" / "signing-key.pub.pem"


def quick_eft_world(root: Path) -> EftWorld:
    """Digits on six devices, a ViT of six blocks: minutes on two cores."""
    quick = quick_world(root / "pretrained")

    def make(path: Path) -> None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        rng = np.random.default_rng(0)
        with zipfile.ZipFile(path, "w") as archive:
            for label in range(5, 10):
                order = rng.permutation(np.flatnonzero(labels == label))[: QUICK_TRAIN + QUICK_TEST]
                for place, number in enumerate(order):
                    part = "train" if place < QUICK_TRAIN else "test"
                    archive.writestr(f"digits/{part}/{label}/{number:04}.png", png_of(images[number].reshape(8, 8)))

    root.mkdir(parents=True, exist_ok=True)
    made(root / "images.zip", make)
    devices = tuple(f"device-{number:02}" for number in range(1, 7))
    note = f"scikit-learn's digits 5 to 9 at 32 px, {5 * QUICK_TRAIN} training images on 6 devices"
    return EftWorld("quick", root, demo.DIGITS_MODEL, quick.model_args, quick.weights, devices, note)


def png_of(digit: np.ndarray) -> bytes:
    """A digit (8, 8), 0 to 16, as a picture of the demo's size."""
    import io

    from PIL import Image

    from tools.demo_data import DIGIT_SIDE_PX

    small = Image.fromarray((digit * (255 / 16)).round().astype(np.uint8))
    stream = io.BytesIO()
    small.resize((DIGIT_SIDE_PX, DIGIT_SIDE_PX), Image.Resampling.BICUBIC).convert("RGB").save(stream, "png")
    return stream.getvalue()


def full_eft_world(root: Path, shared: Path, test_images: int, devices: int) -> EftWorld:
    """CIFAR-10 and a ViT-S. Raises: DataError when neither the world nor `shared` has images or weights."""
    names = tuple(f"device-{number:02}" for number in range(1, devices + 1))
    count = FULL_SHOTS * FULL_CLASSES
    note = f"CIFAR-10 at 64 px, {count} training images on {devices} devices, {test_images} test images"
    make_images(root, shared / ARCHIVE, lambda archive, path: pack(archive, path, test_images))
    return EftWorld("full", root, FULL_MODEL, FULL_ARGS, weights_of(root, shared), names, note)


def pacs_eft_world(root: Path, shared: Path, devices: int) -> EftWorld:
    """PACS and a ViT-S; every domain has as many devices. Raises: as `full_eft_world`."""
    each = range(1, devices // len(DOMAINS) + 1)
    names = tuple(f"{domain}-{number}" for domain in DOMAINS for number in each)
    make_images(root, shared / PACS, pack_domains)
    note = (
        f"PACS at 64 px, at most {PACS_TRAIN} training images of a class of a domain, each domain on {len(each)} of "
        f"{len(names)} devices, {PACS_TEST} test images of each class of each domain"
    )
    return EftWorld("pacs", root, FULL_MODEL, FULL_ARGS, weights_of(root, shared), names, note, DOMAINS)


def make_images(root: Path, archive: Path, pack_into: Callable[[Path, Path], None]) -> None:
    """The world's archive of drawn images, once."""
    root.mkdir(parents=True, exist_ok=True)

    def make(path: Path) -> None:
        require(archive)
        pack_into(archive, path)

    made(root / "images.zip", make)


def weights_of(root: Path, shared: Path) -> Path:
    """Where the ViT-S lies: in the shared folder, or beside the images."""
    weights = shared / FULL_WEIGHTS
    if not weights.is_file():
        weights = root / Path(FULL_WEIGHTS).name
        require(weights)
    return weights


def pack_domains(archive: Path, target: Path) -> None:
    """Members pacs64/DOMAIN/CLASS/FILE as pacs/PART/CLASS/DOMAIN-FILE; as many for tests in each class and domain."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in members(archive):
        _, domain, label, _ = name.split("/")
        found.setdefault((domain, label), []).append(name)
    with zipfile.ZipFile(archive) as source, zipfile.ZipFile(target, "w") as packed:
        for (domain, label), names in sorted(found.items()):
            drawn = sorted(names, key=lambda name: draw_key("pacs", name))[: PACS_TEST + PACS_TRAIN]
            for place, name in enumerate(drawn):
                part = "test" if place < PACS_TEST else "train"
                packed.writestr(f"pacs/{part}/{label}/{domain}-{name.split('/')[-1]}", source.read(name))


def require(path: Path) -> None:
    if not path.is_file():
        raise DataError(
            f"the full reproduction needs {path}, which does not exist",
            f"give --shared DIR with {ARCHIVE}, {PACS} and {FULL_WEIGHTS} in it; or use --quick, which needs no files",
        )


def export_variant(world: EftWorld, variant: Variant) -> Path:
    """The signed package of a variant and its backend by the real exporter, once. Raises: ExportError."""
    front = world.package(variant)
    with alone(front.parent / f"making-{variant.name}"):
        if (front / "manifest.json").exists() and front.with_name(f"{front.name}.backend").exists():
            return front
        with alone(front.parent / "key"):  # the first export makes the key
            key = front.parent / "signing-key.pem"
            if not key.exists():
                make_key(key)
        say(f"== export {front.name}")
        arguments = [word for key_, value in world.model_args.items() for word in ("--model-arg", f"{key_}={value}")]
        words = [
            sys.executable, "-m", "exporter.cli", "--model", world.model, *arguments, "--weights", world.weights,
            *variant.words, "--release-whole-model", "--classes", len(world.classes), "--optimiser", "adamw",
            "--weight-decay", 0.05, "--augment", augment_of(world), "--seed", 0, "-o", front,
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        code = subprocess.run(list(map(str, words)), stdout=2, cwd=ROOT, env=environment).returncode
    if code:
        raise ExportError(f"export-frontend ended with exit code {code}", "see the lines above")
    return front


def augment_of(world: EftWorld) -> str:
    """A mirrored digit is another sign."""
    return "crop=2" if world.name == "quick" else "crop=4,flip,brightness=0.2"


def make_key(path: Path) -> None:
    from contract.signature import generate, save_private, save_public

    key = generate()
    save_public(path.with_suffix(".pub.pem"), key.public_key())
    save_private(path, key)


def folders_of(world: EftWorld, deals: Sequence[tuple[float, int]]) -> None:
    """Every folder of images that these deals need."""
    world.test_folder()
    for beta, seed in deals:
        world.train_folder(world.devices[0], beta, seed)
