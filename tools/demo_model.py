"""The demo's server-side model: pre-training on the public classes, and linear probing in the clear as a yardstick.

The product itself never pre-trains; the demo must, because it downloads nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from contract.console import progress, say
from contract.errors import DataError
from contract.image_folder import scan
from contract.images import ImageRule, load_pixels, normalise, resize

BATCH = 64


@dataclass(frozen=True)
class Pretraining:
    """`steps` decides on a fast machine and makes runs repeatable; `limit_s` bounds a slow machine or a large model."""

    steps: int
    limit_s: float
    seed: int


def load_folders(folders: Sequence[Path], classes: Sequence[str], rule: ImageRule) -> tuple[Tensor, Tensor]:
    """Normalised images (n, 3, h, w) and class numbers (n,) of all folders, unreadable files left out."""
    pixels: list[NDArray[np.uint8]] = []
    labels: list[int] = []
    for image in (image for folder in folders for image in scan(folder, classes).images):
        try:
            pixels.append(resize(load_pixels(image.path, image.relative, rule.max_pixels), rule))
        except DataError as error:
            say(f"skipped: {error.cause}")
            continue
        labels.append(image.class_index or 0)
    return torch.from_numpy(normalise(np.stack(pixels), rule)), torch.tensor(labels)


def pretrain(model: nn.Module, images: Tensor, labels: Tensor, plan: Pretraining) -> None:
    """Train a classifier from scratch with small random affine views."""
    generator = torch.Generator().manual_seed(plan.seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    started_s = time.monotonic()
    model.train()
    with progress(total=plan.steps, description="pre-training", unit="steps") as bar:
        for step in range(plan.steps):
            done = max(step / plan.steps, (time.monotonic() - started_s) / plan.limit_s)
            if done >= 1:
                break
            for group in optimiser.param_groups:
                group["lr"] = 1e-3 * min(1.0, (step + 1) / 50) * (1 - done) + 1e-6
            rows = torch.randint(len(images), (BATCH,), generator=generator)
            loss = F.cross_entropy(model(random_affine(images[rows], generator)), labels[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            bar.update(1)
    model.eval()


def random_affine(images: Tensor, generator: torch.Generator) -> Tensor:
    """Rotations up to 20 degrees, 20 % scale, 20 % shear and shift, drawn per image."""
    count = len(images)

    def draw(width: float) -> Tensor:
        return (torch.rand(count, generator=generator) - 0.5) * width

    angle, scale, shear = draw(0.7), 1 + draw(0.4), draw(0.4)
    matrix = torch.stack(
        [
            torch.stack([angle.cos() * scale, (shear - angle.sin()) * scale, draw(0.4)], dim=1),
            torch.stack([angle.sin() * scale, angle.cos() * scale, draw(0.4)], dim=1),
        ],
        dim=1,
    )
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False, padding_mode="border")


def make_weights(path: Path, model: nn.Module, public: Path, rule: ImageRule, plan: Pretraining) -> None:
    """Pre-train on the public class folders and store the state dict."""
    pretrain(model, *load_folders((public,), scan(public, None).classes, rule), plan)
    save_file(model.state_dict(), path)


def linear_probe_in_the_clear(
    model: nn.Module, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], seed: int
) -> float:
    """Accuracy of a linear head on the float model's features: no quantization, no noise, nothing kept private.

    The head's penalty is the best of a small grid, chosen by leaving shots out (spec: LP's first row).
    """
    with torch.no_grad():
        features, test_features = (
            torch.cat([model.forward_head(model.forward_features(batch), pre_logits=True) for batch in x.split(64)])
            for x in (train[0], test[0])
        )
    centre, spread = features.mean(0), features.std(0) + 1e-6
    features, test_features = (features - centre) / spread, (test_features - centre) / spread
    fold = torch.arange(len(features)) % 3
    fold = fold[torch.randperm(len(fold), generator=torch.Generator().manual_seed(seed))]

    def held_out(penalty: float) -> float:
        right = 0
        for part in range(3):
            keep = fold != part
            head = fit_head(features[keep], train[1][keep], int(train[1].max()) + 1, penalty)
            right += int((head(features[~keep]).argmax(1) == train[1][~keep]).sum())
        return right / len(features)

    best = max((1e-4, 1e-3, 1e-2, 1e-1), key=held_out)
    head = fit_head(features, train[1], int(train[1].max()) + 1, best)
    return float((head(test_features).argmax(1) == test[1]).float().mean())


def fit_head(features: Tensor, labels: Tensor, classes: int, penalty: float) -> nn.Linear:
    """Multinomial logistic regression with an L2 penalty, to convergence by L-BFGS."""
    head = nn.Linear(features.shape[1], classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    optimiser = torch.optim.LBFGS(head.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = F.cross_entropy(head(features), labels) + penalty * head.weight.square().sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    return head.requires_grad_(False)
