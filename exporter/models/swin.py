"""timm's SwinTransformer class: windows of tokens in four stages, each half as high and wide as the last.

Every block is one layer, in whichever stage; the merging of patches belongs to the block behind it. Tokens are grid
cells (B, h w, C) whose number and width depend on the cut, and they stand for no patch of the picture of their own:
patch retrieval does not apply.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from timm.layers import LayerNorm, Mlp
from timm.models.swin_transformer import (
    SwinTransformer,
    SwinTransformerBlock,
    WindowAttention,
    get_relative_position_index,
)
from torch import Tensor, nn

from contract.tokens import TokenLayout
from exporter.models import Facts, FoldSites


class Frontend(nn.Module):
    """Patch embedding and blocks 1..k: images (B, 3, h, w) -> tokens (B, h' w', C); parameters keep timm's names."""

    def __init__(self, model: SwinTransformer, k: int) -> None:
        super().__init__()
        self.patch_embed = model.patch_embed
        self.layers = _stages(model, 0, k)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(self.patch_embed(images)).flatten(1, 2)  # inside (B, h', w', C)


class Backend(nn.Module):
    """Blocks k+1..L, final norm and pooling: tokens (B, h' w', C) -> features (B, f) as the head receives them."""

    def __init__(self, model: SwinTransformer, k: int) -> None:
        super().__init__()
        self.grid = layouts(model)[k - 1].grid
        self.layers = _stages(model, k, len(_blocks(model)))
        self.norm = model.norm
        self.global_pool = model.head.global_pool
        self.head_drop = model.head.drop

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head_drop(self.global_pool(self.norm(self.layers(tokens.unflatten(1, self.grid)))))


def _blocks(model: SwinTransformer) -> list[tuple[int, int]]:
    """Stage and place of every block, in order."""
    return [(stage, place) for stage, each in enumerate(model.layers) for place in range(len(each.blocks))]


def _stages(model: SwinTransformer, start: int, end: int) -> nn.Sequential:
    """Blocks start + 1..end, in stages under timm's names."""
    stages: dict[int, OrderedDict[str, nn.Module]] = {}
    for stage, place in _blocks(model)[start:end]:
        stages.setdefault(stage, OrderedDict())[str(place)] = model.layers[stage].blocks[place]
    halves = OrderedDict()
    for stage, blocks in stages.items():
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        if "0" in blocks:
            parts["downsample"] = model.layers[stage].downsample
        parts["blocks"] = nn.Sequential(blocks)
        halves[str(stage)] = nn.Sequential(parts)
    return nn.Sequential(halves)


def owns(model: nn.Module) -> bool:
    """True for every model whose forward pass is SwinTransformer's own."""
    return isinstance(model, SwinTransformer) and type(model).forward_features is SwinTransformer.forward_features


def facts(model: SwinTransformer) -> Facts:
    """Depth, layer names and input shape of a whole model; usually cut behind the last stage but one (SA 1.1)."""
    height, width = model.patch_embed.img_size
    blocks = _blocks(model)
    layers = tuple(f"layers.{stage}.blocks.{place}" for stage, place in blocks)
    before_last = sum(stage < len(model.layers) - 1 for stage, _ in blocks)
    return Facts(len(layers), None, (3, int(height), int(width)), layers, usual_cut=before_last or None)


def layouts(model: SwinTransformer) -> tuple[TokenLayout, ...]:
    """Tokens behind each block but the last."""
    found = []
    for stage, place in _blocks(model)[:-1]:
        block = model.layers[stage].blocks[place]
        rows, columns = block.input_resolution
        found.append(TokenLayout(prefix=0, grid=(int(rows), int(columns)), dim=int(block.dim)))
    return tuple(found)


def cut(model: SwinTransformer, k: int) -> tuple[Frontend, Backend]:
    """Both halves, sharing their parameters with `model`."""
    return Frontend(model, k), Backend(model, k)


@torch.no_grad()
def fill_buffers(half: nn.Module) -> frozenset[str]:
    """Compute what no state dict carries, and say what it was: places within a window, and which tokens may meet."""
    filled = set()
    for path, module in half.named_modules():
        if isinstance(module, WindowAttention):
            module.relative_position_index.copy_(get_relative_position_index(*module.window_size))
            filled.add(f"{path}.relative_position_index")
        elif isinstance(module, SwinTransformerBlock) and module.attn_mask is not None:
            module.attn_mask = module.get_attn_mask()
            filled.add(f"{path}.attn_mask")
    return frozenset(filled)


def fold_sites(frontend: Frontend) -> FoldSites:
    """Where a norm feeds its layer alone: in front of the windows only if none is padded, since padding is no token."""
    normed, valued, activated = [], [], []
    for path, block in frontend.named_modules():
        if type(block) is not SwinTransformerBlock:
            continue
        padded = any(size % window for size, window in zip(block.input_resolution, block.window_size, strict=True))
        if type(block.attn) is WindowAttention:
            valued.append((f"{path}.attn.qkv", f"{path}.attn.proj"))
            if _is_affine(block.norm1) and not padded and not block.dynamic_mask:
                normed.append((f"{path}.norm1", f"{path}.attn.qkv"))
        if type(block.mlp) is Mlp and isinstance(block.mlp.norm, nn.Identity):
            if _is_affine(block.norm2):
                normed.append((f"{path}.norm2", f"{path}.mlp.fc1"))
            activated.append((f"{path}.mlp.act", f"{path}.mlp.fc2"))
    return FoldSites(tuple(normed), tuple(valued), tuple(activated))


def _is_affine(norm: nn.Module) -> bool:
    return isinstance(norm, (nn.LayerNorm, LayerNorm)) and isinstance(norm.bias, torch.Tensor)
