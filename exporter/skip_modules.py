"""EEFT's network: a frozen ResNet whose blocks are weighed by utilisation factors, and light skips around them.

algorithms.md section 2.1. Block z of L, B_z without its final ReLU, x_0 the stem's output, S_z^i a skip from x_i:

    x_z = ReLU( alpha_z B_z(x_{z-1}) + sum_{i=max(0,z-k)}^{z-1} beta^_z^i S_z^i(x_i) )

alpha_z = sigmoid(alpha), beta^_z = softmax over the skips of block z; stored are the logits. Tracing and shipping it is
left to training_package. The construction carries over to ViT blocks, where a skip would be a linear layer; it is not
built here.
"""

from __future__ import annotations

import copy

import torch
from timm.models.resnet import ResNet
from torch import Tensor, nn

from contract.errors import ExportError
from exporter.plan import ModuleChoices

_STAGES = ("layer1", "layer2", "layer3", "layer4")
_CONV_STD = 0.01


class Skip(nn.Module):
    """S_z^i: max-pool where the maps differ in size, 1x1 convolution, norm."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(stride + 1, stride, stride // 2) if stride > 1 else nn.Identity()
        self.conv = nn.Conv2d(channels_in, channels_out, 1, bias=False)
        self.bn = nn.BatchNorm2d(channels_out)
        nn.init.normal_(self.conv.weight, 0.0, _CONV_STD)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.bn(self.conv(self.pool(x)))
        return out


class SkipNetwork(nn.Module):
    """Images (B, 3, h, w) -> features (B, f); in train mode also gamma times the complexity, which is to be added to
    the loss. Random where it is new: seed before."""

    def __init__(self, model: nn.Module, choices: ModuleChoices) -> None:
        """`model` is copied. Raises: ExportError for another model than timm's ResNet."""
        super().__init__()
        if not isinstance(model, ResNet) or type(model).forward_features is not ResNet.forward_features:
            raise ExportError(
                f"EEFT's modules are built around the blocks of timm's ResNet, found {type(model).__name__}",
                "choose resnet18, resnet34 or resnet50",
            )
        self.backbone = copy.deepcopy(model)
        self.backbone.reset_classifier(0)
        blocks = _blocks(self.backbone)
        self._gamma = choices.complexity
        widths, strides = _maps(self.backbone)  # of x_0 .. x_L
        self.act = copy.deepcopy(getattr(blocks[-1], _last_activation(blocks[-1])))
        for block in blocks:
            setattr(block, _last_activation(block), nn.Identity())
        depth = len(blocks)
        self.sources = [range(max(0, z - choices.skips), z) for z in range(1, depth + 1)]
        self.alpha = nn.Parameter(torch.full((depth,), choices.start_alpha))
        self.beta = nn.Parameter(torch.full((sum(map(len, self.sources)),), choices.start_beta))
        self.skips = nn.ModuleDict(
            {
                str(z): nn.ModuleDict({
                    str(i): Skip(widths[i], widths[z], strides[z] // strides[i]) for i in sources
                })
                for z, sources in enumerate(self.sources, start=1)
            }
        )  # fmt: skip
        self.block_sizes = [_count(block) for block in blocks]  # params(B_z)
        self.skip_sizes = [[_count(skip) for skip in each.values()] for each in self.skips.values()]
        total = sum(self.block_sizes)
        self.block_shares: Tensor
        self.skip_shares: Tensor
        self.register_buffer("block_shares", torch.tensor([size / total for size in self.block_sizes]))
        self.register_buffer("skip_shares", torch.tensor([size / total for each in self.skip_sizes for size in each]))

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        maps = [self._stem(images)]
        gates = torch.sigmoid(self.alpha)  # (L,)
        shares = self.shares()
        for z, block in enumerate(_blocks(self.backbone), start=1):
            mixed = gates[z - 1] * block(maps[-1])
            for place, i in enumerate(self.sources[z - 1]):
                mixed = mixed + shares[z - 1][place] * self.skips[str(z)][str(i)](maps[i])
            maps.append(self.act(mixed))
        features: Tensor = self.backbone.global_pool(maps[-1])
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

    def _stem(self, images: Tensor) -> Tensor:
        net = self.backbone
        out: Tensor = net.maxpool(net.act1(net.bn1(net.conv1(images))))
        return out


def _blocks(model: ResNet) -> list[nn.Module]:
    """B_1 .. B_L."""
    return [block for stage in _STAGES for block in getattr(model, stage).children()]


def _maps(model: ResNet) -> tuple[list[int], list[int]]:
    """Channels of x_0 .. x_L, and by what their sides are smaller than those of x_0."""
    widths, strides = [int(model.bn1.num_features)], [1]
    for block in _blocks(model):
        last = block.bn3 if hasattr(block, "bn3") else block.bn2
        widths.append(int(last.num_features))
        strides.append(strides[-1] * int(block.stride))
    return widths, strides


def _last_activation(block: nn.Module) -> str:
    return "act3" if hasattr(block, "act3") else "act2"


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
