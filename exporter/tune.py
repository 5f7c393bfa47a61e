"""Tuning of the backend on public data, split adaptation's step 4: as published, and with the noise of real devices.

Which learning rate a site should adapt with is left to exporter.few_shot; where tokens come from to
exporter.backend_tuning.

Paper: Split Adaptation (SA) section 3.3. D_u is the public set and its Hilbert transform, X_K the float frontend's
tokens, X_m those of the frontend that was quantized on subset m of D_u (m = 0: on all of it, the one that is sent).
Published: L = sum over x and m of CE(lambda X_m + (1 - lambda) X_K), lambda ~ Beta(.75, .75) per sample, Adam at 1e-5,
one epoch. Noise-aware: the frontends of the subsets carry weight noise, as every device's own will, all tokens go
through the wire at a random strength of noise, each batch meets one frontend, and each image is transformed every other
time; and the backend learns to give the features that it gave of clean tokens before, not the public classes: sites
have other classes, and need the features as they were (docs/results.md has what that is worth).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from contract.console import progress
from contract.errors import TrainingError
from exporter.channel import WireChannel


@dataclass(frozen=True)
class TuneSettings:
    """How the backend is tuned; the strengths of the noise are the channel's own list."""

    epochs: int | None = None  # None: by the size of the backend
    lr: float = 5e-4
    batch: int = 64
    mix: float = 0.75  # both parameters of the Beta that mixes two frontends' tokens
    subsets: int = 3  # M: disjoint parts of the public set, each of which calibrates a frontend for tuning
    published: bool = False  # every sample meets every frontend once an epoch, and nothing carries noise


PUBLISHED = TuneSettings(epochs=1, lr=1e-5, batch=32, published=True)
EPOCHS_LEAST, EPOCHS_MOST = 3, 20
BUDGET_MACS = 2e13  # of a tuning: minutes on two cores; decides between least and most epochs
WARM = 0.05  # share of the steps in which the rate rises
SMALLEST_SPREAD = 1e-6  # of a feature over images: below it there is nothing but rounding


def settings_for(tune: str, subsets: int = TuneSettings.subsets) -> TuneSettings:
    """The settings that a value of --tune stands for, with M = `subsets`."""
    return replace(PUBLISHED if tune == "paper" else TuneSettings(), subsets=subsets)


@dataclass(frozen=True)
class TokenSet:
    """Tokens of the same n images from several frontends, the first of which others are mixed with; labels (n,).

    Each is (n, T, d), or (2 n, T, d) where the Hilbert transforms of the images follow the images: D_u.
    """

    frontends: tuple[NDArray[np.float16], ...]
    labels: NDArray[np.int64]

    @property
    def images(self) -> int:
        """n; row n + i is the transform of image i."""
        return len(self.labels)

    @property
    def is_transformed(self) -> bool:
        """Whether transforms are there."""
        return len(self.frontends[0]) == 2 * len(self.labels)

    def rows(self, frontend: int, rows: NDArray[np.int64]) -> Tensor:
        """(B, T, d) float32."""
        order = np.sort(rows)  # a memory map is read in file order
        back = np.argsort(np.argsort(rows, kind="stable"), kind="stable")
        return torch.from_numpy(self.frontends[frontend][order].astype(np.float32))[torch.from_numpy(back)]


class Classifier(nn.Module):
    """Backend and one linear head: tokens (B, T, d) -> logits (B, C)."""

    def __init__(self, backend: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.backend = backend
        self.head = head

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.backend(tokens))


def linear_head(weight: Tensor, bias: Tensor) -> nn.Linear:
    """A linear layer with copies of these values, weight (C, d) and bias (C,)."""
    head = nn.Linear(weight.shape[1], weight.shape[0])
    head.load_state_dict({"weight": weight.clone(), "bias": bias.clone()})
    return head


