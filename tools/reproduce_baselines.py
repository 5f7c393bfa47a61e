"""Split adaptation's baselines that train a part of the model in the clear, on a site's raw images (SA, Table 1).

fine_tuning: the whole model; ln_tuning: every LayerNorm; split_learning: the frontend, before a frozen backend (in one
piece, which has the gradients of the split form); offsite_tuning: the first and last two blocks, while half of the
middle is left out, and afterwards plugged back into the whole middle. Each with a new linear head. All learn by one
recipe on one budget. Rows and files are left to `reproduce`, what to compare with to `reproduce_table`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from contract.errors import ConfigError, TrainingError
from exporter.split import split_model
from server_runtime.backend import adam, new_head

ADAPTERS = 2  # blocks at each end that offsite tuning trains
HEAD_FACTOR = 10  # the head's learning rate over the model's, as offsite tuning's authors have it
EVALUATED_AT_ONCE = 500
SITE = "site"


@dataclass(frozen=True)
class Budget:
    """What each baseline may spend: runs are len(rates) x folds, and one more on all images."""

    epochs: int = 100
    offsite_epochs: int = 50
    batch: int = 32
    rates: tuple[float, ...] = (1e-5, 1e-4, 1e-3, 1e-2)  # Adam, cosine to 0, no weight decay
    folds: int = 3

    def document(self) -> dict[str, object]:
        return {**asdict(self), "rates": list(self.rates)}


QUICK_BUDGET = Budget(epochs=8, offsite_epochs=4, rates=(1e-4, 1e-3, 1e-2), folds=2)


@dataclass(frozen=True)
class Images:
    """Normalised images (n, 3, h, w) float32 and class numbers (n,)."""

    inputs: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> Images:
        return Images(self.inputs.to(device), self.labels.to(device))

    def rows(self, chosen: Tensor) -> Images:
        return Images(self.inputs[chosen], self.labels[chosen])


@dataclass(frozen=True)
class Score:
    """Share that is right and the mean loss, in the form that is used and, for offsite tuning, in the emulator too."""

    accuracy: float
    loss: float
    emulator_accuracy: float | None = None


@dataclass(frozen=True)
class Found:
    """What one baseline gave on the test images, and with which learning rate."""

    accuracy: float
    emulator_accuracy: float | None  # offsite tuning before it is plugged in
    lr: float
    held_out_accuracy: float | None  # None: one shot a class leaves nothing to hold out
    trained_values: int  # the head's included
    steps: int  # all that were taken, the search's too

    def document(self) -> dict[str, object]:
        return asdict(self)


class Learner:
    """A copy of the model with a new head, set up for one baseline."""

    def __init__(self, model: nn.Module, head: nn.Linear, emulated: Sequence[int] | None = None) -> None:
        """`emulated`: the blocks that are there while it learns; None: all of them."""
        self.model, self.head = model, head
        self._whole = getattr(model, "blocks", None)
        self._emulated = None if emulated is None else nn.Sequential(*(model.blocks[place] for place in emulated))

    @property
    def trained(self) -> list[nn.Parameter]:
        return [each for each in self.model.parameters() if each.requires_grad]

    def logits(self, images: Tensor) -> Tensor:
        """(B, C)"""
        logits: Tensor = self.head(self.model.forward_head(self.model.forward_features(images), pre_logits=True))
        return logits

    def learn(self, images: Images, lr: float, epochs: int, batch: int, seed: int) -> int:
        """Adam on cross-entropy, the rate falling to 0 along a cosine over the steps; how many there were."""
        generator = torch.Generator().manual_seed(seed)
        optimiser = adam([(self.trained, lr), (self.head.parameters(), HEAD_FACTOR * lr)])
        total = epochs * math.ceil(len(images.labels) / batch)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, total)
        if self._emulated is not None:
            self.model.blocks = self._emulated
        for _ in range(epochs):
            order = torch.randperm(len(images.labels), generator=generator).to(images.labels.device)
            for rows in order.split(batch):
                optimiser.zero_grad(set_to_none=True)
                functional.cross_entropy(self.logits(images.inputs[rows]), images.labels[rows]).backward()
                optimiser.step()
                schedule.step()
        if self._emulated is not None:
            self.model.blocks = self._whole
        return total

    def score(self, images: Images) -> Score:
        """As it is used: offsite tuning's adapters stand around the whole middle."""
        accuracy, loss = self._score(images)
        if self._emulated is None:
            return Score(accuracy, loss)
        self.model.blocks = self._emulated
        emulated, _ = self._score(images)
        self.model.blocks = self._whole
        return Score(accuracy, loss, emulated)

    @torch.no_grad()
    def _score(self, images: Images) -> tuple[float, float]:
        right, loss = 0, 0.0
        device = self.head.weight.device
        for inputs, labels in zip(
            images.inputs.split(EVALUATED_AT_ONCE), images.labels.split(EVALUATED_AT_ONCE), strict=True
        ):
            wanted, logits = labels.to(device), self.logits(inputs.to(device)).float()
            right += int((logits.argmax(dim=1) == wanted).sum())
            loss += float(functional.cross_entropy(logits, wanted, reduction="sum"))
        return right / len(images.labels), loss / len(images.labels)


# -- what each baseline trains


