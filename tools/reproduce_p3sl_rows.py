"""One row of a reproduction of P3SL: a model, a method with its noise, an environment, a seed; all epochs, all devices.

Strategies, devices and their choices are the product's own, joined in one process by `simulation`; seconds and joules
are those that a modelled fleet would have taken for the very questions and answers (`fleet_ledger`), never this
machine's. Whatever a method calls its model, W is judged: what the strategy's state would publish.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from contract.image_folder import scan
from contract.leakage import Table
from contract.privacy_table import PrivacyTable, from_leakage
from edge_runtime.choose_split import SplitCost
from edge_runtime.install import Installed
from server_runtime import strategies
from server_runtime.evaluation import Evaluation
from server_runtime.noise_table import NoiseTable, initial_table, uniform_table
from server_runtime.split_model import Shipped
from server_runtime.strategies import Metric, PartStrategy, Settings, Site
from server_runtime.strategies.p3sl import P3SL
from tools.fleet import Fleet, Work, cost_of, within_cap
from tools.fleet_ledger import Ledger, Spent
from tools.fleet_work import works_of
from tools.reproduce_devices import training_folder
from tools.reproduce_p3sl_world import STRATEGY, P3slWorld
from tools.reproduce_split_rows import LABEL_MODE, RUN, SCHEDULE, SITE, Owner, SplitLaboratory, SplitRates, read_images
from tools.simulation import Answers, Terms, adapt, part_accuracy
from tools.torch_worker import PartDevice, device_name, with_images

COPY = "p3sl_copy"  # P3SL whose server trains on with its own layers, not with the average
METHODS = {
    "p3sl": "p3sl",
    COPY: "p3sl",
    "asl": "asl",
    "ares": "ares",
    "ssl": "sequential_split",
    "psl": "parallel_split",
}
PUBLISHED, TABLE = "2.5", "table"
NOISES = (PUBLISHED, TABLE)
STATISTICS_IMAGES = 1000
COMMON = ("ssl", "psl")  # methods with one split for all devices
QUALITY = "modelled: joules of an epoch, all devices, waiting and sleep counted; nothing was measured"


@dataclass(frozen=True)
class P3slCell:
    """One row's question. `noise` "2.5" is that sigma everywhere, as published for baselines; "table" P3SL's own."""

    model: str
    method: str
    noise: str
    environment: str
    seed: int


@dataclass(frozen=True)
class P3slRates:
    """What is the same for all cells: `aggregate_every` is R; `threshold` is T_FSIM where the leakage table has none, 0
    what the splits show least of without any noise."""

    epochs: int
    batch: int
    learning_rate: float
    aggregate_every: int
    threshold: float


@dataclass(frozen=True)
class P3slEpoch:
    """Mean training loss, W's share of hits on test images, tensors' bytes of all devices; seconds of this machine."""

    epoch: int
    loss: float
    test_accuracy: float
    bytes_up: int
    bytes_down: int
    seconds: float


@dataclass(frozen=True)
class P3slDevice:
    """One device at the end. FSIM is what the leakage table has for its split without noise and with; `chain` is the
    accuracy of its own part with the server's rest, None where a method has no such thing; `own_accuracy` that of what
    it holds in the end, with its noise on what it sends to be predicted."""

    split: int
    splits: tuple[int, ...]  # that it had, in turn
    alpha: float
    sigma: float
    fsim_clean: float
    fsim: float
    chain: float | None
    own_accuracy: float
    awake_share: float
    joules: dict[str, float]  # of an epoch, modelled


class P3slLaboratory:
    """A world, a fleet for each environment, the devices' engine, and what cells share."""

    def __init__(
        self, world: P3slWorld, fleets: Mapping[str, Fleet], engine: str, rates: P3slRates, threads: int
    ) -> None:
        self._world, self._fleets, self._rates = world, fleets, rates
        split_rates = SplitRates(rates.epochs, rates.batch, rates.learning_rate)
        self._split = SplitLaboratory(world.split, engine, split_rates, threads)
        self._works: dict[str, list[Work]] = {}

    def row(self, cell: P3slCell, table: Table) -> dict[str, Any]:
        """Raises: TrainingError, DeviceError, DataError."""
        started_s, fleet = time.monotonic(), self._fleets[cell.environment]
        front = self._world.package(cell.model)
        installed = self._split.packages.install(front)
        plain = self._split.packages.ship(front)
        images, labels = self._split.tested
        classes = len(self._world.split.classes)
        shipped = replace(plain, leakage=table, evaluation=Evaluation(images.numpy(), labels.numpy(), classes))
        works = self.works(cell.model)
        privacy = from_leakage(table, [work.split for work in works])
        noise = noise_of(cell.noise, table, privacy, self._rates.threshold)
        owners = {device.name: self._owner(fleet, device.name, works, noise) for device in fleet.devices}
        name = f"{cell.model}-{cell.method}-{cell.noise}-{cell.environment}"
        devices = self._split.devices(name, STRATEGY, cell.seed, shipped, installed, owners)
        answers = Answers(devices, Terms(RUN, SITE, METHODS[cell.method], LABEL_MODE, 0.0, cell.seed))
        ledger = Ledger(answers, fleet, {work.split: work for work in works}, self._rates.batch, self._world.stands_for)
        strategy = self._build(cell, shipped, table, works, ledger)
        curve, told, begun_s = [], dict[str, Metric](), time.monotonic()
        splits: dict[str, list[int]] = {device: [] for device in devices}

        def note(values: Mapping[str, Metric]) -> None:
            nonlocal begun_s
            if "epoch" not in values:
                return
            seconds, tested = time.monotonic() - begun_s, self._split.judge(plain, strategy.state())
            curve.append(epoch_of(values, tested, seconds))
            told.update({key: value for key, value in values.items() if "/" in key})
            for device, times in ledger.times.items():
                if times.split not in splits[device][-1:]:
                    splits[device].append(times.split)
            begun_s = time.monotonic()

        adapt(strategy, ledger, Site(SITE, tuple(sorted(devices)), classes), note)
        found = self._devices(fleet, privacy, noise, ledger, told, splits, self._judge(cell, strategy, devices, ledger))
        totals = {key: sum(each.joules[key] for each in found.values()) for key in next(iter(found.values())).joules}
        return {
            "setting": setting_of(cell), "accuracy": curve[-1].test_accuracy,
            "retaken_accuracy": self._split.judge(plain, strategy.state(), self._public_images(installed)),
            "own_accuracy": sum(each.own_accuracy for each in found.values()) / len(found),
            "bytes": sum(each.bytes_up + each.bytes_down for each in curve),
            "seconds": round(time.monotonic() - started_s, 2), "energy_j": totals["whole"], "energy_quality": QUALITY,
            "joules": totals, "epoch_s": ledger.clock() / self._rates.epochs,
            "fsim_total": sum(each.fsim for each in found.values()),
            "fsim_baselines": baselines_of(table, found), "threshold": threshold_of(table, self._rates.threshold),
            "threshold_found": table.threshold.fsim is not None,
            "devices": {device: asdict(each) for device, each in found.items()},
            "curve": [asdict(each) for each in curve],
            "training_device": f"torch on {device_name(self._split.device)}",
        }  # fmt: skip

    def _public_images(self, installed: Installed) -> torch.Tensor:
        """Images that are nobody's, by which norms take their statistics anew; of every class as many."""
        files = scan(self._world.public_folder, None).images
        return read_images(files[:: max(1, len(files) // STATISTICS_IMAGES)], installed.manifest.image)

    def _judge(
        self, cell: P3slCell, strategy: PartStrategy, devices: Mapping[str, PartDevice], ledger: Ledger
    ) -> dict[str, float]:
        """Each device's own accuracy under its noise; but for P3SL, devices of one split hold the same in the end."""
        found: dict[str, float] = {}
        known: dict[object, float] = {}
        for name, device in devices.items():
            key = name if METHODS[cell.method] == "p3sl" else ledger.times[name].split
            if key not in known:
                known[key] = part_accuracy(strategy, with_images(device, self._world.split.test_folder()), RUN)
            found[name] = known[key]
        return found

    def works(self, model: str) -> list[Work]:
        """What a step of each part of the package takes."""
        if model not in self._works:
            front = self._world.package(model)
            folder = training_folder(front)
            cuts = [cut.index for cut in folder.training.cuts]
            self._works[model] = works_of(folder.model, dict(folder.model_args), cuts)
        return self._works[model]

    def _owner(self, fleet: Fleet, name: str, works: Sequence[Work], noise: NoiseTable) -> Owner:
        """Its floor is the noise of the row, so that it predicts under it, too."""
        (device,) = (each for each in fleet.devices if each.name == name)
        floor = ",".join(f"{split}={sigma:g}" for split, sigma in zip(noise.splits, noise.sigma, strict=True))
        return Owner(
            {
                "privacy_weight": device.alpha, "power_cap_w": device.cap_w, "sigma_floor": floor,
            },
            costs_of(fleet, name, works, self._rates.batch),
        )  # fmt: skip

    def _build(
        self, cell: P3slCell, shipped: Shipped, table: Table, works: Sequence[Work], ledger: Ledger
    ) -> PartStrategy:
        rates = self._rates
        settings = Settings(
            LABEL_MODE, 0.0, rates.epochs, 0, 0.0, cell.seed, batch=rates.batch, learning_rate=rates.learning_rate,
            schedule=SCHEDULE, sigma=PUBLISHED if cell.noise == PUBLISHED else "table",
            aggregate_every=rates.aggregate_every, average_into="copy" if cell.method == COPY else "server",
            cuts=str(common_split(self._fleets[cell.environment], works, rates.batch)) if cell.method in COMMON else "",
            fsim_threshold=threshold_of(table, rates.threshold),
        )  # fmt: skip
        if METHODS[cell.method] == "p3sl":
            return P3SL(shipped, settings, ledger.clock)
        return strategies.find(METHODS[cell.method]).build(shipped, settings)

    def _devices(
        self, fleet: Fleet, privacy: PrivacyTable, noise: NoiseTable, ledger: Ledger, told: Mapping[str, Metric],
        splits: Mapping[str, Sequence[int]], accuracy: Mapping[str, float],
    ) -> dict[str, P3slDevice]:  # fmt: skip
        found, spent = {}, ledger.spent()
        for device in fleet.devices:
            split = ledger.times[device.name].split
            sigma = noise.of(split)
            chain = told.get(f"chain/{device.name}")
            own = spent[device.name]
            found[device.name] = P3slDevice(
                split, tuple(splits[device.name]), device.alpha, sigma, privacy.at(split, 0.0),
                privacy.at(split, sigma), None if chain is None else float(chain), accuracy[device.name],
                own.awake_s / own.seconds, joules(own, self._rates.epochs),
            )  # fmt: skip
        return found


def setting_of(cell: P3slCell) -> str:
    """In words."""
    noise = "noise table" if cell.noise == TABLE else f"sigma {cell.noise}"
    return f"{cell.model}, {noise}, environment {cell.environment}"


def threshold_of(table: Table, own: float) -> float:
    """T_FSIM as the leakage table found it, else `own`, else what its splits show least of without noise: the paper's
    0.36 is just that (0.37 at split 10)."""
    if table.threshold.fsim is not None or own > 0.0:
        return own if table.threshold.fsim is None else table.threshold.fsim
    return min(point.fsim for point in table.curve if point.strength == 0.0)


def noise_of(noise: str, table: Table, privacy: PrivacyTable, own_threshold: float) -> NoiseTable:
    """The noise of each split in a row."""
    if noise == TABLE:
        return initial_table(privacy, threshold_of(table, own_threshold))
    return uniform_table(privacy.splits, float(noise))


def baselines_of(table: Table, devices: Mapping[str, P3slDevice]) -> dict[str, float]:
    """FSIM_total of guesses that see nothing, and of these splits without any noise."""
    count, base = len(devices), table.baselines
    return {
        "mean_colour": count * base.mean_colour.fsim, "unrelated": count * base.unrelated.fsim,
        "no_protection": sum(each.fsim_clean for each in devices.values()),
    }  # fmt: skip


def costs_of(fleet: Fleet, name: str, works: Sequence[Work], batch: int) -> tuple[SplitCost, ...]:
    """A device's modelled energy table."""
    (device,) = (each for each in fleet.devices if each.name == name)
    costs = {work.split: cost_of(device, work, batch) for work in works}
    return tuple(SplitCost(split, cost.energy_j, cost.peak_w, cost.seconds) for split, cost in costs.items())


def common_split(fleet: Fleet, works: Sequence[Work], batch: int) -> int:
    """Of the splits whose power every device can hold, the one that costs the fleet least."""
    held = set.intersection(*(set(within_cap(device, works, batch)) for device in fleet.devices))
    costs = {
        work.split: sum(cost_of(device, work, batch).energy_j for device in fleet.devices)
        for work in works
        if work.split in held
    }
    return min(costs, key=lambda split: (costs[split], split))


def joules(spent: Spent, epochs: int) -> dict[str, float]:
    """Of an epoch."""
    names = ("work_j", "awake_j", "whole_j", "could_sleep_j", "never_asleep_j")
    return {name.removesuffix("_j"): getattr(spent, name) / epochs for name in names}


def epoch_of(values: Mapping[str, Metric], tested: float, seconds: float) -> P3slEpoch:
    """A record of the strategy with what was measured beside it."""
    return P3slEpoch(
        int(values["epoch"] or 0), float(values["loss"] or 0.0), tested, int(values["bytes_up"] or 0),
        int(values["bytes_down"] or 0), round(seconds, 3),
    )  # fmt: skip
