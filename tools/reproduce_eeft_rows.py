"""One row of a reproduction of EEFT: a scenario, a method, a seed; every round with what each task's devices reach.

Strategies and devices are the product's own, joined in one process by `simulation`. A device is judged on its task's
test images by what it holds: its own head behind the part that the server gave it after the round, and, in the last
round, behind the part as it had just trained it. Nothing is chosen on test images.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import nn

from contract.image_folder import scan
from contract.images import ImageRule, load_pixels, normalise, resize
from contract.messages import Update
from contract.training import TrainingCut
from edge_runtime.install import Installed
from edge_runtime.meters import probe
from edge_runtime.stages import Stages
from exporter.plan import ModuleChoices
from exporter.skip_modules import SkipNetwork
from exporter.split import create
from server_runtime import backend as backends
from server_runtime import own_heads, strategies
from server_runtime.backend_folder import TrainingFolder
from server_runtime.own_heads import OwnHeads, Part, Released
from server_runtime.strategies import Ask, Metric, Reply, Settings, Site
from tools.reproduce_devices import DeviceKind, Packages, make_device, part_opener, training_folder
from tools.reproduce_eeft_judge import Judge, Tested
from tools.reproduce_eeft_world import EeftWorld, Group, Scenario, export_modules
from tools.simulation import Answers, Terms, adapt
from tools.torch_trainer import open_torch_trainer
from tools.torch_worker import OpenPart, PartDevice, device_name

LABEL_MODE = "client-head"
RUN, SITE = "reproduce", "federation"


@dataclass(frozen=True)
class Method:
    """A strategy with its settings; `modules` None where it trains the whole model."""

    strategy: str
    modules: ModuleChoices | None = None
    threshold: str = "auto"


OWN = ModuleChoices()
LOUD = replace(OWN, start_skips=1.0)
PUBLISHED = replace(LOUD, start_alpha=-3.0)
METHODS: Mapping[str, Method] = {
    "eeft": Method("eeft", OWN),
    "fine-tuning": Method("fine_tuning"),
    "fedavg": Method("fed_avg_own_heads"),
    "fedmtl": Method("fed_mtl"),
    "masking": Method("selective_masking"),
    "eeft-all": Method("eeft", OWN, "inf"),
    "eeft-alone": Method("eeft", OWN, "0"),
    "eeft-published": Method("eeft", PUBLISHED),
    "eeft-k1": Method("eeft", replace(OWN, skips=1)),
    "eeft-k5": Method("eeft", replace(OWN, skips=5)),
    "eeft-k7": Method("eeft", replace(OWN, skips=7)),
    "eeft-ce": Method("eeft", replace(OWN, complexity=0.0)),
    "eeft-loud": Method("eeft", LOUD),
    "eeft-loud-all": Method("eeft", LOUD, "inf"),
    "eeft-published-all": Method("eeft", PUBLISHED, "inf"),
    "eeft-published-alone": Method("eeft", PUBLISHED, "0"),
    "eeft-published-k1": Method("eeft", replace(PUBLISHED, skips=1)),
    "eeft-published-ce": Method("eeft", replace(PUBLISHED, complexity=0.0)),
}
COMPARED = ("eeft", "fine-tuning", "fedmtl", "fedavg", "masking", "eeft-all", "eeft-alone", "eeft-published")
VARIANTS = ("eeft-alone", "eeft-published")  # of EEFT, which a quick reproduction leaves out
ABLATED = tuple(name for name in METHODS if name not in COMPARED)


@dataclass(frozen=True)
class EeftCell:
    """One row's name."""

    scenario: str
    method: str
    seed: int


@dataclass(frozen=True)
class EeftRates:
    """What is the same for all rows."""

    rounds: int
    local_epochs: int | None  # None: the scenario's
    batch: int
    learning_rate: float  # of modules
    body_learning_rate: float  # where the whole model is trained
    alone: int


@dataclass(frozen=True)
class Round:
    """One round: mean training loss, test accuracy by group (mean over its devices), bytes of tensors of all devices
    both ways, and for EEFT each device's alpha, the threshold (None: infinite, or too early) and group numbers."""

    epoch: int
    loss: float
    accuracy: dict[str, float]
    bytes_up: int
    bytes_down: int
    masked_bytes_up: int | None
    alphas: dict[str, list[float]] | None
    threshold: float | None
    groups: dict[str, int] | None
    seconds: float


