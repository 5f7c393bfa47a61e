"""Multiply-accumulates of training a VisionTransformer of which some blocks are frozen, from its sizes alone.

algorithms.md 4.1: one block on n tokens F(n) = 12 n d^2 + 2 n^2 d. The gradient must cross frozen blocks to reach the
local ones; only the gradients of their weights are saved. Norms, activations and the head are left out, as usual.
`exporter.macs` counts a forward pass layer by layer; this is for what no single pass shows.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class VitSizes:
    """Blocks L, width d, patches N of an image, values in a patch, tokens beside them, width inside an MLP."""

    blocks: int
    width: int
    patches: int
    patch_values: int
    prefix: int
    hidden: int

    def block(self, patches: int) -> int:
        """F of so many patches and the prefix."""
        n, d = patches + self.prefix, self.width
        return (4 * d + 2 * self.hidden) * n * d + 2 * n * n * d

    def forward(self, patches: int) -> int:
        """One image through embedding and all blocks."""
        return patches * self.patch_values * self.width + self.blocks * self.block(patches)

    def local_step(self, patches: int, local: int) -> int:
        """Training the first `local` blocks through the frozen others: [2 L + M_l] F, one image."""
        return (2 * self.blocks + local) * self.block(patches)

    def global_step(self, patches: int, local: int) -> int:
        """Training the others on features: 3 M_g F, one image."""
        return 3 * (self.blocks - local) * self.block(patches)


def sizes_of(model: nn.Module) -> VitSizes:
    """Of timm's VisionTransformer."""
    embed, first = model.patch_embed, model.blocks[0]
    values = embed.proj.in_channels * embed.proj.kernel_size[0] * embed.proj.kernel_size[1]
    return VitSizes(
        len(model.blocks), int(model.embed_dim), int(embed.num_patches), int(values), int(model.num_prefix_tokens),
        int(first.mlp.fc1.out_features),
    )  # fmt: skip
