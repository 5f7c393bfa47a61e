"""Multiply-accumulates of one forward pass: convolutions, linear layers, and both products of every attention.

Norms, activations and additions are left out, as is the custom. What the figure is used for is left to the caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from timm.layers import Attention
from torch import Tensor, nn

from exporter.onnx_graph import inference_mode


def count_macs(module: nn.Module, input_shape: tuple[int, int, int]) -> int:
    """For one image of `input_shape` (3, height, width); the module's modes are as before afterwards."""
    total = 0

    def add(count: Callable[..., int]) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(layer: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> None:
            nonlocal total
            total += count(layer, given[0], result)

        return hook

    with contextlib.ExitStack() as hooks, inference_mode(module):
        for layer in module.modules():
            for kind, count in _COUNTS.items():
                if isinstance(layer, kind):
                    hooks.callback(layer.register_forward_hook(add(count)).remove)
        module(torch.zeros(1, *input_shape))
    return total


def _convolution(layer: nn.Conv2d, given: Tensor, result: Tensor) -> int:
    height, width = layer.kernel_size
    return result.numel() * (layer.in_channels // layer.groups) * height * width


def _linear(layer: nn.Linear, given: Tensor, result: Tensor) -> int:
    return result.numel() * layer.in_features


def _attention_products(layer: Attention, given: Tensor, result: Tensor) -> int:
    """Queries by keys and weights by values; the linear layers inside are counted as such."""
    batch, tokens = given.shape[:2]
    return 2 * batch * tokens**2 * layer.num_heads * layer.head_dim


_COUNTS: dict[type[nn.Module], Callable[..., int]] = {
    nn.Conv2d: _convolution, nn.Linear: _linear, Attention: _attention_products,
}  # fmt: skip