@dataclass(frozen=True)
class EeftFound:
    """What a row gave. `accuracy` is the mean over groups after the last round, `trained_accuracy` the same before the
    last averaging; `alphas` those of the last round by device; joules of the training process's machine."""

    accuracy: float
    accuracy_by_group: dict[str, float]
    trained_accuracy: float
    trained_by_group: dict[str, float]
    curve: tuple[Round, ...]
    alphas: dict[str, list[float]] | None
    devices: dict[str, str]  # device -> group
    images: int
    bytes_up_device_round: float
    bytes_down_device_round: float
    parameters: int  # that a device trains, its head aside
    training_device: str
    seconds: float
    energy_j: float | None
    energy_bound_j: float | None
    energy_quality: str

    def document(self) -> dict[str, Any]:
        return asdict(self)


class Noted(Answers):
    """The devices, whose parts as they had just trained them are kept until the next round."""

    def __init__(self, devices: Mapping[str, PartDevice], terms: Terms) -> None:
        super().__init__(devices, terms)
        self.trained: dict[str, Part] = {}

    def answer(self, ask: Ask) -> dict[str, Reply]:
        replies = super().answer(ask)
        self.trained |= {name: each.tensors for name, each in replies.items() if isinstance(each, Update)}
        return replies


class EeftLaboratory:
    """A world, the devices' engine, and what rows share."""

    def __init__(self, world: EeftWorld, engine: str, rates: EeftRates, threads: int) -> None:
        self._world, self._engine, self._rates, self._threads = world, engine, rates, threads
        self._device = backends.choose_device(threads)
        self._scratch = tempfile.TemporaryDirectory(prefix="cutlayer-eeft-")
        self._root = Path(self._scratch.name)
        self._packages = Packages(world.publisher, self._root / "packages", self._device)
        self._tests: dict[str, Tested] = {}

    def row(self, cell: EeftCell) -> EeftFound:
        """Raises: TrainingError, DeviceError, DataError."""
        started_s, method = time.monotonic(), METHODS[cell.method]
        scenario = self._world.scenarios[cell.scenario]
        front = export_modules(self._world, method.modules)
        folder = training_folder(front)
        released, module = own_heads.load(folder), self._module(folder, method)
        installed = self._packages.install(front)
        devices = self._devices(cell, scenario, module, installed)
        local_epochs = self._rates.local_epochs or scenario.local_epochs
        rate = self._rates.body_learning_rate if method.modules is None else self._rates.learning_rate
        settings = Settings(
            LABEL_MODE, 0.0, self._rates.rounds * local_epochs, 0, 0.0, cell.seed,
            batch=self._rates.batch, learning_rate=rate, local_epochs=local_epochs,
            threshold=method.threshold, alone=self._rates.alone,
        )  # fmt: skip
        strategy = strategies.find(method.strategy).build(released, settings)
        answers = Noted(devices, Terms(RUN, SITE, method.strategy, LABEL_MODE, 0.0, cell.seed))
        judge = Judge(
            module, scenario, lambda group: self._tested(scenario, group, installed.manifest.image),
            lambda name: devices[name].head_of(RUN),
        )  # fmt: skip
        stages = Stages(probe().meter, time.monotonic)
        curve: list[Round] = []
        begun_s = time.monotonic()

        def note(values: Mapping[str, Metric]) -> None:
            nonlocal begun_s
            stages.sample()
            seconds = time.monotonic() - begun_s
            accuracy = judge.by_group({name: strategy.part_of(name) for name in devices})
            curve.append(round_of(values, accuracy, seconds))
            begun_s = time.monotonic()

        with stages.measure("train"):
            adapt(strategy, answers, Site(SITE, tuple(sorted(devices)), 0), note)
        time.sleep(stages.settle_s)
        cost = stages.total()
        trained = judge.by_group(answers.trained)
        return found_of(
            curve, trained, scenario, devices, released, strategy,
            training_device=f"{self._engine} on {device_name(self._device)}",
            seconds=round(time.monotonic() - started_s, 2), energy_j=cost.energy_j, energy_bound_j=cost.bound_j,
            energy_quality=cost.reason or stages.scope,
        )  # fmt: skip

    def _tested(self, scenario: Scenario, group: Group, rule: ImageRule) -> Tested:
        """A group's test images (n, 3, h, w) where the judge computes, and class numbers (n,)."""
        key = f"{scenario.name}/{group.name}"
        if key not in self._tests:
            files = scan(self._world.test_folder(scenario, group), tuple(sorted(group.classes))).images
            pixels = [resize(load_pixels(file.path, file.relative, rule.max_pixels), rule) for file in files]
            images = torch.from_numpy(normalise(np.stack(pixels), rule)).to(self._device)
            self._tests[key] = images, np.array([file.class_index for file in files])
        return self._tests[key]

    # -- the model, packages and devices

    def _module(self, folder: TrainingFolder, method: Method) -> nn.Module:
        """The exported network, as the torch engine and the judge run it."""
        module = create(folder.model, False, {**folder.model_args, "num_classes": 0})
        if method.modules is not None:
            module = SkipNetwork(module, method.modules)
        module.load_state_dict(safetensors.torch.load_file(folder.root / "model.safetensors"))
        return module.float().eval().to(self._device)

    def _devices(
        self, cell: EeftCell, scenario: Scenario, module: nn.Module, installed: Installed
    ) -> dict[str, PartDevice]:
        """All of a scenario, by name."""
        root = self._root / "states" / f"{cell.scenario}-{cell.method}-{cell.seed}"
        open_part = self._open_part(module, installed)
        kind = DeviceKind(SITE, self._world.publisher, installed, open_part, LABEL_MODE, self._threads)
        made = {}
        for name, group in sorted(scenario.devices.items()):
            data = self._world.train_folder(scenario, name, cell.seed)
            made[name] = make_device(kind, root / name, cell.seed, data, sorted(group.classes))
        return made

    def _open_part(self, module: nn.Module, installed: Installed) -> OpenPart:
        plan = installed.training
        assert plan is not None

        def open_torch(cut: TrainingCut):  # type: ignore[no-untyped-def]
            return open_torch_trainer(installed.folder, cut, plan.optimiser, module, None, self._device)

        return part_opener(self._engine, open_torch, installed, self._threads)


