"""timm's VGG class, with and without BatchNorm.

Every convolution, every activation (with the BatchNorm in front of it) and every max-pool is one layer.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from timm.layers import ClassifierHead
from timm.models.vgg import VGG
from torch import Tensor, nn

from contract.tokens import TokenLayout
from exporter.models import Facts, FoldSites, image_shape
from exporter.models._maps import MapBackend, MapFrontend, map_layouts


class Frontend(MapFrontend):
    """Layers 1..k: images (B, 3, h, w) -> features (B, C, h', w'); parameters keep timm's names."""

    def __init__(self, model: VGG, k: int) -> None:
        super().__init__()
        self.features = _part(model, 0, _ends(model)[k - 1])

    def map_of(self, images: Tensor) -> Tensor:
        return self.features(images)


class Backend(MapBackend):
    """Layers k+1..L, the large model's hidden layers, pooling: features at the cut -> (B, f) as the head gets them."""

    def __init__(self, model: VGG, k: int) -> None:
        super().__init__()
        self.features = _part(model, _ends(model)[k - 1], len(model.features))
        self.pre_logits = model.pre_logits
        self.global_pool = model.head.global_pool
        self.head_drop = model.head.drop

    def pooled_of(self, features: Tensor) -> Tensor:
        return self.head_drop(self.global_pool(self.pre_logits(self.features(features))))


def _part(model: VGG, start: int, end: int) -> nn.Sequential:
    return nn.Sequential(OrderedDict(list(model.features.named_children())[start:end]))


def _ends(model: VGG) -> list[int]:
    """Where in `features` each layer ends: behind everything that is not followed by its own activation."""
    modules = list(model.features)
    return [place + 1 for place, each in enumerate(modules) if not isinstance(each, nn.modules.batchnorm._BatchNorm)]


def owns(model: nn.Module) -> bool:
    """True for every model whose forward pass is VGG's own."""
    return isinstance(model, VGG) and type(model).forward_features is VGG.forward_features


def facts(model: VGG) -> Facts:
    """Depth, layer names and input shape of a whole model."""
    ends = _ends(model)
    layers = tuple(f"features.{start}" for start in (0, *ends[:-1]))
    return Facts(depth=len(ends), layout=None, input_shape=image_shape(model), layers=layers)


def layouts(model: VGG) -> tuple[TokenLayout, ...]:
    """The map behind each layer but the last as a grid of tokens."""
    known = facts(model)
    return map_layouts([Frontend(model, k) for k in range(1, known.depth)], known.input_shape)


def cut(model: VGG, k: int) -> tuple[Frontend, Backend]:
    """Both halves, sharing their parameters with `model`."""
    return Frontend(model, k), Backend(model, k)


def fill_buffers(half: nn.Module) -> frozenset[str]:
    """None: the state dict carries everything."""
    return frozenset()


def fold_sites(frontend: nn.Module) -> FoldSites:
    """None: no LayerNorm and no linear layer."""
    return FoldSites()


def fit_small_images(model: VGG) -> None:
    """One linear layer over the pooled features instead of two hidden layers, whose 7x7 window needs 224 pixels."""
    device = next(model.parameters()).device
    drop = model.head.drop.p
    model.pre_logits = nn.Identity()
    model.head = ClassifierHead(model.num_features, model.num_classes, "avg", drop_rate=drop, device=device)
    model.head_hidden_size = model.num_features
    if isinstance(model.head.fc, nn.Linear) and device != torch.device("meta"):
        nn.init.normal_(model.head.fc.weight, 0, 0.01)
        nn.init.zeros_(model.head.fc.bias)
