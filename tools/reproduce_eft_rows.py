"""One row of a reproduction of EFTViT: a method, a deal of images, a seed; accuracy over rounds with what it cost.

Strategies and devices are the product's own, joined in one process by `simulation`. EFTViT is judged by every device's
own chain (local module, global module, head), the mean over devices; the baselines by their one model. On a GPU,
products are TF32, and test images are judged in bfloat16. Nothing is chosen on test images.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from contract.asks import EVERY_IMAGE
from contract.training import TrainingCut
from edge_runtime.install import Installed
from edge_runtime.meters import Meter
from edge_runtime.round_keeper import RoundKeeper
from exporter.models import family_of
from exporter.models._peft import PROMPTS
from server_runtime import strategies
from server_runtime.split_model import Shipped
from server_runtime.strategies import Ask, Metric, PartStrategy, Reply, Settings, Site
from server_runtime.training_macs import VitSizes, sizes_of
from tools.reproduce_devices import DeviceKind, make_device
from tools.reproduce_eft_world import EftWorld, Variant, export_variant
from tools.reproduce_energy import RowEnergy
from tools.reproduce_split_rows import LABEL_MODE, RUN, SITE, SplitLaboratory, SplitRates, named
from tools.simulation import Answers, Terms, adapt
from tools.torch_trainer import open_torch_trainer
from tools.torch_worker import OpenPart, PartDevice, device_name

JUDGED_AT_ONCE = 500


@dataclass(frozen=True)
class EftCell:
    """One setting and one seed; local, threshold (EVERY_IMAGE: no median) and server_rate are EFTViT's, a ratio beside
    0 also Fed-Full's."""

    method: str
    beta: float
    ratio: float
    local: int
    threshold: float
    rate: float  # highest learning rate, of the devices and of the server
    server_rate: float
    seed: int

    @property
    def variant(self) -> Variant:
        return Variant(self.method, self.ratio, self.local)

    @property
    def strategy(self) -> str:
        return self.method if self.method in ("eft_vit", "fed_bfpt") else "fed_avg"


@dataclass(frozen=True)
class EftRates:
    """What is the same for all cells."""

    rounds: int
    local_epochs: int
    fraction: float
    batch: int
    judge_every: int
    schedule: str
    warmup: int


@dataclass(frozen=True)
class Round:
    """One round; accuracies are None where it was not judged. `own_accuracy` weighs classes as each device has them.
    Bytes of tensors, all devices together; MACs of training, by the counter; seconds of this machine: of the round's
    slowest device, of the device that has worked longest since the beginning, of all devices."""

    round: int
    accuracy: float | None
    own_accuracy: float | None
    loss: float | None
    bytes_up: int
    bytes_down: int
    macs_devices: float | None
    largest_local_s: float
    longest_total_s: float
    local_s: float
    seconds: float


class TimedAnswers(Answers):
    """Notes how long each device worked."""

    def __init__(self, devices: Mapping[str, PartDevice], terms: Terms) -> None:
        super().__init__(devices, terms)
        self.spent_s: dict[str, float] = {}  # in this round
        self.total_s: dict[str, float] = {}  # in the rounds before

    def _answer_one(self, name: str, ask: Ask) -> Reply:
        started_s = time.monotonic()
        reply = super()._answer_one(name, ask)
        self.spent_s[name] = self.spent_s.get(name, 0.0) + time.monotonic() - started_s
        return reply

    def end_round(self) -> list[float]:
        """What each device of the round needed, in seconds."""
        spent, self.spent_s = self.spent_s, {}
        for name, seconds in spent.items():
            self.total_s[name] = self.total_s.get(name, 0.0) + seconds
        return list(spent.values())


