"""EEFT's packages around deeper ResNets and a ViT: exported, installed, and a device's step beside float64."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from contract import training
from contract.manifest import from_bytes
from contract.signature import generate, key_id
from contract.training import AugmentRule
from edge_runtime.install import install
from edge_runtime.trainer import open_trainer
from exporter.architecture import create
from exporter.package import backend_path
from exporter.plan import BACKBONE, ModuleChoices, TrainingChoices, optimiser_rule
from exporter.skip_modules import SkipNetwork
from exporter.training_package import export_training, set_modes, trained_names
from tests.exporter import tiny

NARROW = {"channels": (8, 8, 12, 16), "small_images": True, "act_layer": "silu"}  # smooth: a ReLU's sign may flip
MODELS = {
    "vit_tiny_patch16_224": {**tiny.ARGS, "depth": 2},
    "resnet34": NARROW,
    "resnet50": {**NARROW, "layers": (1, 2, 2, 1)},
}
CHOICES = TrainingChoices(
    strategy="eeft", cuts=(), release_whole_model=True, classes=None, optimiser=optimiser_rule("sgd", 0.5, 0.0),
    augment=AugmentRule(), gradient="float32", activations="float32", freeze=(), recompute=False,
    modules=ModuleChoices(),
)  # fmt: skip
RATE = 0.1


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        pytest.param("resnet34", marks=pytest.mark.slow),
        pytest.param("resnet50", marks=pytest.mark.slow),
    ],
)
def test_a_package_is_installed_and_takes_the_step_of_float64(name: str, tmp_path: Path) -> None:
    key, front = generate(), tmp_path / "front"
    arguments = MODELS[name]
    plan = tiny.plan(front, model=name, model_args=tuple(arguments.items()), int8=False, split=None, training=CHOICES)
    export_training(plan, tiny.surroundings(key))
    public, packages = key.public_key(), tmp_path / "packages"
    packages.mkdir()
    installed = install(
        front, packages, {key_id(public): public}, lambda path: pytest.fail(str(path)), lambda text: None
    )
    shipped = training.from_bytes(
        (front / "training.json").read_bytes(), from_bytes((front / "manifest.json").read_bytes())
    )
    (cut,) = shipped.cuts
    assert not any(each.startswith(BACKBONE) for each in (*cut.trainable, *cut.buffers))

    network = SkipNetwork(create(name, False, {**arguments, "num_classes": 0}), ModuleChoices())
    network.load_state_dict(load_file(backend_path(front) / "model.safetensors"))
    trained = trained_names(network, (BACKBONE,))
    assert sorted(cut.trainable) == sorted(trained)
    set_modes(network, trained)
    exact = copy.deepcopy(network).double()

    x = tiny.images(6, seed=1)
    trainer = open_trainer(installed.folder, cut, shipped.optimiser)
    z = trainer.forward(x.numpy()).z
    gradient = torch.randn(z.shape, generator=torch.Generator().manual_seed(2)) / len(z)
    trainer.backward(gradient.numpy())
    trainer.step(RATE)

    features, penalty = exact(x.double())
    assert np.abs(z - features.detach().numpy()).max() < 1e-4 * float(features.detach().abs().max())
    named = dict(exact.named_parameters())
    gradients = torch.autograd.grad((features * gradient.double()).sum() + penalty, [named[each] for each in trained])
    found = trainer.parameters()
    for each, slope in zip(trained, gradients, strict=True):
        expected = (named[each] - RATE * slope).detach().numpy()
        assert np.abs(found[each] - expected).max() <= 1e-4 * max(1e-3, np.abs(expected).max()), each
    assert np.isfinite(trainer.evaluate(x.numpy())).all()
