"""What a reproduction of EEFT works on: pools of images, scenarios that deal them to devices, signed packages.

A scenario is groups of devices; those of a group have one task, and which devices are a group is what the server is to
find out. `full` has CIFAR-10, PACS and scikit-learn's digits at 64 px around a ResNet-18 trained on Tiny-ImageNet;
`quick` has digits alone around a very small ResNet. Running rows is left to `reproduce_eeft_rows`.
"""

from __future__ import annotations

import lzma
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from contract.console import say
from contract.errors import DataError, ExportError
from contract.signature import generate, save_private, save_public
from exporter.plan import ModuleChoices
from exporter.split import create
from tools import demo, demo_data, demo_model
from tools.reproduce_split_world import take
from tools.reproduce_world import ROOT, TRAINED_ON, alone, by_class, draw_key, made, members

CIFAR, PACS, WEIGHTS = "data/cifar10.zip", "data/pacs64.zip", "models/resnet18_64_tin200.safetensors"
DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
DIGITS = tuple(map(str, range(10)))
PRETRAINING = demo_model.Pretraining(100, 600.0, 1)  # quick: the steps decide, so that slow machines have the same
# Images of a class that are packed: (train, test); fewer where a class has less, half of it then.
PACKED = {"cifar10": (1000, 200), "pacs": (150, 40), "digits": (90, 40)}


@dataclass(frozen=True)
class Group:
    """Devices with one task: classes of a pool, at most `shots` training images of each shared out among them."""

    name: str
    pool: str
    classes: tuple[str, ...]
    devices: int
    shots: int

    @property
    def device_names(self) -> tuple[str, ...]:
        return tuple(f"{self.name}-{number}" for number in range(1, self.devices + 1))


@dataclass(frozen=True)
class Scenario:
    """Groups that are federated together."""

    name: str
    groups: tuple[Group, ...]
    local_epochs: int  # of a round
    note: str

    @property
    def devices(self) -> dict[str, Group]:
        return {device: group for group in self.groups for device in group.device_names}


@dataclass(frozen=True)
class EeftWorld:
    """A pre-trained model, and scenarios on the images of one archive: POOL/{train,test}/CLASS/FILE."""

    name: str
    root: Path
    model: str
    model_args: Mapping[str, Any]
    weights: Path
    scenarios: Mapping[str, Scenario]

    @property
    def images(self) -> Path:
        return self.root / "images.zip"

    @property
    def publisher(self) -> Path:
        """Public key of the packages' signer."""
        return self.root / "signing-key.pub.pem"

    def train_folder(self, scenario: Scenario, device: str, seed: int) -> Path:
        """A device's images, dealt by the seed."""
        group = scenario.devices[device]
        own = deal(self._names(group, "train"), group, seed)[device]
        path = self.root / "dealt" / f"{scenario.name}-seed{seed}" / device
        return made(path, lambda target: take(self.images, own, target))

    def test_folder(self, scenario: Scenario, group: Group) -> Path:
        names = self._names(group, "test")
        return made(self.root / "test" / scenario.name / group.name, lambda target: take(self.images, names, target))

    def package(self, modules: ModuleChoices | None) -> Path:
        """The package around frozen blocks, or (None) that of the whole model."""
        if modules is None:
            return self.root / "body"
        text = f"modules-k{modules.skips}-gamma{modules.complexity:g}-alpha{modules.start_alpha:g}"
        return self.root / (text if modules.start_skips == 1.0 else f"{text}-skips{modules.start_skips:g}")

    def _names(self, group: Group, part: str) -> list[str]:
        found = members(self.images, f"{group.pool}/{part}/")
        return [name for name in found if name.split("/")[2] in group.classes]


