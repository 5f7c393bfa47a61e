"""A vision transformer's frontend that runs the chosen patches only: (images, keep) -> tokens of the prefix and those.

Patches are picked before they are embedded, so what is left out costs nothing. The embedding is a linear layer here,
so that it runs as INT8 like the others: pixels in steps of 1/255 lose next to nothing. Tracing and quantizing it are
left to exporter.onnx_graph and onnx_qdq.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from onnx import ModelProto, helper
from torch import Tensor, nn

from contract.errors import UsageError
from contract.images import ImageRule
from exporter.models.vit import Frontend
from exporter.quantize import InputRange

KEEP_NAME = "keep"
EMBEDDING = "patch_embed.proj"
PATCHES_KEY = "patches"  # of the file's metadata: N, for whoever runs every patch


class MaskedFrontend(nn.Module):
    """The modules of `frontend` under their own names, but for `patch_embed.proj`, which is a linear layer.

    images (B, 3, h, w), keep (B, K) int64 patch numbers -> tokens (B, prefix + K, d); without `keep` all N patches.
    """

    def __init__(self, frontend: Frontend) -> None:
        super().__init__()
        self.grid: tuple[int, int] = tuple(frontend.patch_embed.grid_size)
        self.patch_size: tuple[int, int] = tuple(frontend.patch_embed.patch_size)
        self.patch_embed = nn.Module()
        self.patch_embed.proj = as_linear(frontend.patch_embed.proj)
        self.patch_embed.norm = frontend.patch_embed.norm
        for name in ("cls_token", "dist_token", "reg_token", "pos_embed"):
            setattr(self, name, getattr(frontend, name))
        self.norm_pre = frontend.norm_pre
        self.blocks = frontend.blocks

    @property
    def patches(self) -> int:
        """N"""
        return self.grid[0] * self.grid[1]

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        batch, (rows, columns), (high, wide) = images.shape[0], self.grid, self.patch_size
        if keep is None:
            keep = torch.arange(self.patches, device=images.device).expand(batch, -1)
        cells = images.reshape(batch, images.shape[1], rows, high, columns, wide).permute(0, 2, 4, 1, 3, 5)
        places = keep + torch.arange(batch, device=keep.device).unsqueeze(1) * self.patches  # (B, K)
        picked = cells.reshape(batch * self.patches, -1).index_select(0, places.flatten())  # (B K, 3 ph pw)
        patches = self.patch_embed.norm(self.patch_embed.proj(picked.reshape(batch, keep.shape[1], -1)))  # (B, K, d)
        prefix = [each for each in (self.cls_token, self.dist_token, self.reg_token) if each is not None]
        first = torch.cat(prefix, 1).expand(batch, -1, -1) if prefix else patches[:, :0]
        if self.pos_embed is not None:
            placed = self.pos_embed.shape[1] - self.patches  # prefix tokens that have a position
            patches = patches + nn.functional.embedding(keep, self.pos_embed[0, placed:])
            first = first + self.pos_embed[:, :placed] if placed else first
        return self.blocks(self.norm_pre(torch.cat([first, patches], 1) if prefix else patches))


def as_linear(convolution: nn.Conv2d) -> nn.Linear:
    """A patch embedding's convolution as the linear layer on a patch's values, sharing its weights."""
    linear = nn.Linear(convolution.weight[0].numel(), convolution.out_channels, convolution.bias is not None)
    linear.weight = nn.Parameter(convolution.weight.detach().flatten(1), requires_grad=False)
    linear.bias = convolution.bias
    return linear


def masked_frontend(frontend: nn.Module) -> MaskedFrontend:
    """Raises UsageError for a frontend without a grid of patches."""
    if not isinstance(frontend, Frontend) or not isinstance(frontend.patch_embed.proj, nn.Conv2d):
        raise UsageError(
            "--masked runs a choice of an image's patches, and this model does not start with patches of its own",
            "leave it out, or choose vit_* or deit_*",
        )
    return MaskedFrontend(frontend)


def with_every_pixel(ranges: dict[str, InputRange], rule: ImageRule) -> dict[str, InputRange]:
    """Ranges with that of the embedding's input as wide as pixels can be: calibration need not see black and white."""
    if EMBEDDING not in ranges:
        return ranges
    seen = ranges[EMBEDDING]
    mean, std = (np.repeat(np.asarray(each), len(seen.mean) // len(rule.mean)) for each in (rule.mean, rule.std))
    return {**ranges, EMBEDDING: replace(seen, minimum=-mean / std, maximum=(1.0 - mean) / std)}


def state_patches(model: ModelProto, patches: int) -> None:
    """Write N into the file, so that an engine can run every patch without being told how many there are."""
    helper.set_model_props(model, {PATCHES_KEY: str(patches)})