def _fine_tuning(model: nn.Module, cut: int) -> None:
    model.requires_grad_(True)


def _ln_tuning(model: nn.Module, cut: int) -> None:
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_(True)


def _split_learning(model: nn.Module, cut: int) -> None:
    frontend, _ = split_model(model, cut)
    for parameter in frontend.parameters():
        parameter.requires_grad_(True)


def _offsite_tuning(model: nn.Module, cut: int) -> None:
    blocks = blocks_of(model)
    for block in (*blocks[:ADAPTERS], *blocks[-ADAPTERS:]):
        block.requires_grad_(True)


CHOOSE: dict[str, Callable[[nn.Module, int], None]] = {
    "split_learning": _split_learning,
    "offsite_tuning": _offsite_tuning,
    "fine_tuning": _fine_tuning,
    "ln_tuning": _ln_tuning,
}


def blocks_of(model: nn.Module) -> nn.Sequential:
    """The one row of blocks of a vision transformer. Raises: ConfigError where there is none."""
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.Sequential):
        raise ConfigError("offsite tuning needs one row of blocks, as vit_* and deit_* have", "leave it out of --cases")
    return blocks


def emulated_blocks(depth: int) -> list[int]:
    """The blocks of offsite tuning's emulator: both adapters, and half of the middle, evenly spread (rounded linspace).

    Raises: ConfigError when there is no middle to leave half of.
    """
    middle = range(ADAPTERS, depth - ADAPTERS)
    if len(middle) < 2:
        raise ConfigError(
            f"offsite tuning needs {2 * ADAPTERS + 2} blocks or more, found {depth}", "leave it out of --cases"
        )
    kept = np.round(np.linspace(0, len(middle) - 1, len(middle) // 2)).astype(int)
    return [*range(ADAPTERS), *(middle[int(place)] for place in kept), *range(depth - ADAPTERS, depth)]


def make_learner(name: str, model: nn.Module, cut: int, classes: int, seed: int) -> Learner:
    """A copy of `model` (on the device where it is) of which the baseline's part is trained."""
    copied = copy.deepcopy(model).train().requires_grad_(False)
    CHOOSE[name](copied, cut)
    device = next(copied.parameters()).device
    emulated = emulated_blocks(len(blocks_of(copied))) if name == "offsite_tuning" else None
    return Learner(copied, new_head(copied.num_features, classes, seed, SITE, device), emulated)


# -- the search


def folds_of(labels: Tensor, count: int) -> Tensor:
    """Fold (n,) of each image: the shots of a class are dealt out in turn."""
    seen: dict[int, int] = {}
    folds = []
    for label in labels.tolist():
        folds.append(seen.get(label, 0) % count)
        seen[label] = seen.get(label, 0) + 1
    return torch.tensor(folds, device=labels.device)


def run_baseline(
    name: str, model: nn.Module, cut: int, train: Images, test: Images, classes: int, budget: Budget, seed: int
) -> Found:
    """Choose the learning rate on held-out shots, then learn from all of them and look at the test images once.

    Of offsite tuning the plugged-in form chooses, which its client alone could not see: in the baseline's favour.
    Raises: TrainingError when no rate gives a finite loss; ConfigError for a model too shallow for offsite tuning.
    """
    device = next(model.parameters()).device
    train = train.to(device)
    epochs = budget.offsite_epochs if name == "offsite_tuning" else budget.epochs
    steps = 0

    def learned(images: Images, lr: float) -> Learner:
        nonlocal steps
        learner = make_learner(name, model, cut, classes, seed)
        steps += learner.learn(images, lr, epochs, budget.batch, seed)
        return learner

    lr, held_out = choose_rate(learned, train, budget)
    learner = learned(train, lr)
    last = learner.score(test)
    if not math.isfinite(last.loss):
        raise TrainingError(f"{name}: the loss at learning rate {lr:g} is {last.loss}", "lower the rates of the budget")
    values = sum(each.numel() for each in (*learner.trained, *learner.head.parameters()))
    return Found(last.accuracy, last.emulator_accuracy, lr, held_out, values, steps)


def choose_rate(
    learned: Callable[[Images, float], Learner], train: Images, budget: Budget
) -> tuple[float, float | None]:
    """(rate, held-out accuracy) with the best held-out accuracy, then loss; the grid's middle where there is one shot.

    Raises: TrainingError when every rate's held-out loss is not finite.
    """
    count = min(budget.folds, int(torch.bincount(train.labels.cpu()).max()))
    if count < 2:
        return budget.rates[len(budget.rates) // 2], None
    folds = folds_of(train.labels, count)
    right, losses = [0.0] * len(budget.rates), [0.0] * len(budget.rates)
    for place, lr in enumerate(budget.rates):
        for fold in range(count):
            held = train.rows(folds == fold)
            score = learned(train.rows(folds != fold), lr).score(held)
            right[place] += score.accuracy * len(held.labels)
            losses[place] += score.loss * len(held.labels)
    finite = [place for place, loss in enumerate(losses) if math.isfinite(loss)]
    if not finite:
        raise TrainingError("no learning rate of the grid gives a finite loss", "lower the rates of the budget")
    best = max(finite, key=lambda place: (round(right[place]), -losses[place]))
    return budget.rates[best], right[best] / len(train.labels)
