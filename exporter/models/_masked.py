"""A whole VisionTransformer whose images may come with the patches that are to be kept: the others cost nothing.

EFTViT trains on it: positions are added before patches are dropped, the class token is always kept (algorithms.md 4.1).
Which patches are kept is the caller's choice.
"""

from __future__ import annotations

from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from contract.errors import ExportError
from exporter.models.vit import Frontend, has_two_heads, owns


class MaskedWhole(Frontend):
    """Images (B, 3, h, w), and int64 positions (B, K) or None for all -> logits (B, C); timm's names."""

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__(model, len(model.blocks))
        self.global_pool = model.global_pool
        self.pool_include_prefix = model.pool_include_prefix
        self.norm = model.norm
        self.attn_pool = model.attn_pool
        self.fc_norm = model.fc_norm
        self.head_drop = model.head_drop
        self.head = model.head

    def pool(self, tokens: Tensor) -> Tensor:
        return self.model_class.pool(self, tokens)

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        last = self.norm(super().forward(images, keep))
        return self.model_class.forward_head(self, last)


def masked_whole(model: nn.Module) -> MaskedWhole:
    """The model, sharing its parameters. Raises ExportError for one that is no plain VisionTransformer."""
    if not owns(model) or has_two_heads(model):
        raise ExportError(
            f"{type(model).__name__} cannot leave out patches: only a plain VisionTransformer can",
            "choose a vit_* or deit_* model without a distilled head",
        )
    return MaskedWhole(model)
