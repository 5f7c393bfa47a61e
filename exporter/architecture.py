"""Build a timm model by name and arguments, with three arguments of our own for convolutional networks.

`small_images=True` fits a ResNet or VGG to pictures of about 32 pixels; `img_size` (an int or (h, w)) says
for which size of picture it is exported, which timm's own convolutional networks are not told; `average_pools=True`
takes averages where the network takes maxima, so that with a smooth activation no rounding can make a gradient jump.
Weights from files are left to exporter.checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping

import timm
import timm.layers
import timm.models
from torch import nn

from contract.errors import ExportError
from exporter.models import family_of

_SMALL_PIXELS = 32


def create(name: str, pretrained: bool, arguments: Mapping[str, object]) -> nn.Module:
    """Raises ExportError for an argument of ours that has no meaning here; whatever timm raises is passed on."""
    rest = dict(arguments)
    if not timm.models.is_model_in_modules(name.split(".")[0], ("resnet", "vgg")):
        if "small_images" in rest:
            raise ExportError(f"{name} has no variant for small images", "leave out small_images, use img_size=32")
        if "average_pools" in rest:
            raise ExportError(f"{name} has no pools to choose", "leave out average_pools")
        return timm.create_model(name, pretrained=pretrained, **rest)
    small = bool(rest.pop("small_images", False))
    average_pools = bool(rest.pop("average_pools", False))
    size = rest.pop("img_size", _SMALL_PIXELS if small else None)
    if isinstance(rest.get("act_layer"), str):  # timm's VGG takes the class only
        rest["act_layer"] = timm.layers.get_act_layer(rest["act_layer"])
    if small and pretrained:
        raise ExportError(
            f"the pretrained {name} has layers for large images that small_images replaces by untrained ones",
            "leave out one of the two, or give weights of the small variant with --weights",
        )
    model = timm.create_model(name, pretrained=pretrained, **rest)
    family = family_of(model)[1]
    if small:
        family.fit_small_images(model)
    if average_pools:
        _average_pools(model)
    if size is not None:
        model.image_size = (size, size) if isinstance(size, int) else tuple(size)
    return model


def _average_pools(model: nn.Module) -> None:
    """In the place of every max-pool; they have no parameters."""
    for parent in list(model.modules()):
        for name, pool in parent.named_children():
            if isinstance(pool, nn.MaxPool2d):
                size = (pool.kernel_size, pool.stride, pool.padding, pool.ceil_mode)
                setattr(parent, name, nn.AvgPool2d(*size))
