"""The union of what masked uploads show of an image: each has some of its patches, fresh masks show all in the end.

A ridge decodes the token of a visible patch; a patch seen more than once is the mean of what was decoded, a patch never
seen is the public images' mean there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import Effort, Finds, Known, Pairs, Seen
from ._release import images_at_once
from .ridge import Batches, fit_map, join_patches, split_patches

FINDS: Finds = "images"
NEEDS = frozenset({"uploads"})


class MaskUnion:
    """The attack, on pairs whose frontend saw the patches `Pairs.places` alone. `coverage` is the share of patches that
    the uploads showed."""

    def __init__(self, effort: Effort) -> None:
        self._seed = effort.seed

    def fit(self, known: Known) -> None:
        self._release, self._grid = known.release, known.release.layout.grid
        generator = torch.Generator(known.learn.images.device).manual_seed(self._seed)
        self._background = split_patches(known.learn.images.mean(dim=0, keepdim=True), self._grid)
        self._map = fit_map(self._batches(known.learn, generator), self._batches(known.held, generator))

    def reconstruct(self, seen: Seen) -> Tensor:
        prefix = self._release.layout.prefix
        count, patches = len(seen.uploads[0].received), self._background.shape[1]
        total = self._background.new_zeros(count, patches, self._background.shape[2])
        times = self._background.new_zeros(count, patches, 1)
        for upload in seen.uploads:
            if upload.places is None:
                raise ValueError("mask_union needs the places of every upload")
            found = self._map(upload.received[:, prefix:]).clamp(0, 1)
            total.scatter_add_(1, upload.places[:, :, None].expand_as(found), found)
            times.scatter_add_(1, upload.places[:, :, None], torch.ones_like(found[:, :, :1]))
        self.coverage = float((times > 0).double().mean())
        found = torch.where(times > 0, total / times.clamp_min(1.0), self._background)
        return join_patches(found, self._grid, self._release.size)

    def _batches(self, pairs: Pairs, generator: torch.Generator) -> Batches:
        if pairs.places is None:
            raise ValueError("mask_union needs pairs of a masked frontend, with their places")
        wanted = split_patches(pairs.images, self._grid)
        size = images_at_once(pairs.tokens[0])
        for start in range(0, len(wanted), size):
            rows = slice(start, start + size)
            tokens = self._release.add_noise(pairs.tokens[0][rows].float(), generator)[:, self._release.layout.prefix :]
            places = pairs.places[rows][:, :, None].expand(-1, -1, wanted.shape[2])
            yield tokens, wanted[rows].gather(1, places)


def planned_steps(asked: int | None, images: int) -> int:
    """None."""
    return 0


def build(effort: Effort) -> MaskUnion:
    """The attack; it has no steps to take."""
    return MaskUnion(effort)
