"""The learning rates a site should adapt with, chosen by playing sites: few-shot tasks on held-out public classes.

Tuning the backend without those classes comes first and is exporter.tune's; the real adaptation is the server's.

A model was usually pre-trained on its public classes, so even held-out ones are no news to it: any rate solves them and
the choice would be blind. Turned pictures are news. A played class is therefore a held-out class in one of the turns
that `turned` makes; in the demo this moved the choice from a rate that lost to linear probing to one that beats it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from contract.adaptation import rate_share
from contract.console import progress
from exporter.channel import WireChannel
from exporter.tune import Classifier, TokenSet

DEFAULT_BACKEND_LR = 1e-5  # SA section 4.1
DEFAULT_HEAD_LR = 1e-3
SMALLEST_SPREAD = 1e-6  # of a feature over images: below it there is nothing but rounding


@dataclass(frozen=True)
class FewShotSettings:
    """Size of the played tasks and the rates that are tried."""

    backend_lrs: tuple[float, ...] = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
    head_lrs: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    episodes_most: int = 6  # few tasks cannot tell neighbouring rates apart
    episodes_least: int = 2
    budget_macs: float = 2e13  # of all tasks: minutes on two cores; decides between least and most
    ways: int = 5
    shots: int = 5
    queries: int = 40
    epochs: int = 25
    batch: int = 8  # small, so that a task has about as many steps as a small site: 100
    least_classes: int = 4


def played(sites: int | None) -> FewShotSettings:
    """The usual settings, with so many tasks where a number is asked for."""
    return FewShotSettings() if sites is None else FewShotSettings(episodes_most=sites, episodes_least=sites)


@dataclass(frozen=True)
class Trial:
    """One pair of rates and its mean accuracy over the episodes."""

    backend_lr: float
    head_lr: float
    accuracy: float


@dataclass(frozen=True)
class FewShotRates:
    """What few_shot.json holds."""

    backend_lr: float
    head_lr: float
    reason: str
    table: tuple[Trial, ...] = ()

    def document(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Episode:
    """One task as the server sees it: released, filtered tokens (n, T, d) and labels (n,) in 0..ways-1."""

    support: Tensor
    support_labels: Tensor
    query: Tensor
    query_labels: Tensor


def default_rates(reason: str) -> FewShotRates:
    """The documented rates, with the reason why none were chosen here."""
    return FewShotRates(DEFAULT_BACKEND_LR, DEFAULT_HEAD_LR, reason)


def hold_out(labels: NDArray[np.int64], settings: FewShotSettings, rng: np.random.Generator) -> NDArray[np.int64]:
    """About a quarter of the classes, at least two, of those with an image more than the shots; empty if too few."""
    classes, counts = np.unique(labels, return_counts=True)
    eligible = classes[counts > settings.shots]
    if len(classes) < settings.least_classes or len(eligible) < 2:
        return np.array([], np.int64)
    return np.sort(rng.permutation(eligible)[: max(2, len(classes) // 4)])


def turned(images: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    """The images (B, 3, h, w) turned by 90, 180 and 270 degrees; where they are not square, upside down and by 180."""
    if images.shape[2] == images.shape[3]:
        yield from (np.ascontiguousarray(np.rot90(images, quarters, axes=(2, 3))) for quarters in (1, 2, 3))
    else:
        yield np.ascontiguousarray(images[:, :, ::-1])
        yield np.ascontiguousarray(images[:, :, ::-1, ::-1])


def count_episodes(backend: nn.Module, token_count: int, settings: FewShotSettings) -> int:
    """As many episodes as the budget pays for. A function of sizes alone, so that an export repeats anywhere."""
    parameters = sum(parameter.numel() for parameter in backend.parameters())
    pairs = len(settings.backend_lrs) + len(settings.head_lrs) - 1
    samples = settings.epochs * settings.ways * settings.shots
    macs = pairs * samples * token_count * parameters * 3.0  # forward once, backward twice that
    return int(np.clip(settings.budget_macs // macs, settings.episodes_least, settings.episodes_most))


def draw_episode(
    tokens: TokenSet, channel: WireChannel, level: int, settings: FewShotSettings,
    rng: np.random.Generator, device: str,
) -> Episode:  # fmt: skip
    """A task from some of the classes; every image is released once, as a device would."""
    ways = rng.permutation(np.unique(tokens.labels))[: settings.ways]
    support, query = [], []
    for way in ways:
        members = rng.permutation(np.flatnonzero(tokens.labels == way))
        support.append(members[: settings.shots])
        query.append(members[settings.shots : settings.shots + settings.queries])
    generator = torch.Generator(device=device).manual_seed(int(rng.integers(2**62)))

    def released(parts: list[NDArray[np.int64]]) -> tuple[Tensor, Tensor]:
        inputs = tokens.rows(0, np.concatenate(parts)).to(device)
        targets = np.concatenate([np.full(len(part), way) for way, part in enumerate(parts)])
        received = channel.release(inputs, level, generator)
        return channel.restore(received, level), torch.from_numpy(targets).to(device)

    return Episode(*released(support), *released(query))


class Standard(nn.Module):
    """Features (B, f) less the mean of `known` ones (n, f), in units of their spread; 1 where they have none."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        spread = known.std(dim=0, correction=0)
        self.register_buffer("mean", known.mean(dim=0))
        self.register_buffer("spread", torch.where(spread > SMALLEST_SPREAD, spread, 1.0))

    def forward(self, features: Tensor) -> Tensor:
        standard: Tensor = (features - self.mean) / self.spread
        return standard


