"""Uploads of one image in several epochs, between which the frontend was trained: does persistent noise cancel?

If the noise of an image stays the same, the difference of two uploads is the noise-free difference of two features
that the server can compute for its public images, since it knows the weights of both epochs. If it is drawn for each
epoch, the uploads average. The attack is one ridge on the uploads side by side, which finds the best combination of
both kinds; it reads off the uploads which kind it faces.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import Effort, Finds, Known, Pairs, Seen
from ._release import images_at_once
from .ridge import Batches, fit_map, join_patches, split_patches

FINDS: Finds = "images"
NEEDS = frozenset({"uploads"})


class EpochDifference:
    """The attack. `Known` has the tokens of each epoch's frontend, in the order of the uploads; `persistent` is what it
    concluded about the noise."""

    def __init__(self, effort: Effort) -> None:
        self._seed = effort.seed

    def fit(self, known: Known) -> None:
        self._known = known

    def reconstruct(self, seen: Seen) -> Tensor:
        known, release = self._known, self._known.release
        received = [upload.received for upload in seen.uploads]
        self.persistent = self._is_persistent(received)
        generator = torch.Generator(known.learn.images.device).manual_seed(self._seed)
        epochs = len(received)
        learnt = fit_map(self._batches(known.learn, epochs, generator), self._batches(known.held, epochs, generator))
        colour = known.learn.images.mean(dim=(0, 2, 3), keepdim=True).expand(len(received[0]), 3, *release.size)
        patches = split_patches(colour, release.layout.grid).clone()
        stacked = torch.cat([each[:, release.layout.prefix :] for each in received], dim=2)
        found = patches.index_copy(1, release.sent, learnt(stacked))
        return join_patches(found, release.layout.grid, release.size).clamp(0, 1)

    def _is_persistent(self, received: list[Tensor]) -> bool:
        """Whether the last two uploads differ by less than one draw's noise and what training did."""
        learn, release = self._known.learn, self._known.release
        clean = (learn.tokens[len(received) - 1].float() - learn.tokens[len(received) - 2].float())[:, release.places]
        moved = clean.square().mean(dim=0)
        spread = (received[-1] - received[-2]).square().mean(dim=0)
        return bool((spread < moved + 2.0 * release.scales.square()).double().mean() > 0.5)

    def _batches(self, pairs: Pairs, epochs: int, generator: torch.Generator) -> Batches:
        release, size = self._known.release, images_at_once(pairs.tokens[0])
        wanted = split_patches(pairs.images, release.layout.grid)[:, release.sent]
        for start in range(0, len(wanted), size):
            rows = slice(start, start + size)
            count = len(wanted[rows])
            same = release.draw(count, generator) if self.persistent else None
            parts = [release.send(tokens[rows].float(), generator, same) for tokens in pairs.tokens[:epochs]]
            yield torch.cat([part[:, release.layout.prefix :] for part in parts], dim=2), wanted[rows]


def planned_steps(asked: int | None, images: int) -> int:
    """None."""
    return 0


def build(effort: Effort) -> EpochDifference:
    """The attack; it has no steps to take."""
    return EpochDifference(effort)
