"""What a device needs to train its part of a model: trainer, images, own head, checkpoints, put together.

Secrets, package and images are `equip`'s part; it calls this for a package that has parts to be trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from contract.training import PARAMETERS_NAME, TrainingCut, TrainingPlan
from edge_runtime.data import Dataset, Sample
from edge_runtime.head import Head
from edge_runtime.install import Installed
from edge_runtime.part_head import PartHead
from edge_runtime.part_keeper import PartKeeper, PartRules
from edge_runtime.part_ledger import PartLedger
from edge_runtime.part_store import PartStore
from edge_runtime.part_worker import PartWorker, Pictures
from edge_runtime.picture_cache import PictureCache
from edge_runtime.pipeline import read_picture
from edge_runtime.release_ledger import ReleaseLedger
from edge_runtime.round_keeper import RoundKeeper, Shipped
from edge_runtime.stages import Stages
from edge_runtime.state import State
from edge_runtime.terms import ROUND_ASKS, Terms
from edge_runtime.trainer import Trainer, TrainerSettings, open_trainer
from edge_runtime.training_set import TrainingSet
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
    max_patch_share: float,
    say: Callable[[str], None],
    fresh: bool = False,
) -> tuple[PartWorker, Callable[[str], Head | None]]:
    """The worker, and what gives the device's own head of a run once it predicted for it; `fresh` masks what is sent
    anew each time, where patches are masked."""
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
    accounts = PartLedger(ledger, installed.digest.hex(), (image.height, image.width), max_patch_share)
    rules, store = PartRules(plan, terms.label_mode, wire_labels), PartStore(state.parts, say)
    if plan.strategy in ROUND_ASKS:
        shipped = read_shipped(installed.folder)
        keeper: PartKeeper = RoundKeeper(rules, images, open_cut, shipped, store, tick, fresh, accounts.release)
    else:
        keeper = PartKeeper(rules, images, open_cut, head, store, tick, accounts.release)
    worker = PartWorker(keeper, Pictures(dataset.samples, image, picture), stages, around, counters)
    return worker, lambda run: None if head is None else head.as_head()
