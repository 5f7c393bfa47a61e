"""timm's ResNet class: basic and bottleneck blocks, plain and deep stems.

Layer 1 is conv1, layer 2 is bn1 with its activation and pooling, then every residual block is one layer: a cut inside a
block would lose its shortcut.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from timm.models.resnet import ResNet
from torch import Tensor, nn

from contract.tokens import TokenLayout
from exporter.models import Facts, FoldSites, image_shape
from exporter.models._maps import MapBackend, MapFrontend, map_layouts

_STAGES = ("layer1", "layer2", "layer3", "layer4")


class Frontend(MapFrontend):
    """Layers 1..k: images (B, 3, h, w) -> features (B, C, h', w'); parameters keep timm's names."""

    def __init__(self, model: ResNet, k: int) -> None:
        super().__init__()
        self.conv1 = model.conv1
        if k > 1:
            self.bn1, self.act1, self.maxpool = model.bn1, model.act1, model.maxpool
        _add_stages(self, model, 0, k - 2)

    def map_of(self, images: Tensor) -> Tensor:
        return _in_order(self, images)


class Backend(MapBackend):
    """Layers k+1..L and pooling: features at the cut -> features (B, f) as the head receives them."""

    def __init__(self, model: ResNet, k: int) -> None:
        super().__init__()
        if k == 1:
            self.bn1, self.act1, self.maxpool = model.bn1, model.act1, model.maxpool
        _add_stages(self, model, max(0, k - 2), len(_blocks(model)))
        self.global_pool = model.global_pool
        self.drop_rate = float(model.drop_rate)

    def pooled_of(self, features: Tensor) -> Tensor:
        pooled = _in_order(self, features)
        return nn.functional.dropout(pooled, self.drop_rate, self.training) if self.drop_rate else pooled


def _in_order(half: nn.Module, value: Tensor) -> Tensor:
    for child in half.children():
        value = child(value)
    return value


def _blocks(model: ResNet) -> list[tuple[str, str]]:
    """Stage and place of every residual block, in order."""
    return [(stage, name) for stage in _STAGES for name, _ in getattr(model, stage).named_children()]


def _add_stages(half: nn.Module, model: ResNet, start: int, end: int) -> None:
    stages: dict[str, OrderedDict[str, nn.Module]] = {}
    for stage, name in _blocks(model)[start : max(start, end)]:
        stages.setdefault(stage, OrderedDict())[name] = getattr(getattr(model, stage), name)
    for stage, blocks in stages.items():
        setattr(half, stage, nn.Sequential(blocks))


def owns(model: nn.Module) -> bool:
    """True for every model whose forward pass is ResNet's own."""
    return isinstance(model, ResNet) and type(model).forward_features is ResNet.forward_features


def facts(model: ResNet) -> Facts:
    """Depth, layer names and input shape of a whole model."""
    layers = ("conv1", "bn1", *(f"{stage}.{name}" for stage, name in _blocks(model)))
    return Facts(depth=len(layers), layout=None, input_shape=image_shape(model), layers=layers)


def layouts(model: ResNet) -> tuple[TokenLayout, ...]:
    """The map behind each layer but the last as a grid of tokens."""
    known = facts(model)
    return map_layouts([Frontend(model, k) for k in range(1, known.depth)], known.input_shape)


def cut(model: ResNet, k: int) -> tuple[Frontend, Backend]:
    """Both halves, sharing their parameters with `model`."""
    return Frontend(model, k), Backend(model, k)


def fill_buffers(half: nn.Module) -> frozenset[str]:
    """None: the state dict carries everything."""
    return frozenset()


def fold_sites(frontend: nn.Module) -> FoldSites:
    """None: no LayerNorm and no linear layer."""
    return FoldSites()


def fit_small_images(model: ResNet) -> None:
    """The stem for pictures of about 32 pixels: 3x3, stride 1, no pooling; its new weights are random."""
    stem = model.conv1
    if isinstance(stem, nn.Conv2d):
        model.conv1 = nn.Conv2d(stem.in_channels, stem.out_channels, 3, 1, 1, bias=False, device=stem.weight.device)
        if stem.weight.device != torch.device("meta"):
            nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    else:
        stem[0].stride = (1, 1)
    model.maxpool = nn.Identity()
