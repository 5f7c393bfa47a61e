"""Noise-aware tuning of the backend on public data: split adaptation's step 4 with the noise that devices will add.

Which learning rate a site should adapt with is left to exporter.few_shot; where tokens come from to exporter.build.

Paper: Split Adaptation (SA) section 3.3, L_tune with mixup over M + 1 quantized frontends, lambda ~ Beta(.75, .75).
Instead of frontends calibrated on other data, the others here carry weight noise, as every device's own will.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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

    epochs: int = 3
    lr: float = 1e-4
    batch: int = 32
    mix: float = 0.75  # both parameters of the Beta that mixes two frontends' tokens
    noisy_frontends: int = 3


@dataclass(frozen=True)
class TokenSet:
    """Tokens (n, T, d) of the same images from the plain frontend and from noisy ones, with labels (n,)."""

    frontends: tuple[NDArray[np.float16], ...]
    labels: NDArray[np.int64]

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


def tune(
    model: Classifier, tokens: TokenSet, rows: NDArray[np.int64], classes: NDArray[np.int64], channel: WireChannel,
    settings: TuneSettings, rng: np.random.Generator, device: str, description: str,
) -> None:  # fmt: skip
    """Minimise the cross-entropy of noisy public tokens over backend and head, in place.

    rows (n,) of the token set are used; `classes` (C,) lists the class number that each logit stands for.

    Raises TrainingError when the loss is not finite.
    """
    model.to(device).eval()  # no dropout: a few hundred steps regularised by the noise itself
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    optimiser = torch.optim.Adam(model.parameters(), lr=settings.lr)
    generator = torch.Generator(device=device).manual_seed(int(rng.integers(2**62)))
    target = _targets(tokens.labels, classes)
    with progress(total=settings.epochs * len(rows), description=description, unit="images") as bar:
        for _ in range(settings.epochs):
            order = rng.permutation(rows)
            for start in range(0, len(order), settings.batch):
                batch = order[start : start + settings.batch]
                inputs = _mixed(tokens, batch, settings, rng).to(device)
                level = int(rng.integers(len(channel.kappas)))
                inputs = channel.restore(channel.release(inputs, level, generator), level)
                loss = cross_entropy(model(inputs), torch.from_numpy(target[batch]).to(device))
                if not torch.isfinite(loss):
                    raise TrainingError(
                        f"the tuning loss should be finite, found {loss.item()}",
                        "check the weights, or use --tune none",
                    )
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                optimiser.step()
                bar.update(len(batch))
    model.requires_grad_(False)


def _mixed(tokens: TokenSet, batch: NDArray[np.int64], settings: TuneSettings, rng: np.random.Generator) -> Tensor:
    """Tokens of one random frontend, mixed with the plain one's: X* = lambda X_m + (1 - lambda) X_0, (B, T, d)."""
    plain = tokens.rows(0, batch)
    other = int(rng.integers(len(tokens.frontends)))
    if other == 0:
        return plain
    share = torch.from_numpy(rng.beta(settings.mix, settings.mix, size=(len(batch), 1, 1)).astype(np.float32))
    return torch.lerp(plain, tokens.rows(other, batch), share)


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
