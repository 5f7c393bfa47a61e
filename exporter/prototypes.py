"""A client part that ends in g and has a projection head phi, both of shift-aware prototypes (algorithms.md section 5).

    g(h) = s h / |h|                      |.| over all values of one image
    phi(h) = W mean(h) + b, of length 1   the mean over places, for maps and tokens alike
    d(z, P) = 1 - <z, P>, or |z - P|      P of length 1 with the first, as devices hand it in

The gradient graphs are exporter.training_graph's; what prototypes are and how they pull is left to devices and server.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from contract.errors import ExportError
from contract.training import PROJECTION, PrototypeRule

_LEAST_SQUARE = 1e-12  # of a length: what is nothing has a direction, of no length


def unit(rows: Tensor) -> Tensor:
    """Rows (B, n) of length 1."""
    return rows / torch.sqrt((rows * rows).sum(1, keepdim=True) + _LEAST_SQUARE)


def normalise(h: Tensor, scale: float) -> Tensor:
    """g: h (B, ...) -> the same shape, every image of length `scale`."""
    flat = h.flatten(1)
    return (unit(flat) * scale).reshape(h.shape)


def embed(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """phi: a map (B, c, h, w) or tokens (B, T, c) -> (B, d) of length 1."""
    pooled = h.mean((2, 3)) if h.dim() == 4 else h.mean(1)
    return unit(functional.linear(pooled, weight, bias))


def distance(embedding: Tensor, anchors: Tensor, kind: str) -> Tensor:
    """d of each row (B,); anchors (B, d)."""
    if kind == "cosine":
        return 1.0 - (embedding * anchors).sum(1)
    apart = embedding - anchors
    return torch.sqrt((apart * apart).sum(1) + _LEAST_SQUARE)


class _Ending:
    """What runs behind a part: (h) -> (g(h) or h, phi of it)."""

    def __init__(self, rule: PrototypeRule) -> None:
        self._rule = rule

    def __call__(self, part: nn.Module, given: object, h: Tensor) -> tuple[Tensor, Tensor]:
        out = normalise(h, self._rule.scale) if self._rule.normalise else h
        weight, bias = (getattr(part, name) for name in PROJECTION)
        return out, embed(out, weight, bias)


def attach(part: nn.Module, rule: PrototypeRule, width: int) -> None:
    """Let `part` return (h, phi(h)), with g in front where the rule says so; the head is two parameters of its own.

    It is drawn from torch's generator, as `nn.Linear` draws.
    """
    drawn = nn.Linear(width, rule.dimension)
    for name, values in zip(PROJECTION, (drawn.weight, drawn.bias), strict=True):
        part.register_parameter(name, nn.Parameter(values.detach().clone()))
    part.register_forward_hook(_Ending(rule))


def width_of(shape: tuple[int, ...]) -> int:
    """Channels of a map (c, h, w) or of tokens (T, c). Raises ExportError for anything else."""
    if len(shape) not in (2, 3):
        raise ExportError(
            f"a projection head needs a map or tokens at the cut, found {shape}", "choose another model or cut"
        )
    return shape[0] if len(shape) == 3 else shape[1]


@torch.no_grad()
def with_scale(rule: PrototypeRule, part: nn.Module, images: Tensor) -> PrototypeRule:
    """The rule with s = mean |h| of the pre-trained part on images (B, 3, h, w), agreed once for all devices by being
    signed. The part is run in evaluation mode and left as it was."""
    was = part.training
    lengths = part.eval()(images).flatten(1).norm(dim=1)
    part.train(was)
    return replace(rule, scale=float(lengths.mean()))