def deal(names: Sequence[str], group: Group, seed: int) -> dict[str, list[str]]:
    """`shots` of each class in an order that the seed keys, to the devices in turn, so that each gets as many or one
    less of every class."""
    dealt: dict[str, list[str]] = {device: [] for device in group.device_names}
    turns = list(dealt.values())
    for place, files in enumerate(by_class(names).values()):
        order = sorted(files, key=lambda name: draw_key(f"{group.name}, seed {seed}", name))[: group.shots]
        for number, name in enumerate(order):
            turns[(place + number) % len(turns)].append(name)
    return {device: sorted(own) for device, own in dealt.items()}


def full_world(root: Path, shared: Path) -> EeftWorld:
    """Raises: DataError when neither the world nor the archives have the images."""
    types = [Group(f"type-{n + 1}", "cifar10", CIFAR_CLASSES[2 * n : 2 * n + 2], 4, 1000) for n in range(5)]
    domains = [Group(name.replace("_", "-"), f"pacs-{name}", PACS_CLASSES, 5, 107) for name in DOMAINS]
    tasks = [
        Group("cifar10", "cifar10", CIFAR_CLASSES, 5, 100),
        Group("pacs-photo", "pacs-photo", PACS_CLASSES, 5, 150),
        Group("digits", "digits", DIGITS, 5, 90),
    ]
    scenarios = [
        Scenario("user", tuple(types), 1, "CIFAR-10, 5 types of 2 classes on 4 devices each, 500 images a device"),
        Scenario("environment", tuple(domains), 3, "PACS, 4 domains on 5 devices each, about 150 images a device"),
        Scenario(
            "task", tuple(tasks), 3, "CIFAR-10, PACS-photo and digits on 5 devices each, 150 to 200 images a device"
        ),
    ]
    arguments = {"num_classes": 200, "img_size": 64, "pretrained_cfg_overlay": TRAINED_ON}
    world = EeftWorld("full", root, "resnet18", arguments, shared / WEIGHTS, {each.name: each for each in scenarios})
    packed = root / "images.zip.xz"

    def make(path: Path) -> None:
        if packed.exists():
            path.write_bytes(lzma.decompress(packed.read_bytes()))
            return
        require([shared / CIFAR, shared / PACS])
        with zipfile.ZipFile(path, "w") as archive:
            pack_pool(archive, shared / CIFAR, "cifar10", "cifar10", PACKED["cifar10"])
            for domain in DOMAINS:
                pack_pool(archive, shared / PACS, f"pacs64/{domain}", f"pacs-{domain}", PACKED["pacs"])
            pack_digits(archive, root / "digits")

    made(world.images, make)
    return world


