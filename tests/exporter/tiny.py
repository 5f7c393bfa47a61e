"""Tiny ViTs, a folder of pictures in four classes, and a quick export of them, for tests of the exporter."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from torch import nn

from contract.signature import PrivateKey, generate
from exporter.build import Report, Surroundings, export
from exporter.few_shot import FewShotSettings
from exporter.plan import ExportPlan, Limits
from exporter.tune import settings_for

MODEL = "vit_tiny_patch16_224"
ARGS = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 4}
SHAPE = (3, 32, 32)
LIMITS = Limits(calibration_images=16, statistics_images=40, evaluation_images=40)
QUICK_TASKS = FewShotSettings(episodes_most=1, episodes_least=1, epochs=8)
COLOURS = ((220, 60, 60), (60, 200, 60), (60, 60, 220), (210, 210, 60))


def tiny_model(name: str = MODEL, seed: int = 0, **more: object) -> nn.Module:
    """Three blocks, 48 wide, with weights large enough that every layer matters; in inference mode."""
    torch.manual_seed(seed)
    model = timm.create_model(name, pretrained=False, **{**ARGS, **more})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(3.0)
            elif parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def images(count: int, seed: int = 0) -> torch.Tensor:
    """Normalised inputs (count, 3, 32, 32)."""
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(seed))


def write_pictures(root: Path, per_class: int, classes: int = 4, seed: int = 0) -> Path:
    """Folders of noisy pictures; the class is the colour of a patch at a place of its own."""
    rng = np.random.default_rng(seed)
    for number in range(classes):
        folder = root / f"class{number}"
        folder.mkdir(parents=True)
        for index in range(per_class):
            picture = rng.integers(80, 176, (32, 32, 3), dtype=np.uint8)
            row, column = divmod(number, 2)
            picture[row * 16 : row * 16 + 12, column * 16 : column * 16 + 12] = COLOURS[number % 4]
            Image.fromarray(picture).save(folder / f"{index}.png")
    return root


def plan(output: Path, **changes: object) -> ExportPlan:
    """An INT8 export of the tiny model on synthetic pictures, without tuning."""
    plain = ExportPlan(
        model=MODEL, model_args=tuple(ARGS.items()), split=2, int8=True, calibration=None, weights=None,
        pretrained=False, tune="none", opset=20, alpha=0.1, kappa=0.25, kappa_max=1.0, name=None, version=None, seed=0,
        limit_tuning=400, signing_key=None, force=False, output=str(output),
    )  # fmt: skip
    return replace(plain, **changes)


def surroundings(key: PrivateKey | None = None) -> Surroundings:
    own = key or generate()
    return Surroundings(
        signer=lambda: own, now=lambda: datetime(2026, 1, 2, tzinfo=timezone.utc), threads=1, device="cpu"
    )


def run(output: Path, key: PrivateKey | None = None, **changes: object) -> Report:
    """Export as the command does, with small limits."""
    chosen = plan(output, **changes)
    return export(chosen, surroundings(key), LIMITS, settings_for(chosen.tune, chosen.tuning_subsets), QUICK_TASKS)
