"""Every kind of module that a package may hold is trained here, on a device without torch, beside float64."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from contract.training import OptimiserRule, TrainingCut
from edge_runtime.trainer import open_trainer

MODULES = (
    "eeft",
    "vit",
    "masked-vit",
    "resnet",
    "small-maps",
    "vgg",
    "skip-modules",
    "prototype-distance",
    "projection-head",
    "whole-model",
)
WITHIN = 2e-5  # of a tensor's largest value, after three steps in float32


@pytest.mark.parametrize("name", MODULES)
def test_three_steps_are_those_of_float64(name: str) -> None:
    package = os.environ.get("CUTLAYER_TEST_PACKAGE")
    if not package:
        pytest.skip("the graphs are made by tests.make_package: run tools/test, or set CUTLAYER_TEST_PACKAGE")
    folder = Path(package) / "modules" / name
    facts, given = json.loads((folder / "facts.json").read_text()), load_file(folder / "steps.safetensors")
    names = ("output_shape", "evaluated_shape", "trainable", "frozen", "buffers")
    cut = TrainingCut(
        1, 2, name, "forward.onnx", "backward.onnx", "evaluate.onnx", macs=0, kept=facts["kept"],
        patches=facts["patches"], saved=facts["saved"], loss=facts["loss"],
        **{each: tuple(facts[each]) for each in names},
    )  # fmt: skip
    trainer = open_trainer(folder, cut, OptimiserRule("sgd", 0.0, 0.0))
    before = {key: value.copy() for key, value in trainer.parameters().items()}
    for step in range(sum(key.startswith("x.") for key in given)):
        x, keep, targets, gradient = (given.get(f"{each}.{step}") for each in ("x", "keep", "targets", "grad_z"))
        assert x is not None
        assert trainer.forward(x, targets, keep).z.shape == (len(x), *cut.output_shape)
        trainer.backward(gradient)
        trainer.step(facts["rate"])
    for key, value in trainer.parameters().items():
        expected = given[f"after.{key}"]
        if key in cut.trainable and np.abs(expected - before[key]).max() < 1e-12:
            # A bias in front of a BatchNorm has no gradient but rounding.
            assert np.abs(value - expected).max() < 1e-4, key
            continue
        assert np.abs(value - expected).max() <= WITHIN * max(1e-3, np.abs(expected).max()), key
        is_felt = key in cut.trainable and np.abs(expected - before[key]).max() > 1e-6
        assert not is_felt or not np.array_equal(value, before[key]), key
    x = given["x.0"]
    assert trainer.evaluate(x).shape == (len(x), *cut.evaluated_shape)