def count_epochs(backend: nn.Module, token_count: int, images: int) -> int:
    """As many epochs as the budget pays for. A function of sizes alone, so that an export repeats anywhere."""
    parameters = sum(parameter.numel() for parameter in backend.parameters())
    macs = images * token_count * parameters * 3.0  # forward once, backward twice that
    return int(np.clip(BUDGET_MACS // max(macs, 1.0), EPOCHS_LEAST, EPOCHS_MOST))


def tune(
    model: Classifier, tokens: TokenSet, rows: NDArray[np.int64], classes: NDArray[np.int64],
    channel: WireChannel | None, settings: TuneSettings, rng: np.random.Generator, device: str, description: str,
) -> None:  # fmt: skip
    """Tune the backend in place; published also the head, which noise-aware tuning leaves alone.

    Images rows (n,) of the token set are used; `classes` (C,) lists the class number that each logit stands for.
    Without a channel tokens go to the backend as they are.

    Raises TrainingError when the loss is not finite.
    """
    model.to(device).eval()  # no dropout: a few hundred steps regularised by the noise itself
    loss_of = _classes(model, tokens, classes, device) if settings.published else _features(model, tokens, rows, device)
    learnt = model if settings.published else model.backend
    for parameter in learnt.parameters():
        parameter.requires_grad_(True)
    optimiser = torch.optim.Adam(learnt.parameters(), lr=settings.lr)
    generator = torch.Generator(device=device).manual_seed(int(rng.integers(2**62)))
    samples = union(tokens, rows) if settings.published else rows
    epochs = settings.epochs or count_epochs(model.backend, tokens.frontends[0].shape[1], len(samples))
    steps = epochs * -(-len(samples) // settings.batch)
    step = 0
    with progress(total=epochs * len(samples), description=description, unit="images") as bar:
        for _ in range(epochs):
            order = rng.permutation(samples)
            for start in range(0, len(order), settings.batch):
                batch = order[start : start + settings.batch]
                if tokens.is_transformed and not settings.published:
                    batch = batch + tokens.images * rng.integers(0, 2, len(batch))
                count = len(tokens.frontends)
                chosen = range(1, count) if settings.published else [int(rng.integers(count))]
                mixtures = [mixture(tokens, m, batch, settings.mix, rng) for m in chosen]
                inputs = torch.cat(mixtures).to(device)
                if channel is not None:
                    level = int(rng.integers(len(channel.kappas)))
                    inputs = channel.restore(channel.release(inputs, level, generator), level)
                loss = loss_of(inputs, np.tile(batch, len(mixtures)))
                if not torch.isfinite(loss):
                    raise TrainingError(
                        f"the tuning loss should be finite, found {loss.item()}",
                        "check the weights, or use --tune none",
                    )
                optimiser.param_groups[0]["lr"] = settings.lr * (1.0 if settings.published else _share(step, steps))
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                optimiser.step()
                step += 1
                bar.update(len(batch))
    model.requires_grad_(False)


Loss = Callable[[Tensor, "NDArray[np.int64]"], Tensor]  # of tokens (B, T, d) of these rows of the token set


def _classes(model: Classifier, tokens: TokenSet, classes: NDArray[np.int64], device: str) -> Loss:
    """Cross-entropy of the public classes."""
    target = _targets(tokens.labels, classes)

    def loss(inputs: Tensor, batch: NDArray[np.int64]) -> Tensor:
        return cross_entropy(model(inputs), torch.from_numpy(target[batch % tokens.images]).to(device))

    return loss


def _features(model: Classifier, tokens: TokenSet, rows: NDArray[np.int64], device: str) -> Loss:
    """Square distance to what the backend, as it is now, makes of clean tokens; in units of each feature's spread."""
    clean = union(tokens, rows)
    goal = backend_features(model.backend, tokens, clean, device, "Features of clean tokens")
    spread = goal.std(dim=0, correction=0)
    goal, scale = goal.to(device), torch.where(spread > SMALLEST_SPREAD, spread, 1.0).to(device)
    place = np.full(len(tokens.frontends[0]), -1, np.int64)
    place[clean] = np.arange(len(clean))

    def loss(inputs: Tensor, batch: NDArray[np.int64]) -> Tensor:
        wanted = goal[torch.from_numpy(place[batch]).to(device)]
        return ((model.backend(inputs) - wanted) / scale).square().mean()

    return loss


def _share(step: int, steps: int) -> float:
    """Share of the learning rate at a step: a linear rise, then half a cosine to zero."""
    rise = max(1, int(WARM * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1.0 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def union(tokens: TokenSet, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The images of these rows and, where they are there, their transforms."""
    return np.concatenate([rows, rows + tokens.images]) if tokens.is_transformed else rows


def mixture(tokens: TokenSet, frontend: int, batch: NDArray[np.int64], mix: float, rng: np.random.Generator) -> Tensor:
    """X* = lambda X_m + (1 - lambda) X_0 with m the frontend and lambda ~ Beta(mix, mix) per sample, (B, T, d)."""
    plain = tokens.rows(0, batch)
    if frontend == 0:
        return plain
    share = torch.from_numpy(rng.beta(mix, mix, size=(len(batch), 1, 1)).astype(np.float32))
    return mixed(plain, tokens.rows(frontend, batch), share)


def mixed(plain: Tensor, other: Tensor, share: Tensor) -> Tensor:
    """share * other + (1 - share) * plain: exactly one of them where the share is 0 or 1."""
    return torch.lerp(plain, other, share)


def disjoint_subsets(count: int, parts: int, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """All numbers below `count`, dealt out at random to `parts` subsets of equal size (to one); none for no part."""
    if parts == 0:
        return []
    return [np.sort(part) for part in np.array_split(rng.permutation(count), parts)]


def _targets(labels: NDArray[np.int64], classes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Logit number of each sample; -1 where its class has no logit."""
    place = np.full(int(max(labels.max(), classes.max())) + 1, -1, np.int64)
    place[classes] = np.arange(len(classes))
    return place[labels]


@torch.no_grad()
def backend_features(
    backend: nn.Module, tokens: TokenSet, rows: NDArray[np.int64], device: str, description: str, batch: int = 32
) -> Tensor:
    """Features (n, d) of the plain frontend's tokens."""
    backend.to(device).eval()
    features = []
    with progress(total=len(rows), description=description, unit="images") as bar:
        for start in range(0, len(rows), batch):
            features.append(backend(tokens.rows(0, rows[start : start + batch]).to(device)).cpu())
            bar.update(len(features[-1]))
    return torch.cat(features)


def fit_head(features: Tensor, targets: NDArray[np.int64], classes: int, steps: int = 100) -> nn.Linear:
    """Linear head by multinomial logistic regression (L-BFGS, L2) on features (n, d), started at zero."""
    scale = features.std() + 1e-6
    inputs, wanted = features / scale, torch.from_numpy(targets)
    head = nn.Linear(features.shape[1], classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    optimiser = torch.optim.LBFGS(head.parameters(), max_iter=steps, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = cross_entropy(head(inputs), wanted) + 1e-4 * head.weight.square().sum()
        value.backward()
        return value

    optimiser.step(loss)
    with torch.no_grad():
        head.weight.div_(scale)
    return head


@torch.no_grad()
def top1(
    model: Classifier, tokens: Sequence[NDArray[np.generic]], labels: NDArray[np.int64],
    through: Callable[[Tensor], Tensor] | None, device: str, batch: int = 32,
) -> float:  # fmt: skip
    """Share of right answers on tokens (n, T, d), sent through `through` (the wire) first where one is given."""
    model.to(device).eval()
    right = 0
    for start in range(0, len(labels), batch):
        inputs = torch.from_numpy(np.asarray(tokens[start : start + batch], np.float32)).to(device)
        logits = model(inputs if through is None else through(inputs))
        right += int((logits.argmax(1).cpu().numpy() == labels[start : start + batch]).sum())
    return right / len(labels)