def round_of(values: Mapping[str, Metric], accuracy: dict[str, float], seconds: float) -> Round:
    """A record of the strategy with what was measured beside it."""
    groups, alphas = values.get("groups"), values.get("alpha")
    threshold, masked = values.get("threshold"), values.get("masked_bytes_up")
    return Round(
        int(values["epoch"] or 0), float(values["loss"] or 0.0), accuracy, int(values["bytes_up"] or 0),
        int(values["bytes_down"] or 0), None if masked is None else int(masked),
        None if alphas is None else json.loads(str(alphas)),
        None if threshold is None else float(threshold), None if groups is None else json.loads(str(groups)),
        round(seconds, 3),
    )  # fmt: skip


def found_of(
    curve: list[Round], trained: dict[str, float], scenario: Scenario,
    devices: Mapping[str, PartDevice], released: Released, strategy: OwnHeads, **measured: Any,
) -> EeftFound:  # fmt: skip
    """The row; bytes of a round are those of the last, which goes both ways."""
    end, count = curve[-1], len(devices)
    up = end.bytes_up if end.masked_bytes_up is None else end.masked_bytes_up
    return EeftFound(
        accuracy=float(np.mean(list(end.accuracy.values()))), accuracy_by_group=end.accuracy,
        trained_accuracy=float(np.mean(list(trained.values()))), trained_by_group=trained, curve=tuple(curve),
        alphas=end.alphas,
        devices={name: group.name for name, group in scenario.devices.items()},
        images=sum(len(device.dataset.samples) for device in devices.values()),
        bytes_up_device_round=up / count, bytes_down_device_round=end.bytes_down / count,
        parameters=sum(released.initial[name].size for name in released.cut.trainable), **measured,
    )  # fmt: skip
