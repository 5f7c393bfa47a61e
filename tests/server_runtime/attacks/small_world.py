"""Pictures of 16 pixels, a client's part that takes seconds to attack, and what a server would receive of it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from contract import keyed_noise
from contract.tokens import Statistics, TokenLayout
from server_runtime.attacks import Known, Pairs, Seen, Update, Upload
from server_runtime.attacks._release import Law, Release

SIZE, GRID, CLASSES = (16, 16), (4, 4), 4
LAYOUT = TokenLayout(prefix=1, grid=GRID, dim=64)
KAPPA = 1.0


class Part(nn.Module):
    """Patches of 4 x 4 pixels -> tokens; each mixes with the mean of all, which is the class token."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Conv2d(3, LAYOUT.dim, 4, stride=4)
            self.mix = nn.Linear(LAYOUT.dim, LAYOUT.dim)
            self.place = nn.Parameter(0.1 * torch.randn(1, LAYOUT.patches, LAYOUT.dim))

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        patches = self.embed(2.0 * images - 1.0).flatten(2).transpose(1, 2) + self.place
        if keep is not None:
            patches = patches.gather(1, keep[:, :, None].expand(-1, -1, LAYOUT.dim))
        whole = patches.mean(dim=1, keepdim=True)
        patches = patches + 0.3 * torch.tanh(self.mix(patches)) + 0.2 * whole
        return torch.cat([whole, patches], dim=1)


class Whole(nn.Module):
    """A smooth small classifier, as a federated client trains it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.conv = nn.Conv2d(3, 12, 5, stride=2, padding=2)
            self.hidden = nn.Conv2d(12, 12, 5, stride=2, padding=2)
            self.head = nn.Linear(12 * 16, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        maps = torch.sigmoid(self.hidden(torch.sigmoid(self.conv(4.0 * images - 2.0))))
        return self.head(maps.flatten(1))


def pictures(count: int, seed: int) -> Tensor:
    """Smooth pictures (n, 3, 16, 16) in [0, 1], with an edge in each; colours differ from one to the next."""
    rng = torch.Generator().manual_seed(seed)
    coarse = torch.rand((count, 3, 4, 4), generator=rng)
    smooth = nn.functional.interpolate(coarse, SIZE, mode="bicubic", align_corners=False)
    edge = torch.rand((count, 1, 1, 1), generator=rng) * SIZE[1] > torch.arange(SIZE[1]).float()
    colour = torch.rand((count, 3, 1, 1), generator=rng) - 0.5
    return (smooth + 0.6 * colour * edge).clamp(0, 1)


@dataclass(frozen=True)
class World:
    """Public pairs, the part with the weights that all know, private images."""

    part: Part
    known: Known
    private: Tensor

    def release(self, kappa: float) -> Release:
        return self.known.release.at(kappa)

    @torch.no_grad()
    def tokens(self, part: nn.Module | None = None, images: Tensor | None = None) -> Tensor:
        return (part or self.part)(self.private if images is None else images)

    def keyed(self, tokens: Tensor, kappa: float, secret: bytes = b"device", **key: object) -> Upload:
        """What a device sends: noise keyed by secret, image, strength, and whatever else `key` says."""
        release = self.release(kappa)
        draws = []
        for row in range(len(tokens)):
            parts = [row, float(kappa), *(str(each) for each in key.values())]
            draws.append(keyed_noise.laplace(keyed_noise.derive_key(secret, *parts), (LAYOUT.count, LAYOUT.dim)))
        noise = torch.from_numpy(np.stack(draws))
        return Upload(release.send(tokens, torch.Generator(), noise), kappa)


def world(kappa: float = KAPPA, codes: bool = True, public: int = 300, private: int = 24) -> World:
    """Everything of one frontend without weight noise. Without `codes` the tokens are floats, `kappa` a deviation."""
    part = Part()
    learn, held, hidden = pictures(public, 1), pictures(60, 2), pictures(private, 3)
    with torch.no_grad():
        tokens, others = part(learn), part(held)
    law = Law(LAYOUT, SIZE, statistics_of(tokens) if codes else None)
    release = Release(law, kappa, tokens)
    known = Known(Pairs(learn, (tokens,)), Pairs(held, (others,)), release, client=part)
    return World(part, known, hidden)


def statistics_of(tokens: Tensor) -> Statistics:
    """As an exporter states them."""
    parts = [tokens[:, :1].reshape(-1, LAYOUT.dim), tokens[:, 1:].reshape(-1, LAYOUT.dim)]
    sigma = [tuple(float(x) for x in part.std(dim=0)) for part in parts]
    most = [tuple(float(x) for x in part.abs().amax(dim=0)) for part in parts]
    return Statistics(sigma[0], sigma[1], most[0], most[1])


def seen_once(small: World, kappa: float | None = None) -> Seen:
    """One upload of the private images."""
    strength = small.known.release.strength if kappa is None else kappa
    return Seen(uploads=(small.keyed(small.tokens(), strength),))


def trained(part: Part, epoch: int, step: float) -> Part:
    """The part after some training: for each epoch every weight has moved by `step` of its spread."""
    moved = copy.deepcopy(part)
    rng = torch.Generator().manual_seed(100 + epoch)
    with torch.no_grad():
        for value in moved.parameters():
            value += step * epoch * value.std() * torch.randn(value.shape, generator=rng)
    return moved


def with_epochs(small: World, epochs: int, step: float = 0.1) -> tuple[Known, list[nn.Module]]:
    """Known weights of each epoch, and the parts that have them."""
    parts = [trained(small.part, epoch, step) for epoch in range(epochs)]
    pairs = [
        replace(each, tokens=tuple(small.tokens(part, each.images) for part in parts))
        for each in (small.known.learn, small.known.held)
    ]
    return replace(small.known, learn=pairs[0], held=pairs[1]), list(parts)


def masks(count: int, kept: int, secret: str) -> Tensor:
    """Keyed patches (count, kept) of each image, ascending."""
    rows = [keyed_noise.permutation(b"device", LAYOUT.patches, secret, row)[:kept] for row in range(count)]
    return torch.from_numpy(np.sort(np.stack(rows), axis=1))


def masked(small: World, uploads: list[Tensor]) -> tuple[Known, Seen]:
    """Public pairs of a masked frontend, and one upload of the private images for each set of masks (n, K)."""
    kept = uploads[0].shape[1]
    pairs = []
    for name, each in (("learn", small.known.learn), ("held", small.known.held)):
        places = masks(len(each.images), kept, name)
        with torch.no_grad():
            pairs.append(Pairs(each.images, (small.part(each.images, places),), places))
    with torch.no_grad():
        sent = tuple(Upload(small.part(small.private, places), 0.0, places) for places in uploads)
    return replace(small.known, learn=pairs[0], held=pairs[1], release=small.release(0.0)), Seen(uploads=sent)


def update_of(model: nn.Module, images: Tensor, labels: Tensor, rate: float, steps: int, momentum: float) -> Update:
    """What torch's own SGD makes of a copy of the model."""
    local = copy.deepcopy(model)
    optimiser = torch.optim.SGD(local.parameters(), lr=rate, momentum=momentum)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(local(images), labels).backward()
        optimiser.step()
    before = dict(model.named_parameters())
    delta = {name: (value - before[name]).detach() for name, value in local.named_parameters()}
    return Update(delta, len(images), rate, steps, momentum)
