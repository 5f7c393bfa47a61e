"""A classifier of public pictures, to ask of reconstructions whether their class can still be told.

A small convolutional network, trained on the public images as they are; pictures larger than 64 pixels are shrunk
first. Which pictures it judges, and what follows, is left to `profiler`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

LARGEST_PIXELS = 64
EPOCHS = 30
STEPS = (200, 2000)  # at least and at most
BATCH = 64
AT_ONCE = 256


def train_classifier(
    images: Tensor, labels: Tensor, classes: int, seed: int, on_steps: Callable[[int], object]
) -> nn.Module:
    """A classifier of images (n, 3, h, w) in [0, 1] with labels (n,), after `planned_steps(n)` steps."""
    steps = planned_steps(len(images))
    small = _shrink(images)
    with torch.random.fork_rng(devices=[small.device] if small.device.type == "cuda" else []):
        torch.manual_seed(seed)
        model = _network(classes).to(small.device)
    generator = torch.Generator(small.device).manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = 2e-3 * 0.5 * (1.0 + math.cos(math.pi * step / steps))
        rows = torch.randint(len(small), (min(BATCH, len(small)),), generator=generator, device=small.device)
        batch = small[rows]
        if bool(torch.randint(2, (1,), generator=generator, device=small.device)):
            batch = batch.flip(3)
        optimiser.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(batch), labels[rows]).backward()
        optimiser.step()
        on_steps(1)
    return model.eval().requires_grad_(False)


def planned_steps(images: int) -> int:
    """How long it learns from so many images."""
    return min(max(STEPS[0], EPOCHS * images // BATCH), STEPS[1])


@torch.no_grad()
def count_right(model: nn.Module, images: Tensor, labels: Tensor) -> int:
    """Of how many images the classifier tells the class."""
    found = torch.cat([model(part).argmax(dim=1) for part in _shrink(images).split(AT_ONCE)])
    return int((found == labels).sum())


def _shrink(images: Tensor) -> Tensor:
    side = max(images.shape[2:])
    if side <= LARGEST_PIXELS:
        return images.float()
    size = [max(1, round(length * LARGEST_PIXELS / side)) for length in images.shape[2:]]
    return torch.cat([nn.functional.interpolate(part.float(), size, mode="area") for part in images.split(AT_ONCE)])


def _network(classes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        layers += [
            nn.Conv2d(before, after, 3, padding=1),
            nn.GroupNorm(8, after),
            nn.ReLU(),
            nn.MaxPool2d(2, ceil_mode=True),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * 64, classes))
