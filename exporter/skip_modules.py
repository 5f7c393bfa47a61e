"""EEFT's network: a frozen model whose blocks are weighed by utilisation factors, and light skips around them.

algorithms.md section 2.1. Block z of L, B_z without its final ReLU, x_0 the stem's output, S_z^i a skip from x_i:

    x_z = ReLU( alpha_z B_z(x_{z-1}) + sum_{i=max(0,z-k)}^{z-1} beta^_z^i S_z^i(x_i) )

alpha_z = sigmoid(alpha), beta^_z = softmax over the skips of block z; stored are the logits. The paper has ResNets; in
a ViT, as defined here, B_z is a whole block with its two residuals, which ends in no ReLU, so there is none; x_0 are
the tokens with their positions; S_z^i is a linear layer without bias and a LayerNorm, the same for every token.
Tracing and shipping it is left to training_package.
"""

from __future__ import annotations

import copy
from typing import Any, TypeAlias

import torch
from timm.models.resnet import ResNet
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from contract.errors import ExportError
from exporter.models import vit
from exporter.plan import ModuleChoices

Backbone: TypeAlias = Any  # timm's ResNet or VisionTransformer, which have no types
_STAGES = ("layer1", "layer2", "layer3", "layer4")
_WEIGHT_STD = 0.01


class Skip(nn.Module):
    """S_z^i: max-pool where the maps differ in size, 1x1 convolution, norm."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(stride + 1, stride, stride // 2) if stride > 1 else nn.Identity()
        self.conv = nn.Conv2d(channels_in, channels_out, 1, bias=False)
        self.bn = nn.BatchNorm2d(channels_out)
        nn.init.normal_(self.conv.weight, 0.0, _WEIGHT_STD)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.bn(self.conv(self.pool(x)))
        return out


class TokenSkip(nn.Module):
    """S_z^i between tokens (B, T, d): what the convolution and its norm are for maps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.linear.weight, 0.0, _WEIGHT_STD)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.linear(x))
        return out


class SkipNetwork(nn.Module):
    """Images (B, 3, h, w) -> features (B, f); in train mode also gamma times the complexity, which is to be added to
    the loss. Random where it is new: seed before."""

    def __init__(self, model: nn.Module, choices: ModuleChoices) -> None:
        """`model` is copied. Raises: ExportError for another model than timm's ResNet or ViT."""
        super().__init__()
        self.backbone = copy.deepcopy(_known(model))
        self.backbone.reset_classifier(0)
        blocks = _blocks(self.backbone)
        self._gamma = choices.complexity
        self.act = _take_activation(blocks)
        depth = len(blocks)
        self.sources = [range(max(0, z - choices.skips), z) for z in range(1, depth + 1)]
        self.alpha = nn.Parameter(torch.full((depth,), choices.start_alpha))
        self.beta = nn.Parameter(torch.full((sum(map(len, self.sources)),), choices.start_beta))
        self.skips = nn.ModuleDict(
            {
                str(z): nn.ModuleDict({str(i): _skip(self.backbone, i, z) for i in sources})
                for z, sources in enumerate(self.sources, start=1)
            }
        )
        for norm in self.skips.modules():
            if isinstance(norm, nn.BatchNorm2d | nn.LayerNorm):
                nn.init.constant_(norm.weight, choices.start_skips)
        self.block_sizes = [_count(block) for block in blocks]  # params(B_z)
        self.skip_sizes = [[_count(skip) for skip in each.values()] for each in self.skips.values()]
        total = sum(self.block_sizes)
        self.block_shares: Tensor
        self.skip_shares: Tensor
        self.register_buffer("block_shares", torch.tensor([size / total for size in self.block_sizes]))
        self.register_buffer("skip_shares", torch.tensor([size / total for each in self.skip_sizes for size in each]))

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        maps = [_stem(self.backbone, images)]
        gates = torch.sigmoid(self.alpha)  # (L,)
        shares = self.shares()
        for z, block in enumerate(_blocks(self.backbone), start=1):
            mixed = gates[z - 1] * block(maps[-1])
            for place, i in enumerate(self.sources[z - 1]):
                mixed = mixed + shares[z - 1][place] * self.skips[str(z)][str(i)](maps[i])
            maps.append(self.act(mixed))
        features = _pooled(self.backbone, maps[-1])
        return (features, self._gamma * self.complexity()) if self.training else features

    def shares(self) -> list[Tensor]:
        """beta^_z for each block, (number of its skips,)."""
        return [logits.softmax(0) for logits in self.beta.split([len(each) for each in self.sources])]

    def complexity(self) -> Tensor:
        """(sum_z alpha_z params(B_z) - sum_z sum_i beta^_z^i params(S_z^i)) / sum_z params(B_z).

        Divided by the whole, as raw counts would drown the cross-entropy. Within a softmax the second sum only prefers
        the larger skips.
        """
        return (torch.sigmoid(self.alpha) * self.block_shares).sum() - (
            torch.cat(self.shares()) * self.skip_shares
        ).sum()


# -- what the two families have: blocks with what comes before and behind them


def _known(model: nn.Module) -> Backbone:
    """Raises: ExportError."""
    is_resnet = isinstance(model, ResNet) and type(model).forward_features is ResNet.forward_features
    if is_resnet or (vit.owns(model) and not vit.has_two_heads(model)):
        return model
    raise ExportError(
        f"EEFT's modules are built around blocks of timm's ResNet and VisionTransformer, found {type(model).__name__}",
        "choose for example resnet18, resnet50 or vit_small_patch16_224",
    )


def _blocks(model: Backbone) -> list[nn.Module]:
    """B_1 .. B_L."""
    if isinstance(model, VisionTransformer):
        return list(model.blocks)
    return [block for stage in _STAGES for block in getattr(model, stage).children()]


def _stem(model: Backbone, images: Tensor) -> Tensor:
    """x_0."""
    if isinstance(model, VisionTransformer):
        tokens: Tensor = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))
        return tokens
    out: Tensor = model.maxpool(model.act1(model.bn1(model.conv1(images))))
    return out


def _pooled(model: Backbone, last: Tensor) -> Tensor:
    """x_L -> features (B, f)."""
    is_vit = isinstance(model, VisionTransformer)
    features: Tensor = model.forward_head(model.norm(last), pre_logits=True) if is_vit else model.global_pool(last)
    return features


def _skip(model: Backbone, i: int, z: int) -> nn.Module:
    """S_z^i."""
    if isinstance(model, VisionTransformer):
        return TokenSkip(int(model.embed_dim))
    widths, strides = _maps(model)
    return Skip(widths[i], widths[z], strides[z] // strides[i])


def _maps(model: Backbone) -> tuple[list[int], list[int]]:
    """Channels of x_0 .. x_L, and by what their sides are smaller than those of x_0."""
    widths, strides = [int(model.bn1.num_features)], [1]
    for block in _blocks(model):
        last = block.bn3 if hasattr(block, "bn3") else block.bn2
        widths.append(int(last.num_features))
        strides.append(strides[-1] * int(block.stride))
    return widths, strides


def _take_activation(blocks: list[nn.Module]) -> nn.Module:
    """The last activation of these blocks, which from now on they leave to what is around them; a ViT's have none."""
    taken: nn.Module = nn.Identity()
    for block in blocks:
        name = "act3" if hasattr(block, "act3") else "act2"
        if hasattr(block, name):
            taken = getattr(block, name)
            setattr(block, name, nn.Identity())
    return copy.deepcopy(taken)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
