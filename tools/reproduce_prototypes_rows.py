"""One row of a reproduction of shift-aware prototypes: a method, a held-out domain, a seed; every round with its cost.

Strategy and devices are the product's own, joined in one process by `simulation`. What is judged after each round is
the averaged part, g and the averaged rest on a domain that no device has, on running statistics. Nothing is chosen on
test images: the best round is told beside the last one because the paper tells it.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from contract.image_folder import scan
from contract.images import ImageRule, load_pixels, normalise, resize
from contract.training import TrainingCut
from edge_runtime.install import Installed
from edge_runtime.meters import Meter
from exporter import prototypes
from exporter.models import family_of
from server_runtime import backend as backends
from server_runtime import strategies
from server_runtime.split_model import Shipped
from server_runtime.strategies import Ask, Metric, Reply, Settings, Site, State
from tools.reproduce_devices import DeviceKind, Packages, make_device, part_opener
from tools.reproduce_energy import RowEnergy
from tools.reproduce_prototypes_world import DomainWorld, Package, export_domain_package
from tools.reproduce_split_rows import named
from tools.simulation import Answering, Answers, Terms, adapt
from tools.torch_trainer import open_torch_trainer
from tools.torch_worker import OpenPart, PartDevice, ReadImages, device_name

LABEL_MODE = "logit-gradient"
RUN, SITE = "reproduce", "site"
JUDGED_AT_ONCE = 500
VANISHED = (2, 5)  # first and last round in which a vanishing device is away


@dataclass(frozen=True)
class Method:
    """g or not; lambda_0, 0 for no prototypes; alpha, 0 for a lambda that is the same for all."""

    normalise: bool
    strength: float
    shift: float


METHODS: Mapping[str, Method] = {
    "vanilla": Method(False, 0.0, 0.0),
    "proto": Method(False, 1.0, 0.0),
    "g": Method(True, 0.0, 0.0),
    "g-proto": Method(True, 1.0, 0.0),
    "ours": Method(True, 1.0, 2.0),
}
CASES = ("all", "lacking", "single", "vanishing")  # what the first device is: nothing special; with half of the
# classes; with one; away for some rounds


@dataclass(frozen=True)
class PrototypeCell:
    """One setting and one seed."""

    method: str
    held_out: str
    seed: int
    distance: str = "cosine"
    cut: str = "layer3"
    copies: str = "each"
    case: str = "all"

    @property
    def package(self) -> Package:
        """A method without prototypes does not know a distance."""
        method = METHODS[self.method]
        return Package(method.normalise, self.distance if method.strength else "cosine", self.cut)

    @property
    def name(self) -> str:
        return "/".join(map(str, asdict(self).values()))


@dataclass(frozen=True)
class PrototypeRates:
    """What is the same for all cells."""

    rounds: int
    batch: int
    learning_rate: float
    schedule: str


@dataclass(frozen=True)
class Round:
    """One round: training loss and hits on all devices, hits of the whole on the held-out domain; mean d_k and
    lambda_k; bytes of tensors both ways, all devices together."""

    round: int
    loss: float
    accuracy: float | None
    test_accuracy: float
    shift: float | None
    strength: float | None
    devices: int
    bytes_up: int
    bytes_down: int
    seconds: float


@dataclass(frozen=True)
class PrototypesFound:
    """What one cell gave; `accuracy` is the last round's. Energy is unknown with a reason."""

    curve: tuple[Round, ...]
    accuracy: float
    best_accuracy: float
    bytes: int
    images: int
    devices: int
    training_device: str
    seconds: float
    energy_j: float | None
    energy_quality: str
    energy_scope: str
    energy_reason: str | None

    def document(self) -> dict[str, object]:
        return asdict(self)


