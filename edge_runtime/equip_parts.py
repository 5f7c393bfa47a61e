"""What a device needs to train its part of a model: trainer, images, own head, checkpoints, put together.

Secrets, package and images are `equip`'s part; it calls this for a package that has parts to be trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from contract.leakage import LEAKAGE_NAME, of_package
from contract.privacy_table import from_leakage
from contract.training import PARAMETERS_NAME, TrainingCut, TrainingPlan
from edge_runtime.choose_split import SplitCost
from edge_runtime.config import LocalConfig
from edge_runtime.data import Dataset, Sample
from edge_runtime.head import Head
from edge_runtime.install import Installed
from edge_runtime.own_choice import OwnChoice, Spent, read_costs, read_rows
from edge_runtime.part_head import PartHead
from edge_runtime.part_keeper import PartKeeper, PartRules
from edge_runtime.part_ledger import PartLedger
from edge_runtime.part_store import PartStore
from edge_runtime.part_worker import PartWorker, Pictures
from edge_runtime.picture_cache import PictureCache
from edge_runtime.pipeline import read_picture
from edge_runtime.release_ledger import ReleaseLedger
from edge_runtime.remeasure import bench_of, is_quick, remeasure
from edge_runtime.round_keeper import RoundKeeper, Shipped
from edge_runtime.stages import Stages
from edge_runtime.state import State
from edge_runtime.terms import ROUND_ASKS, Terms
from edge_runtime.throttle import SlowdownWatch
from edge_runtime.trainer import Trainer, TrainerSettings, open_trainer
from edge_runtime.training_set import TrainingSet
from edge_runtime.transforms.cut_noise import CutNoise
from edge_runtime.worker import Counters, Surroundings


def read_shipped(folder: Path) -> Shipped:
    """What reads tensors of a verified package's parameter file."""

    def read(names: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        with safe_open(str(folder / PARAMETERS_NAME), framework="numpy") as file:
            return {name: file.get_tensor(name) for name in names}

    return read


def equip_parts(
    installed: Installed,
    plan: TrainingPlan,
    terms: Terms,
    dataset: Dataset,
    wire_labels: NDArray[np.int64],
    secret: bytes,
    threads: int,
    state: State,
    stages: Stages,
    around: Surroundings,
    ledger: ReleaseLedger,
    config: LocalConfig,
    say: Callable[[str], None],
) -> tuple[PartWorker, Callable[[str], Head | None]]:
    """The worker, and what gives the device's own head of a run once it predicted for it.

    Raises: ConfigError for an energy table that is none of this package's.
    """
    image, counters = installed.manifest.image, Counters()

    def picture(sample: Sample) -> NDArray[np.uint8]:
        return read_picture(sample, image)

    def tick(images: int) -> None:
        counters.steps += images
        stages.sample()
        around.check_stop()

    def open_cut(cut: TrainingCut) -> Trainer:
        return open_trainer(installed.folder, cut, plan.optimiser, TrainerSettings(threads))

    classes = len(dataset.classes)
    images = TrainingSet(dataset.samples, classes, image, plan.augment, PictureCache(picture), secret)
    head = PartHead(classes, secret, plan.optimiser) if terms.label_mode == "client-head" else None
    fresh, floor = config.noise == "fresh", config.wishes.sigma_floor
    noise = CutNoise(secret, installed.digest, fresh, floor)
    size = (image.height, image.width)
    accounts = PartLedger(ledger, installed.digest.hex(), size, config.max_patch_share, floor)
    rules, store = PartRules(plan, terms.label_mode, wire_labels), PartStore(state.parts, say)
    if plan.strategy in ROUND_ASKS:
        shipped = read_shipped(installed.folder)
        keeper: PartKeeper = RoundKeeper(rules, images, open_cut, shipped, store, tick, fresh, accounts.release)
    else:

        def release(
            ids: Sequence[bytes], cut: TrainingCut, kept: NDArray[np.int64] | None, sigma: float, draw: str
        ) -> None:
            accounts.release(ids, cut, kept, sigma, draw)
            counters.sigma = sigma

        choice = open_choice(installed, plan, config, threads, stages, counters, tick, say)
        keeper = PartKeeper(rules, images, open_cut, head, store, tick, release, noise, choice.answer)
    worker = PartWorker(keeper, Pictures(dataset.samples, image, picture), stages, around, counters)
    return worker, lambda run: None if head is None else head.as_head()


def open_choice(
    installed: Installed,
    plan: TrainingPlan,
    config: LocalConfig,
    threads: int,
    stages: Stages,
    counters: Counters,
    tick: Callable[[int], None],
    say: Callable[[str], None],
) -> OwnChoice:
    """What chooses this device's split, by its own energy table. Raises: ConfigError; PackageError."""
    costs: tuple[SplitCost, ...] = ()
    again: Callable[[Sequence[SplitCost]], Sequence[SplitCost]] | None = None
    if config.energy_table is not None:
        model, digest = installed.manifest.model, installed.digest.hex()
        costs = read_costs(config.energy_table, model, digest)
        if config.remeasure_s and is_quick(stages.meter):
            batch = read_rows(config.energy_table, model, digest)[0].point.batch

            def measure_again(old: Sequence[SplitCost]) -> Sequence[SplitCost]:
                from edge_runtime.profiling.parts import parts_of  # seldom needed

                candidates = parts_of(installed, plan, batch, threads, 0)
                return remeasure(candidates, config.remeasure_s, bench_of(lambda: tick(1)), stages.meter, old)

            again = measure_again
    watch = SlowdownWatch()

    def spent() -> Spent:
        train = stages.costs().get("train")
        slowed = frozenset(flag.name for flag in watch.flags())
        if train is None:
            return Spent(0.0, 0.0, counters.images, slowed)
        return Spent(train.energy_j, train.bound_j or 0.0, counters.images, slowed)

    signed = None
    if any(file.name == LEAKAGE_NAME for file in installed.manifest.files):
        table = of_package((installed.folder / LEAKAGE_NAME).read_bytes(), installed.manifest)
        signed = from_leakage(table, [cut.index for cut in plan.cuts]) if table.unit == "sigma" else None
    return OwnChoice(costs, config.wishes, say, spent, signed, again)
