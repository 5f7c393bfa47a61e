"""Which file knows a model: the folder is the registry, one file per family of architectures.

Creating models and loading their weights is left to exporter.checkpoint.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, cast

from torch import nn

from contract.errors import ExportError
from contract.tokens import TokenLayout


@dataclass(frozen=True)
class FoldSites:
    """Module paths inside one frontend where a rescaling can be folded without changing the function.

    normed: (LayerNorm, linear fed by it alone); valued: (fused qkv, projection behind the attention);
    activated: (activation, linear behind it).
    """

    normed: tuple[tuple[str, str], ...] = ()
    valued: tuple[tuple[str, str], ...] = ()
    activated: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Facts:
    """What the exporter must know of a whole model before it cuts it: layers, and tokens with their width."""

    depth: int  # of what a cut can lie behind: blocks or layers
    layout: TokenLayout | None  # of every cut, where a token stays that of its patch; None: see the family's `layouts`
    input_shape: tuple[int, int, int]  # (3, height, width)
    layers: tuple[str, ...]  # name of each, as the model's own module path
    usual_cut: int | None = None  # None: two thirds of the depth


class Family(Protocol):
    """One family of models; each file of this folder is one, its functions are these."""

    def owns(self, model: nn.Module) -> bool: ...

    def facts(self, model: nn.Module) -> Facts: ...

    def layouts(self, model: nn.Module) -> tuple[TokenLayout, ...]:
        """Tokens behind each cut, 1 to depth - 1; a convolutional network's features count as a grid of tokens."""
        ...

    def cut(self, model: nn.Module, k: int) -> tuple[nn.Module, nn.Module]: ...

    def fill_buffers(self, half: nn.Module) -> frozenset[str]:
        """Compute the buffers that no state dict carries, and say their names."""
        ...

    def fold_sites(self, frontend: nn.Module) -> FoldSites: ...


def image_shape(model: nn.Module) -> tuple[int, int, int]:
    """(3, height, width) of a model that takes any size: as it was asked for, or as it was trained."""
    height, width = getattr(model, "image_size", None) or model.pretrained_cfg["input_size"][1:]
    return (3, int(height), int(width))


def family_names() -> tuple[str, ...]:
    """Names of the files in this folder."""
    return tuple(sorted(entry.name for entry in pkgutil.iter_modules(__path__) if not entry.name.startswith("_")))


def family_of(model: nn.Module) -> tuple[str, Family]:
    """Name and functions of the family that knows `model`. Raises ExportError when none does."""
    for name, family in _families():
        if family.owns(model):
            return name, family
    raise ExportError(
        f"{type(model).__name__} belongs to no family that can be split (known families: {', '.join(family_names())})",
        "choose a timm VisionTransformer (vit_*, deit*), Swin, ResNet or VGG, or add a file to exporter/models",
    )


def _families() -> Iterator[tuple[str, Family]]:
    for name in family_names():
        yield name, cast(Family, importlib.import_module(f"{__name__}.{name}"))
