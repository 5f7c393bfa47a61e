"""One row of a reproduction of split training: a model, a strategy, a seed; every epoch with what it cost.

Strategies and devices are the product's own, joined in one process by `simulation`. Whatever a method calls its model,
W is judged: what the strategy's state would publish, so for averaging methods the average. Nothing is chosen on test
images.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from contract.errors import ConfigError
from contract.image_folder import ImageFile, scan
from contract.images import ImageRule, load_pixels, normalise, resize
from contract.training import TrainingCut
from edge_runtime.choose_split import SplitCost
from edge_runtime.install import Installed
from server_runtime import backend as backends
from server_runtime import norm_statistics, strategies
from server_runtime.split_model import Shipped
from server_runtime.strategies import Metric, Settings, Site, State
from tools.reproduce_devices import DeviceKind, Packages, make_device, part_opener
from tools.reproduce_split_world import SplitWorld, export_part_package
from tools.simulation import Answers, Terms, adapt, part_accuracy
from tools.torch_trainer import open_torch_trainer
from tools.torch_worker import OpenPart, PartDevice, device_name, with_images

LABEL_MODE = "raw-label"
SCHEDULE = "cosine"
RUN, SITE = "reproduce", "site"
JUDGED_AT_ONCE = 500


@dataclass(frozen=True)
class SplitCell:
    """One setting and one seed."""

    model: str
    strategy: str
    seed: int


@dataclass(frozen=True)
class SplitRates:
    """What is the same for all cells."""

    epochs: int
    batch: int
    learning_rate: float


@dataclass(frozen=True)
class Epoch:
    """One epoch: mean training loss and share of hits while it was trained, W's share of hits on test images; bytes of
    tensors both ways, all devices together."""

    epoch: int
    loss: float
    accuracy: float | None
    test_accuracy: float
    bytes_up: int
    bytes_down: int
    learning_rate: float
    seconds: float


@dataclass(frozen=True)
class SplitFound:
    """What one cell gave. `device_accuracy` is that of the last device on the same test images, by its own part and the
    server's rest."""

    curve: tuple[Epoch, ...]
    device_accuracy: float | None
    device_accuracy_reason: str | None  # why it is not known
    images: int
    devices: int
    training_device: str
    seconds: float

    def document(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Owner:
    """What a device's owner chose beside what is the same for all: changes of its configuration, and what it knows of
    its own costs."""

    config: Mapping[str, object] = field(default_factory=dict)
    costs: Sequence[SplitCost] = ()


class SplitLaboratory:
    """A world, the devices' engine, and what cells share; also for reproductions whose rows are other ones."""

    def __init__(self, world: SplitWorld, engine: str, rates: SplitRates, threads: int) -> None:
        self._world, self._engine, self._rates, self._threads = world, engine, rates, threads
        self.device = backends.choose_device(threads)
        self._scratch = tempfile.TemporaryDirectory(prefix="cutlayer-split-")
        self._root = Path(self._scratch.name)
        self.packages = Packages(world.publisher, self._root / "packages", self.device)

    def row(self, cell: SplitCell) -> SplitFound:
        """Raises: TrainingError, DeviceError, DataError."""
        started_s = time.monotonic()
        front = export_part_package(self._world, cell.model, cell.strategy)
        shipped, installed = self.packages.ship(front), self.packages.install(front)
        devices = self.devices(f"{cell.model}-{cell.strategy}", cell.strategy, cell.seed, shipped, installed)
        settings = Settings(
            LABEL_MODE, 0.0, self._rates.epochs, 0, 0.0, cell.seed, batch=self._rates.batch,
            learning_rate=self._rates.learning_rate, schedule=SCHEDULE,
        )  # fmt: skip
        strategy = strategies.find(cell.strategy).build(shipped, settings)
        answers = Answers(devices, Terms(RUN, SITE, cell.strategy, LABEL_MODE, 0.0, cell.seed))
        curve: list[Epoch] = []
        begun_s = time.monotonic()

        def note(values: Mapping[str, Metric]) -> None:
            nonlocal begun_s
            if "epoch" in values:
                seconds = time.monotonic() - begun_s
                tested = self.judge(shipped, strategy.state())
                curve.append(epoch_of(values, tested, seconds))
                begun_s = time.monotonic()

        adapt(strategy, answers, Site(SITE, tuple(sorted(devices)), len(self._world.classes)), note)
        last = with_images(devices[max(devices)], self._world.test_folder())
        found, reason = None, None
        try:
            found = part_accuracy(strategy, last, RUN)
        except ConfigError as error:
            reason = error.cause
        return SplitFound(
            curve=tuple(curve), device_accuracy=found, device_accuracy_reason=reason,
            images=sum(len(device.dataset.samples) for device in devices.values()), devices=len(devices),
            training_device=f"torch {torch.__version__} on {device_name(self.device)}",
            seconds=round(time.monotonic() - started_s, 2),
        )  # fmt: skip

    # -- devices

    def devices(
        self, row: str, strategy: str, seed: int, shipped: Shipped, installed: Installed,
        owners: Mapping[str, Owner] | None = None,
    ) -> dict[str, PartDevice]:  # fmt: skip
        """Devices whose secrets come from the seed, so that a row repeats; `row` names their states."""
        names, owners = self._world.devices_of(strategy), owners or {}
        root = self._root / "states" / f"{row}-{seed}"
        open_part = self.open_part(shipped, installed)
        kind = DeviceKind(SITE, self._world.publisher, installed, open_part, LABEL_MODE, self._threads)
        made = {}
        for name in names:
            owner, data = owners.get(name, Owner()), self._world.train_folder(name, seed)
            made[name] = make_device(
                kind, root / name, seed, data, self._world.classes, owner.config, costs=owner.costs
            )  # fmt: skip
        return made

    def open_part(self, shipped: Shipped, installed: Installed) -> OpenPart:
        plan = shipped.plan

        def open_torch(cut: TrainingCut):  # type: ignore[no-untyped-def]
            return open_torch_trainer(
                installed.folder, cut, plan.optimiser, shipped.module, plan.class_count, self.device
            )

        return part_opener(self._engine, open_torch, installed, self._threads)

    # -- judging W

    @torch.no_grad()
    def judge(self, shipped: Shipped, state: State, statistics: torch.Tensor | None = None) -> float:
        """W's share of hits on the test images, in evaluation mode; with images (n, 3, h, w) for `statistics`, after
        its norms took theirs anew from these."""
        model = copy.deepcopy(shipped.module)
        model.load_state_dict(named(state, "backend."))
        head = {name: tensor.to(self.device) for name, tensor in named(state, "head.").items()}
        if statistics is not None:
            norm_statistics.retake(model, statistics, self.device)
        images, labels = self.tested
        model.eval()
        right = 0
        for batch, own in zip(images.split(JUDGED_AT_ONCE), labels.split(JUDGED_AT_ONCE), strict=True):
            logits = functional.linear(model(batch.to(self.device)), head["weight"], head["bias"])
            right += int((logits.argmax(dim=1).cpu() == own).sum())
        return right / len(labels)

    @cached_property
    def tested(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised test images (n, 3, h, w) and class numbers (n,), on the CPU."""
        (rule,) = {each.manifest.image for each in self.packages.installed}
        files = scan(self._world.test_folder(), self._world.classes).images
        return read_images(files, rule), torch.tensor([file.class_index for file in files])


def read_images(files: Sequence[ImageFile], rule: ImageRule) -> torch.Tensor:
    """Normalised images (n, 3, h, w), on the CPU."""
    pixels = [resize(load_pixels(file.path, file.relative, rule.max_pixels), rule) for file in files]
    return torch.from_numpy(normalise(np.stack(pixels), rule))


def named(state: State, start: str) -> dict[str, torch.Tensor]:
    """Tensors of a state whose names begin so, without the beginning."""
    return {name.removeprefix(start): value for name, value in state.tensors.items() if name.startswith(start)}


def epoch_of(values: Mapping[str, Metric], test_accuracy: float, seconds: float) -> Epoch:
    """A record of the strategy with what was measured beside it."""
    accuracy = values["accuracy"]
    return Epoch(
        int(values["epoch"] or 0), float(values["loss"] or 0.0), None if accuracy is None else float(accuracy),
        test_accuracy, int(values["bytes_up"] or 0), int(values["bytes_down"] or 0), float(values["lr"] or 0.0),
        round(seconds, 3),
    )  # fmt: skip