def play(
    backend: nn.Module, episode: Episode, backend_lr: float, head_lr: float, settings: FewShotSettings,
    rng: np.random.Generator, device: str,
) -> float:  # fmt: skip
    """Accuracy on the query after adapting a copy of the backend and a new head to the support, as a server would: a
    head of zeros on features of zero mean and spread 1, at rates that fall as `contract.adaptation` says."""
    ways = int(episode.support_labels.max()) + 1
    with torch.no_grad():
        known = backend(episode.support)  # (n, f)
    head = nn.Linear(known.shape[-1], ways)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    model = Classifier(nn.Sequential(copy.deepcopy(backend), Standard(known)), head).to(device).eval()
    model.requires_grad_(True)
    groups = [
        {"params": list(model.backend.parameters()), "lr": backend_lr},
        {"params": list(model.head.parameters()), "lr": head_lr},
    ]
    optimiser = torch.optim.Adam(groups)
    for epoch in range(1, settings.epochs + 1):
        for group, rate in zip(optimiser.param_groups, (backend_lr, head_lr), strict=True):
            group["lr"] = rate * rate_share(epoch, settings.epochs)
        for rows in np.array_split(rng.permutation(len(episode.support)), -(-len(episode.support) // settings.batch)):
            chosen = torch.from_numpy(rows).to(device)
            loss = cross_entropy(model(episode.support[chosen]), episode.support_labels[chosen])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
    with torch.no_grad():
        return float((model(episode.query).argmax(1) == episode.query_labels).float().mean())


def choose_rates(
    backend: nn.Module, tokens: TokenSet, channel: WireChannel, level: int,
    settings: FewShotSettings, rng: np.random.Generator, device: str,
) -> FewShotRates:  # fmt: skip
    """Best backend rate with the first head rate, then best head rate with that backend rate; ties to the smaller."""
    backend.to(device).eval()
    count = count_episodes(backend, tokens.frontends[0].shape[1], settings)
    episodes = [draw_episode(tokens, channel, level, settings, rng, device) for _ in range(count)]
    seed = int(rng.integers(2**62))
    tried: dict[tuple[float, float], float] = {}
    total = (len(settings.backend_lrs) + len(settings.head_lrs) - 1) * len(episodes)

    def scores(pairs: list[tuple[float, float]], bar: object) -> Iterator[tuple[float, tuple[float, float]]]:
        for pair in pairs:
            if pair not in tried:
                results = []
                for number, episode in enumerate(episodes):
                    order = np.random.default_rng([seed, number])  # every pair sees the same order of samples
                    results.append(play(backend, episode, *pair, settings, order, device))
                    bar.update(1)
                tried[pair] = float(np.mean(results))
            yield tried[pair], pair

    with progress(total=total, description="Playing few-shot sites", unit="tasks") as bar:
        first = max(scores([(lr, settings.head_lrs[0]) for lr in settings.backend_lrs], bar), key=lambda each: each[0])
        backend_lr = first[1][0]
        best = max(scores([(backend_lr, lr) for lr in settings.head_lrs], bar), key=lambda each: each[0])
    table = tuple(Trial(*pair, accuracy) for pair, accuracy in tried.items())
    reason = f"best of {len(table)} pairs over {len(episodes)} tasks on held-out public classes"
    return FewShotRates(best[1][0], best[1][1], reason, table)