class EftLaboratory(SplitLaboratory):
    """A world, the devices' engine, and what cells share."""

    def __init__(self, world: EftWorld, engine: str, rates: EftRates, threads: int, meter: Meter | None) -> None:
        """`meter` is `RowEnergy`'s."""
        super().__init__(world, engine, SplitRates(rates.rounds, rates.batch, 0.0), threads)  # type: ignore[arg-type]
        self._eft_world, self._eft, self._meter = world, rates, meter
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        self._images: tuple[Tensor, np.ndarray] | None = None

    def row_of(self, cell: EftCell) -> dict[str, Any]:
        """Raises: TrainingError, DeviceError, DataError."""
        started_s, energy = time.monotonic(), RowEnergy(self._meter)
        shipped, installed = self.package(cell)
        devices = self.devices(cell, self._eft_world.devices)
        rates = self._eft
        strategy = strategies.find(cell.strategy).build(shipped, self.settings(cell))
        answers = TimedAnswers(devices, self.terms(cell))
        shares = {name: self._class_shares(device) for name, device in devices.items()}
        sizes, curve = sizes_of(shipped.module), list[Round]()
        begun_s = time.monotonic()

        def note(values: Mapping[str, Metric]) -> None:
            nonlocal begun_s
            if "epoch" not in values:
                return
            seconds, number = time.monotonic() - begun_s, len(curve) + 1
            judged: tuple[float | None, float | None] = (None, None)
            if number % rates.judge_every == 0 or number in (1, rates.rounds):
                judged = self._judge_all(cell, shipped, installed, strategy, devices, shares)
            spent = answers.end_round()
            curve.append(
                Round(
                    number, *judged, _float(values["loss"]), int(values["bytes_up"] or 0),
                    int(values["bytes_down"] or 0), macs_of(cell, values, sizes, rates.local_epochs),
                    max(spent, default=0.0), max(answers.total_s.values(), default=0.0), sum(spent), round(seconds, 3),
                )
            )  # fmt: skip
            begun_s = time.monotonic()

        adapt(strategy, answers, Site(SITE, tuple(sorted(devices)), len(self._eft_world.classes)), note)
        return {
            "curve": [asdict(each) for each in curve],
            "images": sum(len(device.dataset.samples) for device in devices.values()),
            "devices": len(devices),
            "training_device": f"torch {torch.__version__} on {device_name(self.device)}",
            **energy.facts(),
            "seconds": round(time.monotonic() - started_s, 2),
        }

    def settings(self, cell: EftCell) -> Settings:
        """What the strategy is told."""
        rates, every = self._eft, cell.threshold == EVERY_IMAGE
        return Settings(
            LABEL_MODE, 0.0, rates.rounds * rates.local_epochs, 0, 0.0, cell.seed, batch=rates.batch,
            learning_rate=cell.rate, schedule=rates.schedule, warmup=rates.warmup * rates.local_epochs,
            local_epochs=rates.local_epochs, fraction=rates.fraction, sampling="all" if every else "median",
            medians=1.0 if every else cell.threshold, server_rate=cell.server_rate,
        )  # fmt: skip

    @staticmethod
    def terms(cell: EftCell) -> Terms:
        """What devices are told of the run."""
        return Terms(RUN, SITE, cell.strategy, LABEL_MODE, 0.0, cell.seed)

    # -- devices

    def package(self, cell: EftCell) -> tuple[Shipped, Installed]:
        """The server's side and the devices'."""
        front = export_variant(self._eft_world, cell.variant)
        return self.packages.ship(front), self.packages.install(front)

    def devices(self, cell: EftCell, names: Sequence[str], noise: str = "keyed") -> dict[str, PartDevice]:
        """Devices whose secrets come from the seed, so that a row repeats; `noise` is of their own config."""
        shipped, installed = self.package(cell)
        open_part = self._open_shared(cell, shipped, installed)
        world = self._eft_world
        kind = DeviceKind(SITE, world.publisher, installed, open_part, LABEL_MODE, self._threads)
        root = self._root / "states" / f"{cell.variant.name}-{cell.beta:g}-{cell.seed}"
        made = {}
        for name in names:
            data = world.train_folder(name, cell.beta, cell.seed)
            made[name] = make_device(kind, root / name, cell.seed, data, world.classes, {"noise": noise})
        return made

    def _open_shared(self, cell: EftCell, shipped: Shipped, installed: Installed) -> OpenPart:
        """Devices that keep nothing between rounds share one trainer: they are driven in turn."""
        if self._engine != "torch" or cell.strategy != "fed_avg":
            return self.open_part(shipped, installed)
        opened: dict[int, Any] = {}

        def open_once(cut: TrainingCut) -> Any:
            if cut.index not in opened:
                plan = shipped.plan
                opened[cut.index] = open_torch_trainer(
                    installed.folder, cut, plan.optimiser, shipped.module, plan.class_count, self.device
                )
            return opened[cut.index]

        return open_once

    def _class_shares(self, device: PartDevice) -> np.ndarray:
        """(C,) of a device's images."""
        labels = [sample.label for sample in device.dataset.samples if sample.label is not None]
        counts = np.bincount(labels, minlength=len(self._eft_world.classes))
        return counts / max(1, counts.sum())

    # -- judging

    @torch.no_grad()
    def _judge_all(
        self, cell: EftCell, shipped: Shipped, installed: Installed, strategy: PartStrategy,
        devices: Mapping[str, PartDevice], shares: Mapping[str, np.ndarray],
    ) -> tuple[float, float]:  # fmt: skip
        """Mean over devices of the share of hits on the test images, and of that weighed by the device's classes."""
        state = strategy.state()
        model = copy.deepcopy(shipped.module).eval()
        model.load_state_dict(named(state, "backend."))
        head = {name: tensor.to(self.device) for name, tensor in named(state, "head.").items()}
        images, labels = self.test_images()
        if cell.method != "eft_vit":
            hits = self._hits(lambda x: functional.linear(model(x), head["weight"], head["bias"]), images, labels)
            per_class = self._per_class(hits, labels)
            return float(hits.mean()), float(np.mean([share @ per_class for share in shares.values()]))
        local, rest = family_of(model)[1].cut(model, cell.local)
        start = {name: value.clone() for name, value in local.state_dict().items()}
        found = []
        for name, device in devices.items():
            assert isinstance(device.keeper, RoundKeeper)
            own = device.keeper.local_weights() or {}
            local.load_state_dict({**start, **{key: torch.from_numpy(np.array(value)) for key, value in own.items()}})
            hits = self._hits(lambda x: functional.linear(rest(local(x)), head["weight"], head["bias"]), images, labels)
            found.append((float(hits.mean()), float(shares[name] @ self._per_class(hits, labels))))
        return float(np.mean([each[0] for each in found])), float(np.mean([each[1] for each in found]))

    def _hits(self, chain: Any, images: Tensor, labels: np.ndarray) -> np.ndarray:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            found = [chain(piece).argmax(dim=1) for piece in images.split(JUDGED_AT_ONCE)]
        return torch.cat(found).cpu().numpy() == labels

    def _per_class(self, hits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """(C,) shares of hits."""
        return np.array([hits[labels == each].mean() for each in range(len(self._eft_world.classes))])

    def test_images(self) -> tuple[Tensor, np.ndarray]:
        """Normalised test images (n, 3, h, w) on the device, and class numbers (n,)."""
        if self._images is None:
            images, labels = self.tested
            self._images = images.to(self.device), labels.numpy()
        return self._images


def macs_of(cell: EftCell, values: Mapping[str, Metric], sizes: VitSizes, epochs: int) -> float:
    """Multiply-accumulates of training on all devices in a round: as the strategy counts, else by what is trained.

    A weight gradient costs a forward pass more, where the gradient goes through without one, nothing. LoRA's own
    products, prompts' own gradients and biases are left out.
    """
    counted = values.get("macs_devices")
    if counted is not None:
        return float(counted)
    prompts = PROMPTS if cell.method == "fed_prompt" else 0
    block = replace(sizes, prefix=sizes.prefix + prompts).block(kept_of(sizes.patches, cell.ratio))
    passes = {"fed_head": 1, "fed_bias": 2, "fed_prompt": 2, "fed_lora": 2, "fed_full": 3}[cell.method]
    return float(values["rows"] or 0) * epochs * passes * sizes.blocks * block


def kept_of(patches: int, ratio: float) -> int:
    """n of the mask ratio r."""
    return max(1, round((1 - ratio) * patches))


def _float(value: Metric) -> float | None:
    return None if value is None else float(value)
