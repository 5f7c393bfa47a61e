"""FORA's inverse network in the form that split adaptation's paper attacks itself with: from released tokens to pixels,
trained on public images under the known law of the noise, then turned on a device's uploads.

A transformer, since it sees all tokens of an image at once. It learns what to add to the ridge's answer, and of all its
states the one that is best on other public images is kept, the untrained one included: it is never weaker than the
ridge there. What is sent, and under which law, is left to `_release`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from . import Effort, Finds, Known, Seen
from ._release import Release, images_at_once
from .ridge import RidgeAttack, image_psnr_db, in_parts, join_patches

FINDS: Finds = "images"
NEEDS = frozenset({"upload"})
CELLS_MAX = 256  # tokens that attend to each other; a finer grid is read in squares of tokens


@dataclass(frozen=True)
class Size:
    """Of the network and its training."""

    steps: int = 20_000
    batch: int = 64
    width: int = 192
    blocks: int = 4
    heads: int = 6
    rate: float = 1e-3
    checks: int = 20  # times that it is judged on other public images


class Decoder(nn.Module):
    """Received and filtered tokens -> what to add to the ridge's images."""

    def __init__(self, release: Release, size: Size) -> None:
        super().__init__()
        layout = release.layout
        self._prefix, self._grid, self._image = layout.prefix, layout.grid, release.size
        self._fold = _fold(layout.grid)
        cells = layout.patches // self._fold**2
        dim, values = layout.dim * self._fold**2, 3 * release.size[0] * release.size[1] // cells
        self.register_buffer("sent", release.sent)
        self.received, self.filtered = nn.Linear(dim, size.width), nn.Linear(dim, size.width)
        self.prefix = nn.Linear(layout.dim, size.width)
        self.position = nn.Parameter(0.02 * torch.randn(1, self._prefix + cells, size.width))
        layers = [
            nn.TransformerEncoderLayer(
                size.width, size.heads, 4 * size.width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(size.blocks)
        ]
        self.blocks = nn.Sequential(*layers)
        self.norm, self.out = nn.LayerNorm(size.width), nn.Linear(size.width, values)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, received: Tensor, filtered: Tensor) -> Tensor:
        """Standardised (B, S, d) and (B, N, d) -> (B, 3, h, w)."""
        patches = torch.zeros_like(filtered).index_copy(1, self.sent, received[:, self._prefix :])
        cells = self.received(self._squares(patches)) + self.filtered(self._squares(filtered))
        x = torch.cat([self.prefix(received[:, : self._prefix]), cells], dim=1) + self.position
        found = self.out(self.norm(self.blocks(x)))[:, self._prefix :]
        rows, columns = self._grid
        return join_patches(found.float(), (rows // self._fold, columns // self._fold), self._image)

    def _squares(self, tokens: Tensor) -> Tensor:
        """Tokens (B, N, d) of a grid as fewer, wider ones (B, N / fold^2, d fold^2)."""
        if self._fold == 1:
            return tokens
        (rows, columns), fold = self._grid, self._fold
        parts = tokens.reshape(len(tokens), rows // fold, fold, columns // fold, fold, -1).transpose(2, 3)
        return parts.reshape(len(tokens), rows * columns // fold**2, -1)


def _fold(grid: tuple[int, int]) -> int:
    """Side of the squares of tokens that are read as one."""
    return next(
        side
        for side in range(1, max(grid) + 1)
        if grid[0] % side == grid[1] % side == 0 and grid[0] * grid[1] // side**2 <= CELLS_MAX
    )


class InverseNet:
    """The attack. Once it is trained, `ridge` is what it began from, `checks_db` its PSNR on other public images before
    training and at every check, `steps` those that were taken."""

    def __init__(self, effort: Effort, size: Size | None = None) -> None:
        self._effort, self._size = effort, size or Size()
        self.steps = self._size.steps if effort.steps is None else effort.steps
        self.checks_db: list[float] = []

    def fit(self, known: Known) -> None:
        self.ridge = RidgeAttack(self._effort)
        self.ridge.fit(known)
        self.held_ridge_db = self.ridge.held_psnr_db
        self._release, device = known.release, known.learn.images.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(self._effort.seed)
            self._net = Decoder(known.release, self._size).to(device)
        generator = torch.Generator(device).manual_seed(self._effort.seed)
        self._standardise(known, generator)
        self._train(known, generator)

    def reconstruct(self, seen: Seen) -> Tensor:
        return self._decode_all(seen.uploads[-1].received)

    def as_module(self) -> nn.Module:
        """What was learnt, as one module: wire codes (B, S, d) int8 -> images (B, 3, h, w); for laws with codes."""
        return _Reader(self._release, self._net, partial(self._decode, exact=True))

    def _standardise(self, known: Known, generator: torch.Generator) -> None:
        tokens = known.learn.tokens[0]
        received = self._release.send(tokens[: images_at_once(tokens)].float(), generator)
        self._scales = [
            (values.mean((0, 1)), values.std((0, 1)).clamp_min(1e-6))
            for values in (received, self._release.restore(received))
        ]

    def _train(self, known: Known, generator: torch.Generator) -> None:
        size, learn = self._size, known.learn
        device = learn.images.device
        held = [(self._release.send(tokens, generator), images) for tokens, images in in_parts(known.held)]
        best, best_db = copy.deepcopy(self._net.state_dict()), self._check(held)
        optimiser = torch.optim.AdamW(self._net.parameters(), lr=size.rate, fused=device.type == "cuda")
        batch = min(size.batch, len(learn.images))
        order = torch.empty(0, dtype=torch.int64, device=device)
        for step in range(self.steps):
            if len(order) < batch:
                order = torch.randperm(len(learn.images), generator=generator, device=device)
            rows, order = order[:batch], order[batch:]
            clean = learn.tokens[step % len(learn.tokens)][rows]
            received = self._release.send(clean, generator)
            for group in optimiser.param_groups:
                group["lr"] = size.rate * _share(step, self.steps)
            optimiser.zero_grad(set_to_none=True)
            (self._decode(received) - learn.images[rows]).square().mean().backward()
            nn.utils.clip_grad_norm_(self._net.parameters(), 1.0)
            optimiser.step()
            self._effort.on_steps(1)
            is_last = step + 1 == self.steps or self._effort.time_is_over()
            if is_last or (step + 1) % max(1, self.steps // size.checks) == 0:
                found_db = self._check(held)
                if found_db > best_db:
                    best, best_db = copy.deepcopy(self._net.state_dict()), found_db
            if is_last:
                self.steps = step + 1
                break
        self._net.load_state_dict(best)

    def _check(self, held: list[tuple[Tensor, Tensor]]) -> float:
        found = torch.cat([image_psnr_db(images, self._decode_all(received)) for received, images in held])
        self.checks_db.append(float(found.mean()))
        return self.checks_db[-1]

    def _decode(self, received: Tensor, exact: bool = False) -> Tensor:
        """Images, not yet clipped; `exact` in float32 on a GPU too."""
        linear = self.ridge.decode(received)
        tokens = (received, self._release.restore(received))
        first, second = ((x - mean) / deviation for x, (mean, deviation) in zip(tokens, self._scales, strict=True))
        with torch.autocast("cuda", torch.bfloat16, enabled=received.device.type == "cuda" and not exact):
            added = self._net(first, second)
        return linear + added.float()

    @torch.no_grad()
    def _decode_all(self, received: Tensor) -> Tensor:
        return torch.cat([self._decode(part).clamp(0, 1) for part in received.split(images_at_once(received))])


class _Reader(nn.Module):
    """Codes to images, the whole way: dequantized, filtered, decoded by the ridge and by the network."""

    def __init__(self, release: Release, net: nn.Module, decode: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        assert release.steps is not None
        self._net, self._decode, self._steps = net, decode, release.steps

    def forward(self, codes: Tensor) -> Tensor:
        return self._decode(codes.float() * self._steps).clamp(0, 1)


def _share(step: int, steps: int) -> float:
    """Share of the learning rate: a linear rise over a twentieth of the steps, then half a cosine to zero."""
    rise = max(1, steps // 20)
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1.0 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def planned_steps(asked: int | None, images: int) -> int:
    """As asked, or the attack's own number."""
    return Size().steps if asked is None else asked


def build(effort: Effort) -> InverseNet:
    """The attack at its full size."""
    return InverseNet(effort)
