"""Packages for P3SL: a client part for every split a device may choose, at the boundaries that each family has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from contract.training import AugmentRule
from exporter.models import Facts, family_of
from exporter.plan import optimiser_rule
from exporter.split import create
from exporter.training_package import usual_cuts
from tests.exporter import tiny
from tests.exporter.test_training_package import CHOICES, _export

SMALL = {"small_images": True, "img_size": 32}


def facts_of(name: str, **arguments: object) -> Facts:
    model = create(name, False, {**arguments, "num_classes": 0})
    return family_of(model)[1].facts(model)


@pytest.mark.parametrize(
    ("name", "arguments", "tenth"),
    [
        ("vgg16_bn", SMALL, "features.13"),
        ("resnet18", SMALL, None),
        ("vit_tiny_patch16_224", {"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_heads": 3}, "blocks.9"),
    ],
)
def test_devices_choose_among_the_first_ten_layers_and_the_server_keeps_one(
    name: str, arguments: dict[str, object], tenth: str | None
) -> None:
    facts = facts_of(name, **arguments)
    cuts = usual_cuts("p3sl", facts)
    assert cuts == tuple(range(1, min(10, facts.depth - 1) + 1))
    assert usual_cuts("asl", facts) == usual_cuts("ares", facts) == cuts
    assert len(usual_cuts("sequential_split", facts)) == 1
    if tenth is not None:
        assert facts.layers[9] == tenth
    else:  # never inside a residual block, whose shortcut would be lost
        assert facts.layers[:4] == ("conv1", "bn1", "layer1.0", "layer1.1") and cuts[-1] == 9


@pytest.mark.slow
@pytest.mark.parametrize("split", [3, 10])
def test_a_resnet_101_is_packaged_and_takes_a_step_on_the_device(tmp_path: Path, split: int) -> None:
    """Bottleneck blocks: forward is torch's, and a step moves weights and statistics.

    Not all: residual branches begin with a last norm of weight 0, and in front of it there is no gradient yet."""
    from edge_runtime.trainer import open_trainer

    choices = replace(
        CHOICES, strategy="p3sl", cuts=(split,), optimiser=optimiser_rule("sgd", None, None), augment=AugmentRule()
    )
    made = _export(tmp_path / "parts", choices, model="resnet101", model_args=tuple(SMALL.items()))
    (cut,) = made.plan.cuts
    assert (cut.index, cut.depth) == (split, 35)
    trainer = open_trainer(made.folder, cut, made.plan.optimiser)
    before = {name: value.copy() for name, value in trainer.parameters().items()}
    x = tiny.images(4).numpy()
    z = trainer.forward(x).z
    trainer.backward(np.full(z.shape, 1e-3, np.float32))
    trainer.step(0.1)
    moved = trainer.parameters()
    changed = {name for name, value in before.items() if (moved[name] != value).any()}
    assert {"conv1.weight", "bn1.weight", "bn1.running_mean", "layer1.0.bn3.weight"} <= changed

    model = create("resnet101", False, {**SMALL, "num_classes": 0})
    part = family_of(model)[1].cut(model, split)[0].train()
    part.load_state_dict({name: torch.from_numpy(value) for name, value in before.items()}, strict=False)
    out = part(torch.from_numpy(x))
    assert np.abs(out.detach().numpy() - z).max() <= 1e-4 * np.abs(z).max()
