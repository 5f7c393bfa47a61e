"""timm's VisionTransformer class: ViT, DeiT, DeiT-3, with any number of class, distillation and register tokens.

Checking the cut and rebuilding a backend from its name are left to exporter.split.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from timm.layers import Attention, LayerNorm, Mlp
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from contract.tokens import TokenLayout
from exporter.models import Facts, FoldSites

_EMBEDDINGS = ("cls_token", "reg_token", "dist_token", "pos_embed")


class Frontend(nn.Module):
    """Patch embedding and blocks 1..k: images (B, 3, h, w) -> tokens (B, T, d); parameters keep timm's names."""

    def __init__(self, model: VisionTransformer, k: int) -> None:
        super().__init__()
        self.model_class = type(model)
        self.no_embed_class = model.no_embed_class
        self.dynamic_img_size = model.dynamic_img_size
        self.num_prefix_tokens = model.num_prefix_tokens
        self.patch_embed = model.patch_embed
        for name in _EMBEDDINGS:
            setattr(self, name, getattr(model, name, None))
        self.pos_drop = model.pos_drop
        self.patch_drop = model.patch_drop
        self.norm_pre = model.norm_pre
        self.blocks = nn.Sequential(*list(model.blocks)[:k])

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        """With `keep` (B, K), int64 patch positions, the tokens are the prefix and those patches: (B, T - N + K, d)."""
        if keep is None:
            patches = self.patch_embed(images)  # (B, N, d)
            tokens = self.model_class._pos_embed(self, patches)  # (B, T, d); each class places its prefix tokens itself
        else:
            tokens = self._kept_tokens(images, keep)
        return self.blocks(self.norm_pre(self.patch_drop(tokens)))

    def _kept_tokens(self, images: Tensor, keep: Tensor) -> Tensor:
        """Raw patches are picked before they are embedded: what is left out costs nothing, forward or backward."""
        (rows, columns), (high, wide) = self.patch_embed.grid_size, self.patch_embed.patch_size
        batch, count, kernel = images.shape[0], rows * columns, self.patch_embed.proj.weight
        cells = images.reshape(batch, images.shape[1], rows, high, columns, wide).permute(0, 2, 4, 1, 3, 5)
        places = (keep + torch.arange(batch, device=keep.device).unsqueeze(1) * count).flatten()
        picked = cells.reshape(batch * count, -1).index_select(0, places)
        embedded = nn.functional.linear(picked, kernel.flatten(1), self.patch_embed.proj.bias)
        patches = self.patch_embed.norm(embedded.reshape(batch, keep.shape[1], -1))
        prefix = [each for each in (self.cls_token, self.dist_token, self.reg_token) if each is not None]
        first = torch.cat(prefix, 1).expand(batch, -1, -1) if prefix else patches[:, :0]
        if self.pos_embed is not None:
            placed = self.pos_embed.shape[1] - count  # prefix tokens that have a position
            patches = patches + nn.functional.embedding(keep, self.pos_embed[0, placed:])
            first = first + self.pos_embed[:, :placed] if placed else first
        return self.pos_drop(torch.cat([first, patches], 1) if prefix else patches)


class Backend(nn.Module):
    """Blocks k+1..L, final norm and pooling: tokens (B, T, d) -> features (B, d) as the head receives them.

    A distilled model with its two heads: (B, 2 d), the token of each head.
    """

    def __init__(self, model: VisionTransformer, k: int) -> None:
        super().__init__()
        self.model_class = type(model)
        self.global_pool = model.global_pool
        self.num_prefix_tokens = model.num_prefix_tokens
        self.pool_include_prefix = model.pool_include_prefix
        tail = list(model.blocks)[k:]
        self.blocks = nn.Sequential(OrderedDict((str(k + i), block) for i, block in enumerate(tail)))
        self.norm = model.norm
        self.attn_pool = model.attn_pool
        self.fc_norm = model.fc_norm
        self.head_drop = model.head_drop
        self.two_heads = has_two_heads(model)

    def pool(self, tokens: Tensor) -> Tensor:
        return self.model_class.pool(self, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        last = self.norm(self.blocks(tokens))
        if self.two_heads:
            return self.head_drop(last[:, :2].flatten(1))
        return self.model_class.forward_head(self, last, pre_logits=True)


def owns(model: nn.Module) -> bool:
    """True for every model whose forward pass is VisionTransformer's own."""
    return isinstance(model, VisionTransformer) and type(model).forward_features is VisionTransformer.forward_features


def has_two_heads(model: nn.Module) -> bool:
    """True for DeiT's distilled form, whose answer is the mean of two heads that read a token each."""
    return isinstance(getattr(model, "head_dist", None), nn.Linear)


def facts(model: VisionTransformer) -> Facts:
    """Depth, token layout and input shape of a whole model."""
    height, width = model.patch_embed.img_size
    grid = (int(model.patch_embed.grid_size[0]), int(model.patch_embed.grid_size[1]))
    layout = TokenLayout(prefix=int(model.num_prefix_tokens), grid=grid, dim=int(model.embed_dim))
    layers = tuple(f"blocks.{place}" for place in range(len(model.blocks)))
    return Facts(depth=len(layers), layout=layout, input_shape=(3, int(height), int(width)), layers=layers)


def layouts(model: VisionTransformer) -> tuple[TokenLayout, ...]:
    """The same tokens behind each block."""
    return (facts(model).layout,) * (len(model.blocks) - 1)


def cut(model: VisionTransformer, k: int) -> tuple[Frontend, Backend]:
    """Both halves, sharing their parameters with `model`."""
    return Frontend(model, k), Backend(model, k)


def fill_buffers(half: nn.Module) -> frozenset[str]:
    """None: the state dict carries everything."""
    return frozenset()


def fold_sites(frontend: Frontend) -> FoldSites:
    """Where the blocks are timm's plain pre-norm ones; other block kinds are quantized without folds."""
    normed, valued, activated = [], [], []
    for index, block in enumerate(frontend.blocks):
        if type(block) is not Block:
            continue
        path = f"blocks.{index}"
        attention, mlp = block.attn, block.mlp
        plain_attention = type(attention) is Attention and attention.gate is None
        if plain_attention and _is_affine(block.norm1):
            normed.append((f"{path}.norm1", f"{path}.attn.qkv"))
        if plain_attention and isinstance(attention.norm, nn.Identity):
            valued.append((f"{path}.attn.qkv", f"{path}.attn.proj"))
        if type(mlp) is Mlp and isinstance(mlp.fc1, nn.Linear):
            if _is_affine(block.norm2):
                normed.append((f"{path}.norm2", f"{path}.mlp.fc1"))
            if isinstance(mlp.norm, nn.Identity):
                activated.append((f"{path}.mlp.act", f"{path}.mlp.fc2"))
    return FoldSites(tuple(normed), tuple(valued), tuple(activated))


def _is_affine(norm: nn.Module) -> bool:
    return isinstance(norm, (nn.LayerNorm, LayerNorm)) and isinstance(norm.bias, torch.Tensor)