class PrototypeLaboratory:
    """A world, the devices' engine, and what cells share."""

    def __init__(
        self, world: DomainWorld, engine: str, rates: PrototypeRates, threads: int, meter: Meter | None
    ) -> None:
        """`meter` is of the whole machine: None where others work on it at the same time."""
        self._world, self._engine, self._rates, self._threads, self._meter = world, engine, rates, threads, meter
        self.device = backends.choose_device(threads)
        self._tested: dict[str, tuple[Tensor, NDArray[np.int64]]] = {}
        self._read: dict[Path, ReadImages] = {}  # by folder: secrets are a seed's and a device's
        self._scratch = tempfile.TemporaryDirectory(prefix="cutlayer-prototypes-")
        self._root = Path(self._scratch.name)
        self._packages = Packages(world.publisher, self._root / "packages", self.device)

    def row(self, cell: PrototypeCell) -> PrototypesFound:
        """Raises: TrainingError, DeviceError, DataError."""
        started_s, begun_s = time.monotonic(), time.monotonic()
        energy = RowEnergy(self._meter)
        shipped, devices = self.devices(cell)
        strategy = strategies.find("prototypes").build(shipped, self.settings(cell, len(devices)))
        curve: list[Round] = []

        def note(values: Mapping[str, Metric]) -> None:
            nonlocal begun_s
            if "epoch" in values:
                seconds = time.monotonic() - begun_s
                tested = self.judge(cell, shipped, strategy.state())
                curve.append(round_of(values, tested, seconds))
                begun_s = time.monotonic()

        answers: Answering = Answers(devices, Terms(RUN, SITE, "prototypes", LABEL_MODE, 0.0, cell.seed))
        if cell.case == "vanishing":
            answers = Away(answers, min(devices), VANISHED)
        adapt(strategy, answers, Site(SITE, tuple(sorted(devices)), len(self._world.classes)), note)
        shutil.rmtree(self._state_root(cell), ignore_errors=True)
        return PrototypesFound(
            curve=tuple(curve), accuracy=curve[-1].test_accuracy,
            best_accuracy=max(each.test_accuracy for each in curve),
            bytes=sum(each.bytes_up + each.bytes_down for each in curve),
            images=sum(len(device.dataset.samples) for device in devices.values()), devices=len(devices),
            training_device=f"torch {torch.__version__} on {device_name(self.device)}",
            seconds=round(time.monotonic() - started_s, 2), **energy.facts(),  # type: ignore[arg-type]
        )  # fmt: skip

    def settings(self, cell: PrototypeCell, devices: int, label_mode: str = LABEL_MODE) -> Settings:
        """What the strategy is told."""
        method = METHODS[cell.method]
        return Settings(
            label_mode, 0.0, self._rates.rounds, 0, 0.0, cell.seed, batch=self._rates.batch,
            learning_rate=self._rates.learning_rate, schedule=self._rates.schedule,
            quorum=devices - 1 if cell.case == "vanishing" else 0,
            prototype_strength=method.strength, prototype_shift=method.shift, server_copies=cell.copies,
        )  # fmt: skip

    # -- devices

    def devices(self, cell: PrototypeCell, label_mode: str = LABEL_MODE) -> tuple[Shipped, dict[str, PartDevice]]:
        """The server's model, and devices whose secrets come from the seed, so that a row repeats."""
        front = export_domain_package(self._world, cell.package)
        shipped, installed = self._packages.ship(front), self._packages.install(front)
        names, classes = self._world.devices(cell.held_out), self._world.classes
        open_part = self._open_part(shipped, installed)
        kind = DeviceKind(SITE, self._world.publisher, installed, open_part, label_mode, self._threads)
        made = {}
        for name in names:
            data = self._train_folder(name, name == min(names), cell)
            state = self._state_root(cell) / name
            made[name] = make_device(kind, state, cell.seed, data, classes, read=self._read.get(data))
            self._read[data] = made[name].read
        return shipped, made

    def _state_root(self, cell: PrototypeCell) -> Path:
        return self._root / "states" / cell.name.replace("/", "-")

    def _train_folder(self, name: str, is_first: bool, cell: PrototypeCell) -> Path:
        classes = self._world.classes
        own = {"lacking": classes[: len(classes) // 2], "single": classes[:1]}.get(cell.case) if is_first else None
        return self._world.train_folder(self._root / "drawn", name, cell.seed, own)

    def _open_part(self, shipped: Shipped, installed: Installed) -> OpenPart:
        plan = shipped.plan

        def open_torch(cut: TrainingCut):  # type: ignore[no-untyped-def]
            folder, rule, model = installed.folder, plan.optimiser, shipped.module
            return open_torch_trainer(folder, cut, rule, model, None, self.device, plan.prototypes)

        return part_opener(self._engine, open_torch, installed, self._threads)

    # -- judging

    @torch.no_grad()
    def judge(self, cell: PrototypeCell, shipped: Shipped, state: State) -> float:
        """Share of hits on the held-out domain, in evaluation mode."""
        model, (cut,), rule = copy.deepcopy(shipped.module), shipped.plan.cuts, shipped.plan.prototypes
        assert rule is not None
        model.load_state_dict(named(state, "backend."))
        head = {name: tensor.to(self.device) for name, tensor in named(state, "head.").items()}
        bottom, top = family_of(model)[1].cut(model.eval(), cut.index)
        images, labels = self.tested(cell.held_out)
        right = 0
        for place, batch in enumerate(images.split(JUDGED_AT_ONCE)):
            h = bottom.eval()(batch)
            h = prototypes.normalise(h, rule.scale) if rule.normalise else h
            logits = functional.linear(top.eval()(h), head["weight"], head["bias"])
            own = labels[place * JUDGED_AT_ONCE : (place + 1) * JUDGED_AT_ONCE]
            right += int((logits.argmax(dim=1).cpu().numpy() == own).sum())
        return right / len(labels)

    def tested(self, domain: str) -> tuple[Tensor, NDArray[np.int64]]:
        """Normalised images (n, 3, h, w) on the device, and class numbers (n,), of a held-out domain."""
        if domain not in self._tested:
            (rule,) = {each.manifest.image for each in self._packages.installed}
            pixels, labels = read_folder(
                self._world.test_folder(self._root / "drawn", domain), self._world.classes, rule
            )
            self._tested[domain] = (torch.from_numpy(normalise(pixels, rule)).to(self.device), labels)
        return self._tested[domain]


class Away:
    """Answers without those of a device that is not there in some rounds: it does not say that it attends."""

    def __init__(self, answers: Answering, device: str, rounds: tuple[int, int]) -> None:
        self._answers, self._device, self._rounds = answers, device, rounds

    def answer(self, ask: Ask) -> Mapping[str, Reply]:
        first, last = self._rounds
        if ask.kind != "attend" or not first <= int(ask.parameters["epoch"]) <= last:
            return self._answers.answer(ask)
        there = {name: tensors for name, tensors in ask.tensors.items() if name != self._device}
        return self._answers.answer(Ask(ask.name, ask.kind, there, ask.parameters))

    def note_checkpoint(self) -> None:
        self._answers.note_checkpoint()


def read_folder(folder: Path, classes: tuple[str, ...], rule: ImageRule) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Pictures (n, h, w, 3) and class numbers (n,) of a folder."""
    files = scan(folder, classes).images
    pixels = [resize(load_pixels(file.path, file.relative, rule.max_pixels), rule) for file in files]
    return np.stack(pixels), np.array([file.class_index for file in files])


def round_of(values: Mapping[str, Metric], test_accuracy: float, seconds: float) -> Round:
    """A record of the strategy with what was measured beside it."""
    known = {
        name: None if values[name] is None else float(values[name] or 0) for name in ("accuracy", "shift", "strength")
    }
    return Round(
        int(values["epoch"] or 0), float(values["loss"] or 0.0), known["accuracy"], test_accuracy, known["shift"],
        known["strength"], int(values["devices"] or 0), int(values["bytes_up"] or 0), int(values["bytes_down"] or 0),
        round(seconds, 3),
    )  # fmt: skip
