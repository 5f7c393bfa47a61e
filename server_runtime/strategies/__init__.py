"""What a training strategy is, and the door to the strategies: the folder is the registry, a file's name is its name.

Sending, waiting, storing and resuming are left to `conductor`: a strategy asks by yielding and is sent the replies.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from contract.errors import ConfigError, suggest
from contract.messages import Activations, Choice, Gradient, PatchFeatures, Prototypes, Settled, Update

from ..store import Upload

if TYPE_CHECKING:
    import torch

    from ..backend import Backend
    from ..own_heads import Released
    from ..split_model import Shipped

Tensors = Mapping[str, np.ndarray]
Metric = float | int | str | None


@dataclass(frozen=True)
class Site:
    """Devices that share one class list, and the few numbers a strategy needs of them."""

    name: str
    devices: tuple[str, ...]  # sorted
    classes: int


@dataclass(frozen=True)
class Settings:
    """What the operator chose for training; the same for all sites of a run."""

    label_mode: str
    kappa: float
    epochs: int
    augmentations: int
    replaced: float  # share of the patches
    seed: int
    backend_lr: float = 0.0
    head_lr: float = 0.0
    # What follows is for the strategies that train on devices.
    batch: int = 64
    learning_rate: float = 0.01
    schedule: str = "constant"
    warmup: int = 0  # epochs
    local_epochs: int = 1
    cuts: str = ""  # as `plan.parse_cuts` reads it
    quorum: int = 0  # 0 waits for all
    average: str = "mean"  # one of aggregation.RULES
    outlier: float = 100.0  # times the median move, from which on a part is left out; 0: none is
    threshold: str = "auto"  # as `similarity.read_threshold` reads it
    alone: int = 3  # rounds in which a device is averaged with nobody
    # What follows is for rounds that ask some devices only, and for EFTViT.
    fraction: float = 1.0
    server_epochs: int = 2
    server_rate: float = 0.0  # 0: as the devices
    sampling: str = "median"  # or every image: one of plan.SAMPLINGS
    medians: float = 1.0  # of a class's features; 0: the largest class
    store_mb: int = 1024
    store_rounds: int = 0  # 0: for ever
    # Of prototypes: lambda_0, alpha, beta (algorithms.md 5.1), and who has copies of the server's half.
    prototype_strength: float = 1.0
    prototype_shift: float = 2.0
    prototype_renewal: float = 0.5
    server_copies: str = "each"
    # Of noise at the cut (P3SL and its baselines, algorithms.md 3).
    sigma: str = "auto"  # as `plan.parse_sigma` reads it
    fsim_threshold: float = 0.0  # T_FSIM; 0: the leakage table's own
    aggregate_every: int = 5  # R, in epochs
    average_by: str = "devices"
    average_into: str = "server"
    norms: str = "averaged"
    reference_accuracy: float = 0.0  # A_ref; 0: no floor
    accuracy_loss: float = 0.05  # beta
    sleep_least_s: float = 10.0  # 0: no device is told to sleep


@dataclass(frozen=True)
class Ask:
    """A question to devices. `name` is unique within the site's run and the same after a restart, so that a device may
    answer a repeated question from its memory; `tensors` holds, for each asked device, what its question carries.
    `parameters` are all devices', `own` each device's, on top of them.

    `step` numbers a question that moves a part of the model on the device: both sides then go back to a common
    checkpoint when one has lost its newest. Numbers rise from 1. `quorum` answers are enough when the other devices are
    away or stuck; None waits for all. Never more than 0 with a step: a device whose late step the server went on
    without would stand where no checkpoint of the server's does, and take its site back for ever. With 0 a device that
    is away is passed over: its next question must be one that begins wherever it stands (`take_turn`).

    Raises: ValueError for a question with a step and a quorum above 0.
    """

    name: str
    kind: str
    tensors: Mapping[str, Tensors]
    parameters: Mapping[str, float | int | str] = field(default_factory=dict)
    step: int | None = None
    quorum: int | None = None
    own: Mapping[str, Mapping[str, float | int | str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.step is not None and self.quorum:
            raise ValueError(
                f"Ask {self.name!r} has step {self.step} and quorum {self.quorum}: a question that moves a part of the "
                "model on the devices must wait for all of them; leave one of the two out"
            )


@dataclass(frozen=True)
class Record:
    """A line for metrics.jsonl, and a moment when `state()` is whole: the conductor may keep a checkpoint here. Without
    values it is such a moment and no line."""

    values: Mapping[str, Metric]


@dataclass(frozen=True)
class Progress:
    """A moment between two steps, at which the torch process may serve others; `text` is what people are told.

    It returns True when a checkpoint is due: a strategy whose `state()` is not whole here then makes it so, and yields
    a `Record` without values."""

    text: str
    step: int


Reply = Upload | Gradient | Settled | Choice | Activations | Update | PatchFeatures | Prototypes
Replies = Mapping[str, Reply]  # device -> what it answered to the last Ask
Conduct = Generator[Ask | Record | Progress, "Replies | bool", None]


@dataclass(frozen=True)
class State:
    """All that training needs to go on as if it had not stopped. Names starting with `backend.` and `head.` are the
    weights that the run directory publishes at the end."""

    tensors: Mapping[str, torch.Tensor]
    values: Mapping[str, Metric]


class Strategy(Protocol):
    """One site's training."""

    def run(self, site: Site) -> Conduct:
        """Train, from the loaded state if there is one."""
        ...

    def state(self) -> State: ...

    def load(self, site: Site, state: State) -> None: ...

    def predict(self, codes: np.ndarray) -> np.ndarray:
        """Wire codes (B,T,d) i8 -> logits (B,C) f32; in client-head mode features (B,f) f32."""
        ...


class PartStrategy(Protocol):
    """One site's training on devices; where it differs from `Strategy`: what it predicts from."""

    def run(self, site: Site) -> Conduct: ...

    def state(self) -> State: ...

    def load(self, site: Site, state: State) -> None: ...

    def predict_part(self, device: str, values: np.ndarray) -> np.ndarray:
        """Values (B,n) f32 or f16 of a device's part -> logits (B,C) f32; in client-head mode features (B,f) f32."""
        ...


@runtime_checkable
class HandsOver(Protocol):
    """A strategy that goes on without devices, and has something for one that comes back when all is over."""

    def last_part(self, device: str) -> Ask:
        """The question that leaves what was trained on the device; no replies are handed in."""
        ...


class StrategyModule(Protocol):
    """What a file of this folder offers."""

    LABEL_MODES: tuple[str, ...]

    def build(self, backend: Backend | Shipped | Released, settings: Settings) -> Strategy | PartStrategy: ...


def names() -> tuple[str, ...]:
    """All strategies, by the files in this folder; nothing is imported."""
    return tuple(sorted(item.name for item in pkgutil.iter_modules(__path__) if not item.name.startswith("_")))


def check(name: str) -> str:
    """Return `name` when it is a strategy.

    Raises:
        ConfigError: it is not; the cause names the nearest one.
    """
    if name not in names():
        cure = "choose one of: " + ", ".join(names())
        raise ConfigError(f"there is no strategy {name!r}{suggest(name, names())}", cure)
    return name


def find(name: str) -> StrategyModule:
    """Import a strategy (and with it torch)."""
    module: StrategyModule = importlib.import_module(f"{__name__}.{check(name)}")
    return module
