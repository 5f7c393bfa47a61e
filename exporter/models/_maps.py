"""What the convolutional families share: features (B, C, h, w) at the cut, or the same as a grid of tokens (B, h w, C).

Parts that devices train keep the map; a frozen frontend sends tokens, so that noise, wire and filter are those of every
other family. Where a family cuts is left to its own file.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from contract.tokens import TokenLayout
from exporter.models._inference import run_without_numbers


class MapFrontend(nn.Module):
    """First layers of a convolutional network; a subclass's `map_of` is timm's forward pass."""

    as_tokens = False

    def map_of(self, images: Tensor) -> Tensor:
        """Images (B, 3, h, w) -> features (B, C, h', w')."""
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        features = self.map_of(images)
        return features.flatten(2).transpose(1, 2) if self.as_tokens else features


class MapBackend(nn.Module):
    """The layers behind; `grid` (h, w) tells where tokens (B, h w, C) come in instead of features (B, C, h, w)."""

    grid: tuple[int, int] | None = None

    def pooled_of(self, features: Tensor) -> Tensor:
        """Features (B, C, h, w) -> features (B, f) as the head receives them."""
        raise NotImplementedError

    def forward(self, given: Tensor) -> Tensor:
        return self.pooled_of(given if self.grid is None else given.transpose(1, 2).unflatten(2, self.grid))


def map_layouts(frontends: Sequence[MapFrontend], input_shape: tuple[int, int, int]) -> tuple[TokenLayout, ...]:
    """Tokens behind each of one model's frontends, the deepest of them last: no patch of the picture is one of them."""
    shapes: dict[nn.Module, tuple[int, ...]] = {}

    def note(layer: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> None:
        shapes[layer] = tuple(result.shape)

    last = [_last_layer(each) for each in frontends]
    hooks = [layer.register_forward_hook(note) for layer in last]
    try:
        run_without_numbers(frontends[-1], input_shape)
    finally:
        for hook in hooks:
            hook.remove()
    found = [shapes[layer] for layer in last]
    return tuple(TokenLayout(0, (height, width), channels) for _, channels, height, width in found)


def _last_layer(frontend: MapFrontend) -> nn.Module:
    """What makes the frontend's output, as the model itself holds it."""
    layer: nn.Module = frontend
    while isinstance(layer, (MapFrontend, nn.Sequential)):
        layer = list(layer.children())[-1]
    return layer
