"""UnSplit with weights that are known: those that the server handed out, or those that a device uploaded last.

`Known.client` has the weights. The images alone are moved, from grey or from the ridge's answer, with a prior for
smooth pictures; start and prior are chosen on other public images, the ridge's plain answer among the choices.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import Effort, Finds, Known, Seen
from ._matching import roughness
from .ridge import RidgeAttack, image_psnr_db

FINDS: Finds = "images"
NEEDS = frozenset({"upload", "client"})
CHOSEN_ON = 16  # public images
AT_ONCE = 128
PRIORS = (0.0, 0.003, 0.03, 0.3)


class WhiteBox:
    """The attack. `chosen` is the start and the prior that read other public images best."""

    steps = 1000
    rate = 0.03

    def __init__(self, effort: Effort) -> None:
        self._effort = effort

    def fit(self, known: Known) -> None:
        if known.client is None:
            raise ValueError("white-box unsplit needs the client's part with its weights")
        self._release, self._client = known.release, known.client
        self._ridge = RidgeAttack(self._effort)
        self._ridge.fit(known)
        generator = torch.Generator(known.learn.images.device).manual_seed(self._effort.seed)
        images = known.held.images[:CHOSEN_ON]
        received = self._release.send(known.held.tokens[-1][:CHOSEN_ON].float(), generator)
        scores = {("ridge", math.inf): float(image_psnr_db(images, self._ridge.decode(received).clamp(0, 1)).mean())}
        for start in ("grey", "ridge"):
            for prior in PRIORS:
                found = self._search(received, start, prior)
                scores[start, prior] = float(image_psnr_db(images, found).mean())
        self.chosen = max(scores, key=lambda choice: scores[choice])

    def reconstruct(self, seen: Seen) -> Tensor:
        start, prior = self.chosen
        return torch.cat([self._search(part, start, prior) for part in seen.uploads[-1].received.split(AT_ONCE)])

    def _search(self, received: Tensor, start: str, prior: float) -> Tensor:
        """Images (n, 3, h, w); an infinite prior leaves the ridge's answer as it is."""
        first = self._ridge.decode(received).clamp(0, 1)
        if math.isinf(prior):
            return first
        images = (torch.full_like(first, 0.5) if start == "grey" else first.detach().clone()).requires_grad_(True)
        spread = received.var(dim=(0, 1), correction=0).clamp_min(1e-12)
        spread = torch.maximum(spread, 1e-3 * spread.mean()) + 2.0 * self._release.scales.square()
        optimiser = torch.optim.Adam([images], lr=self.rate)
        steps = self.steps if self._effort.steps is None else self._effort.steps
        for step in range(steps):
            optimiser.param_groups[0]["lr"] = self.rate * 0.5 * (1.0 + math.cos(math.pi * step / steps))
            away = self._client(images)[:, self._release.places] - received
            loss = (away.square() / spread).flatten(1).mean(dim=1) + prior * roughness(images)
            (images.grad,) = torch.autograd.grad(loss.sum(), images)
            optimiser.step()
            with torch.no_grad():
                images.clamp_(0, 1)
            self._effort.on_steps(1)
        return images.detach()


def planned_steps(asked: int | None, images: int) -> int:
    """As asked, or the attack's own number."""
    searches = 2 * len(PRIORS) + math.ceil(images / AT_ONCE)
    return searches * (WhiteBox.steps if asked is None else asked)


def build(effort: Effort) -> WhiteBox:
    """The attack."""
    return WhiteBox(effort)