def quick_world(root: Path) -> EeftWorld:
    """Digits on four devices, around a ResNet that is pre-trained here on other digits."""
    users = [Group("type-1", "digits", ("5", "6"), 2, 50), Group("type-2", "digits", ("7", "8"), 2, 50)]
    tasks = [Group("three", "digits", ("5", "6", "7"), 2, 50), Group("two", "digits", ("8", "9"), 2, 50)]
    scenarios = [
        Scenario("user", tuple(users), 3, "scikit-learn's digits 5 and 6, 7 and 8 on two devices each, 32 px"),
        Scenario("task", tuple(tasks), 3, "scikit-learn's digits 5 to 7, 8 and 9 on two devices each, 32 px"),
    ]
    arguments = {
        "small_images": True, "act_layer": "silu", "layers": (1, 1, 1, 1), "channels": (8, 16, 24, 32),
        "num_classes": 5,
    }  # fmt: skip

    def pretrain(path: Path) -> None:
        digits = made(root / "digits-public", lambda target: demo_data.digits(target, 1, 1))
        torch.manual_seed(1)
        model = create("resnet18", False, arguments)
        demo_model.make_weights(path, model, digits / "public", demo.rule_of(model), PRETRAINING)

    weights = made(root / "pretrained.safetensors", pretrain)
    world = EeftWorld("quick", root, "resnet18", arguments, weights, {each.name: each for each in scenarios})

    def make(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            pack_digits(archive, root / "digits")

    made(world.images, make)
    return world


def require(paths: Iterable[Path]) -> None:
    """Raises: DataError for what is not there."""
    for path in paths:
        if not path.is_file():
            raise DataError(
                f"the full reproduction needs {path}, which does not exist",
                f"give --shared DIR, where DIR holds {CIFAR}, {PACS} and {WEIGHTS}; or use --quick",
            )


def pack_pool(archive: zipfile.ZipFile, source: Path, start: str, pool: str, counts: tuple[int, int]) -> None:
    """Draw training and test images of each class; where an archive has no test part, the two are apart."""
    with zipfile.ZipFile(source) as opened:
        names = [name for name in opened.namelist() if name.startswith(f"{start}/") and not name.endswith("/")]
        for part, chosen in parts_of(names, counts).items():
            for name in chosen:
                archive.writestr(f"{pool}/{part}/{'/'.join(name.split('/')[-2:])}", opened.read(name))


def parts_of(names: Sequence[str], counts: tuple[int, int]) -> dict[str, list[str]]:
    """Names of .../[train|test/]CLASS/FILE that are drawn, (train, test) of each class or half of what there is."""
    split = any(name.split("/")[-3] == "test" for name in names)
    chosen: dict[str, list[str]] = {"train": [], "test": []}
    for part, wanted in zip(("test", "train"), reversed(counts), strict=True):
        pool = [name for name in names if name.split("/")[-3] == part] if split else names
        for files in by_class(pool).values():
            order = sorted(files, key=lambda name: draw_key("part", name))
            if not split:
                tested = min(counts[1], len(order) // 2)
                order = order[:tested] if part == "test" else order[tested:]
            chosen[part] += order[:wanted]
    return chosen


def pack_digits(archive: zipfile.ZipFile, folder: Path) -> None:
    """scikit-learn's digits as the pool "digits"."""
    demo_data.all_digits(folder)
    files = [f"digits/{'/'.join(path.parts[-2:])}" for path in sorted(folder.glob("*/*.png"))]
    for part, chosen in parts_of(files, PACKED["digits"]).items():
        for name in chosen:
            label, file = name.split("/")[-2:]
            archive.write(folder / label / file, f"digits/{part}/{label}/{file}")
    shutil.rmtree(folder)


def export_modules(world: EeftWorld, modules: ModuleChoices | None) -> Path:
    """The signed package and its backend by the real exporter, once. Raises: ExportError, DataError."""
    front, key = world.package(modules), world.publisher.with_name("signing-key.pem")
    with alone(world.root / "making"):
        if not key.exists():  # here, so that several commands can export at once
            made_key = generate()
            save_public(world.publisher, made_key.public_key())
            save_private(key, made_key)
    with alone(world.root / "locks" / front.name):
        if (front / "manifest.json").exists() and front.with_name(f"{front.name}.backend").exists():
            return front
        require([world.weights])
        say(f"== export {front.name}")
        arguments = [word for key, value in world.model_args.items() for word in ("--model-arg", f"{key}={value}")]
        kind = ["--for", "fed_avg_own_heads"]
        if modules is not None:
            kind = ["--for", "eeft", "--skips", modules.skips, "--complexity", modules.complexity]
            kind += [f"--start-alpha={modules.start_alpha}", "--start-skips", modules.start_skips]
        words = [
            sys.executable, "-m", "exporter.cli", "--model", world.model, *arguments, "--weights", world.weights,
            *kind, "--release-whole-model", "--augment", "crop=4,flip" if world.name == "full" else "crop=2",
            "--signing-key", key, "--seed", 0, "-o", front,
        ]  # fmt: skip
        code = subprocess.run([str(word) for word in words], stdout=2, cwd=ROOT).returncode
    if code:
        raise ExportError(f"export-frontend ended with exit code {code}", "see the lines above")
    return front
