"""Run a module for inference and leave it as it came: its modes, and, on the meta device, shapes without numbers.

What is run, and why, is left to the callers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call


@contextlib.contextmanager
def inference_mode(module: nn.Module) -> Iterator[None]:
    """Inference mode and plain attention inside the block; every submodule gets its own mode back afterwards."""
    modes = [(each, each.training) for each in module.modules()]
    fused = [(each, each.fused_attn) for each in module.modules() if hasattr(each, "fused_attn")]
    try:
        module.eval()
        for each, _ in fused:
            each.fused_attn = False
        with torch.no_grad():
            yield
    finally:
        for each, training in modes:
            each.training = training
        for each, value in fused:
            each.fused_attn = value


def run_without_numbers(module: nn.Module, input_shape: tuple[int, int, int]) -> Tensor:
    """The output for one image (3, h, w) on the meta device: a shape for the price of the Python around the layers.

    Hooks of the module's layers are called; where its parameters lie, they stay.
    """
    tensors = {name: each.to("meta") for name, each in [*module.named_parameters(), *module.named_buffers()]}
    with inference_mode(module):
        return functional_call(module, tensors, (torch.empty(1, *input_shape, device="meta"),))
