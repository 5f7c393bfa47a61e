"""What a training step of each part of a model takes, from the model itself: products, values, bytes at the cut.

Products are `exporter.macs`' of a forward pass; backward there are twice as many, but for the first layer, whose input
wants no gradient. Layers without products are counted by the values that they give. Nothing is computed: shapes alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor, nn

from exporter.architecture import create
from exporter.macs import layer_macs
from exporter.models import family_of
from exporter.models._inference import run_without_numbers
from tools.fleet import Work

FLOAT_BYTES, LABEL_BYTES = 4, 2


def works_of(model_name: str, model_args: dict[str, object], splits: Iterable[int]) -> list[Work]:
    """One image's work at each split, float32 values both ways and a label with them."""
    with torch.device("meta"):
        model = create(model_name, False, {**model_args, "num_classes": 0})
    _, family = family_of(model)
    shape = family.facts(model).input_shape
    whole = sum(layer_macs(model, shape).values())
    first = next(iter(layer_macs(family.cut(model, 1)[0], shape).values()), 0)
    found = []
    for split in splits:
        part = family.cut(model, split)[0]
        macs, values, out = layer_macs(part, shape), _values_without_products(part, shape), _shape_at(part, shape)
        forward, sent = sum(macs.values()), FLOAT_BYTES * prod(out)
        found.append(Work(split, forward, 2 * forward - first, values, sent + LABEL_BYTES, sent, 3 * (whole - forward)))
    return found


def _shape_at(part: nn.Module, shape: tuple[int, int, int]) -> tuple[int, ...]:
    return tuple(run_without_numbers(part, shape).shape[1:])


def _values_without_products(part: nn.Module, shape: tuple[int, int, int]) -> int:
    """Values that norms, activations and pools give for one image."""
    counted, found = set(layer_macs(part, shape)), 0

    def count(layer: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> None:
        nonlocal found
        found += result.numel()

    with contextlib.ExitStack() as hooks:
        for layer in part.modules():
            if layer not in counted and not list(layer.children()) and not isinstance(layer, nn.Identity):
                hooks.callback(layer.register_forward_hook(count).remove)
        run_without_numbers(part, shape)
    return found
