"""Running means and variances of a model's norms, taken anew from images.

The mean of several devices' statistics is not the statistics of their mean weights (values of averaged weights vary
less: Jordan et al. 2022, REPAIR), and those that were taken under noise at the cut are not those of images without. Who
gives the images, and when, is left to the strategies.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

AT_ONCE = 250


@torch.no_grad()
def retake(module: nn.Module, images: torch.Tensor, device: torch.device) -> None:
    """Every norm's running mean and variance become those over images (n, 3, h, w), two or more, in pieces that count
    alike; weights, modes, momenta and counters stay what they are."""
    norms = [each for each in module.modules() if isinstance(each, _BatchNorm) and each.running_mean is not None]
    if not norms:
        return
    kept = [(each.momentum, each.num_batches_tracked) for each in norms]
    modes = {each: each.training for each in module.modules()}
    for each in norms:
        each.momentum, each.num_batches_tracked = None, torch.zeros_like(each.num_batches_tracked)  # the plain mean
    try:
        module.eval()  # what is drawn in training, as dropout is, belongs to no statistics
        for each in norms:
            each.train()
        for piece in images.tensor_split(-(-len(images) // AT_ONCE)):
            module(piece.to(device))
    finally:
        for each, (momentum, counter) in zip(norms, kept, strict=True):
            each.momentum, each.num_batches_tracked = momentum, counter
        for each, mode in modes.items():
            each.training = mode
