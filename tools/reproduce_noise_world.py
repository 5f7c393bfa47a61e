"""What the noise study works on: pictures of a world as pixels, and its model's halves, from which tokens are made.

Frontends are the float model with each device's weight noise (the law of contract.keyed_noise in float): rounding to
INT8 adds 20 dB less than any noise studied here. Recipes and their figures are left to the other files of the study.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import timm
import torch
from torch import Tensor, nn

from contract.images import ImageRule
from contract.tokens import Kept, TokenLayout, kept_patches
from exporter.checkpoint import image_rule, load_weights, own_head, read_state
from exporter.models import family_of
from exporter.public_set import open_folder
from exporter.split import split_tokens, usual_cut
from tools.reproduce_world import World

AT_ONCE = 500  # images of one forward pass


@dataclass(frozen=True)
class Pictures:
    """Pixels (n, h, w, 3) uint8 on the CPU and labels (n,) of one folder."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def mirrored(self) -> Pictures:
        """The same pictures twice: as they are, and left to right."""
        return Pictures(torch.cat([self.pixels, self.pixels.flip(2)]), self.labels.repeat(2))


@dataclass(frozen=True)
class SitePictures:
    """One site's training pictures, class by class so that fewer shots are a part of more, and its test pictures."""

    train: Pictures
    test: Pictures
    classes: int

    def shots(self, count: int) -> Tensor:
        """Rows of the training pictures that `count` shots a class are."""
        rows = [torch.nonzero(self.train.labels == label).flatten()[:count] for label in range(self.classes)]
        return torch.cat(rows)


def open_pictures(root: Path, rule: ImageRule, most: int | None = None) -> Pictures:
    """A class folder's pictures as a device makes them; `most` takes an even share of every class."""
    public = open_folder(root, rule)
    assert public.labels is not None
    rows = np.arange(len(public))
    if most is not None and most < len(rows):
        rank = np.zeros(len(rows), np.int64)  # place of each image within its class
        for label in np.unique(public.labels):
            members = public.labels == label
            rank[members] = np.arange(members.sum())
        rows = np.sort(np.argsort(rank, kind="stable")[:most])
    return Pictures(torch.from_numpy(public.pixels(rows)), torch.from_numpy(public.labels[rows]))


def open_site(world: World, shots: int, seed: int, rule: ImageRule, test: Pictures | None) -> SitePictures:
    """A site's pictures; several devices of a site count as one. `test` is given where it is known already."""
    folders = world.site(world.datasets[0], shots, seed)
    parts = [open_pictures(path, rule) for path in folders.train.values()]
    tests = [test] if test is not None else [open_pictures(path, rule) for path in folders.test.values()]
    return SitePictures(_joined(parts), _joined(tests), len(folders.classes))


def _joined(parts: Sequence[Pictures]) -> Pictures:
    return Pictures(torch.cat([part.pixels for part in parts]), torch.cat([part.labels for part in parts]))


class Halves:
    """The model of a world, cut; frontends with weight noise are made when asked for."""

    def __init__(self, world: World, device: torch.device) -> None:
        model = timm.create_model(world.model, **world.model_args)
        load_weights(model, read_state(world.weights), str(world.weights))
        model = model.float().eval().requires_grad_(False).to(device)
        _, family = family_of(model)
        facts = family.facts(model)
        self.rule = image_rule(model, facts.input_shape)
        cut = usual_cut(facts) if world.split is None else world.split
        self.frontend, self.backend, layout = split_tokens(model, cut)
        self.layout: TokenLayout = layout
        self.head = own_head(model)
        self.device = device
        self._mean = torch.tensor(self.rule.mean, device=device)
        self._std = torch.tensor(self.rule.std, device=device)

    def noised(self, alpha: float, seed: int) -> nn.Module:
        """A frontend with weight noise w' ~ N(w, alpha^2 (w^2 + std(w)^2)) on every matrix (SA Eq. 12)."""
        frontend = copy.deepcopy(self.frontend)
        generator = torch.Generator(device=self.device).manual_seed(seed)
        for name, weight in frontend.named_parameters():
            if weight.ndim >= 2 and not name.endswith(("_token", "pos_embed")):
                spread = (weight.square() + weight.std().square()).sqrt()
                weight += alpha * spread * torch.randn(weight.shape, generator=generator, device=self.device)
        return frontend

    def inputs(self, pixels: Tensor) -> Tensor:
        """Normalised images (B, 3, h, w) on the device."""
        images = pixels.to(self.device).float() / 255.0
        return ((images - self._mean) / self._std).permute(0, 3, 1, 2)

    @torch.no_grad()
    def tokens(self, frontend: nn.Module, pixels: Tensor, hidden: Kept = "all") -> Tensor:
        """Tokens (n, T, d) fp16 on the device. With `hidden` the frontend sees the kept patches alone; places of the
        others hold zeros, which are never sent."""
        layout, parts = self.layout, []
        kept = torch.from_numpy(kept_patches(layout.grid, hidden)).to(self.device)
        places = torch.cat([torch.arange(layout.prefix, device=self.device), layout.prefix + kept])
        for part in pixels.split(AT_ONCE):
            images = self.inputs(part)
            if hidden == "all":
                parts.append(frontend(images).half())
                continue
            found = frontend(images, kept.expand(len(images), -1)).half()
            whole = found.new_zeros(len(images), layout.count, layout.dim)
            whole[:, places] = found
            parts.append(whole)
        return torch.cat(parts)
