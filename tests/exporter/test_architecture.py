"""Arguments of our own for convolutional networks."""

from __future__ import annotations

import pytest
import torch

from contract.errors import ExportError
from exporter.architecture import create


def test_average_pools_take_the_place_of_maxima_and_of_nothing_else() -> None:
    usual, averaged = (
        create("vgg11_bn", False, {"small_images": True, "num_classes": 4, **extra})
        for extra in ({}, {"average_pools": True})
    )
    averaged.load_state_dict(usual.state_dict())
    kinds = [[type(each).__name__ for each in model.features] for model in (usual, averaged)]
    assert kinds[1] == ["AvgPool2d" if kind == "MaxPool2d" else kind for kind in kinds[0]] != kinds[0]
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert averaged.eval()(images).shape == usual.eval()(images).shape


def test_a_transformer_has_no_pools_to_choose() -> None:
    with pytest.raises(ExportError, match="no pools to choose"):
        create("vit_tiny_patch16_224", False, {"average_pools": True})
