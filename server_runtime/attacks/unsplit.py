"""UnSplit: images whose tokens, through a copy of the client's part, are those that were received.

As published the copy's weights are unknown: coordinate descent, some steps on the images, then some on the copy, from
grey images and random weights. A server knows more, see `unsplit_white_box`. All images of a batch are found side by
side; the copy is shared, as in the published code.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import Effort, Finds, Known, Seen

FINDS: Finds = "images"
NEEDS = frozenset({"upload", "client"})


@dataclass(frozen=True)
class Descent:
    """The published search, shortened as section 3.2 of the algorithms says: rounds of steps on images and weights."""

    rounds: int = 50
    image_steps: int = 20
    weight_steps: int = 20
    rate: float = 1e-3
    smooth: float = 0.1  # of the mean squared difference of neighbours
    small: float = 1.0  # of the mean square of the images


class UnSplit:
    """Coordinate descent without any knowledge of the client's weights."""

    def __init__(self, effort: Effort, descent: Descent | None = None) -> None:
        self._effort, self._descent = effort, descent or Descent()

    def fit(self, known: Known) -> None:
        if known.client is None:
            raise ValueError("unsplit needs the architecture of the client's part")
        self._release = known.release
        device = known.learn.images.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(self._effort.seed)
            self._clone = _random_copy(known.client)

    def reconstruct(self, seen: Seen) -> Tensor:
        descent, received = self._descent, seen.uploads[-1].received
        images = torch.full((len(received), 3, *self._release.size), 0.5, device=received.device, requires_grad=True)
        on_images = torch.optim.Adam([images], lr=descent.rate, amsgrad=True)
        on_weights = torch.optim.Adam(self._clone.parameters(), lr=descent.rate, amsgrad=True)
        for _ in range(self._rounds()):
            for _ in range(descent.image_steps):
                loss = self._misfit(images, received) + _prior(images, descent)
                (images.grad,) = torch.autograd.grad(loss.sum(), images)
                on_images.step()
                with torch.no_grad():
                    images.clamp_(0, 1)
                self._effort.on_steps(1)
            for _ in range(descent.weight_steps):
                on_weights.zero_grad(set_to_none=True)
                self._misfit(images.detach(), received).mean().backward()
                on_weights.step()
        return images.detach()

    def _rounds(self) -> int:
        steps = self._effort.steps
        return self._descent.rounds if steps is None else max(1, steps // self._descent.image_steps)

    def _misfit(self, images: Tensor, received: Tensor) -> Tensor:
        """Mean squared error of the tokens of each image (n,)."""
        return (self._clone(images)[:, self._release.places] - received).square().flatten(1).mean(dim=1)


def _prior(images: Tensor, descent: Descent) -> Tensor:
    down, across = images.diff(dim=2).square(), images.diff(dim=3).square()
    smooth = down.flatten(1).mean(dim=1) + across.flatten(1).mean(dim=1)
    return descent.smooth * smooth + descent.small * images.square().flatten(1).mean(dim=1)


def _random_copy(client: nn.Module) -> nn.Module:
    """The same architecture with weights drawn anew."""
    clone = copy.deepcopy(client).requires_grad_(True)
    drawn: set[int] = set()
    for module in clone.modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
            drawn.update(id(parameter) for parameter in module.parameters(recurse=False))
    for parameter in clone.parameters():
        if id(parameter) not in drawn:  # a class token, positions: timm draws them so
            nn.init.normal_(parameter, std=0.02)
    return clone


def planned_steps(asked: int | None, images: int) -> int:
    """As asked, or the attack's own number."""
    descent = Descent()
    rounds = descent.rounds if asked is None else max(1, asked // descent.image_steps)
    return rounds * descent.image_steps


def build(effort: Effort) -> UnSplit:
    """The attack as published: the weights are unknown."""
    return UnSplit(effort)
