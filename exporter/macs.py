"""Multiply-accumulates of one forward pass: convolutions, linear layers, and both products of every attention.

Norms, activations and additions are left out, as is the custom. Nothing is computed: the pass runs on the meta device.
What the figure is used for is left to the caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from torch import Tensor, nn

from exporter.models._inference import run_without_numbers


def count_macs(module: nn.Module, input_shape: tuple[int, int, int]) -> int:
    """For one image of `input_shape` (3, height, width); the module's modes are as before afterwards."""
    return sum(layer_macs(module, input_shape).values())


def layer_macs(module: nn.Module, input_shape: tuple[int, int, int]) -> dict[nn.Module, int]:
    """The same, layer by layer: those that count anything, an attention without the linear layers inside it."""
    found: dict[nn.Module, int] = {}

    def add(count: Callable[..., int]) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(layer: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> None:
            found[layer] = found.get(layer, 0) + count(layer, given[0], result)

        return hook

    with contextlib.ExitStack() as hooks:
        for layer in module.modules():
            for fits, count in _COUNTS:
                if fits(layer):
                    hooks.callback(layer.register_forward_hook(add(count)).remove)
        run_without_numbers(module, input_shape)
    return found


def _convolution(layer: nn.Conv2d, given: Tensor, result: Tensor) -> int:
    height, width = layer.kernel_size
    return result.numel() * (layer.in_channels // layer.groups) * height * width


def _linear(layer: nn.Linear, given: Tensor, result: Tensor) -> int:
    return result.numel() * layer.in_features


def _is_attention(layer: nn.Module) -> bool:
    """timm's attentions among rows (B, T, d): all tokens of an image, or those of a window."""
    return hasattr(layer, "num_heads") and hasattr(layer, "fused_attn") and not hasattr(layer, "latent")


def _attention_products(layer: nn.Module, given: Tensor, result: Tensor) -> int:
    """Queries by keys and weights by values; the linear layers inside are counted as such."""
    batch, tokens = given.shape[:2]
    width = layer.num_heads * layer.head_dim if hasattr(layer, "head_dim") else layer.qkv.out_features // 3
    return 2 * batch * tokens**2 * width


_COUNTS: tuple[tuple[Callable[[nn.Module], bool], Callable[..., int]], ...] = (
    (lambda layer: isinstance(layer, nn.Conv2d), _convolution),
    (lambda layer: isinstance(layer, nn.Linear), _linear),
    (_is_attention, _attention_products),
)
