"""How much of a picture is read back from what a device sent: ridge, filtered ridge, and a trained transformer decoder.

All attackers know the noise laws and the public images, and draw noise of their own. The transformer is the figure that
counts: it sees every token of an image at once, both as received and filtered, and is trained until its error on public
images that it has not seen falls no more. What is sent, and how good the classifier is, are left to other files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from server_runtime.attacks import ridge
from tools.reproduce_noise_learning import Stepper, cosine_share

WINDOW = 7  # of SSIM: uniform, on RGB, as scikit-image has it
EVALUATED = 250  # images at once


@dataclass(frozen=True)
class Quality:
    """Means over images."""

    psnr_db: float
    ssim: float


@dataclass(frozen=True)
class AttackRule:
    """Size and length of the transformer decoder's training."""

    steps: int = 5000
    batch: int = 128
    width: int = 256
    blocks: int = 4
    heads: int = 8
    lr: float = 1e-3
    checks: int = 5  # times that its error on unseen public images is looked at


@dataclass(frozen=True)
class Pairs:
    """Received tokens come from clean ones (n, T, d) by `send`; images (n, N, p) as patches in [0, 1]."""

    tokens: tuple[Tensor, ...]  # of the same images, from several noised frontends
    patches: Tensor

    def __len__(self) -> int:
        return len(self.patches)


def patches_of(pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    """Patches (n, N, p) in [0, 1] of pixels (n, h, w, 3) uint8."""
    n, height, width, _ = pixels.shape
    rows, columns = grid
    parts = pixels.reshape(n, rows, height // rows, columns, width // columns, 3).transpose(2, 3)
    return parts.reshape(n, rows * columns, -1).float() / 255.0


def images_of(patches: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """The inverse: images (n, 3, h, w) in [0, 1]."""
    rows, columns = grid
    high, wide = size[0] // rows, size[1] // columns
    parts = patches.reshape(len(patches), rows, columns, high, wide, 3).transpose(2, 3)
    return parts.reshape(len(patches), *size, 3).permute(0, 3, 1, 2)


def quality(true: Tensor, found: Tensor) -> Quality:
    """Of images (n, 3, h, w) in [0, 1]; SSIM needs sides of at least 7."""
    error = (true - found).double().square().flatten(1).mean(dim=1).clamp_min(1e-10)
    return Quality(float((-10 * error.log10()).mean()), float(ssim(true, found).mean()))


def ssim(true: Tensor, found: Tensor) -> Tensor:
    """Structural similarity (n,) with a uniform window, sample covariances and the usual constants."""
    x, y = true.double(), found.double()
    count = WINDOW * WINDOW

    def mean(values: Tensor) -> Tensor:
        return functional.avg_pool2d(values, WINDOW, stride=1)

    mx, my = mean(x), mean(y)
    scale = count / (count - 1)
    vx, vy, vxy = scale * (mean(x * x) - mx * mx), scale * (mean(y * y) - my * my), scale * (mean(x * y) - mx * my)
    c1, c2 = 0.01**2, 0.03**2
    values = (2 * mx * my + c1) * (2 * vxy + c2) / ((mx * mx + my * my + c1) * (vx + vy + c2))
    return values.flatten(1).mean(dim=1)


def fit_ridge(tokens: Tensor, patches: Tensor, held_every: int = 5) -> tuple[Tensor, Tensor]:
    """Weight (d, p) and offset (p,) of the best linear map from tokens (n, K, d) to patches (n, K, p); every fifth
    image chooses the penalty."""
    rows = torch.arange(len(tokens), device=tokens.device)
    sums = []
    for part in (rows % held_every != 0, rows % held_every == 0):
        moments = ridge.Moments(tokens.shape[2], patches.shape[2])
        chosen = torch.nonzero(part).flatten()
        for piece in chosen.split(EVALUATED):
            moments.add(tokens[piece].flatten(0, 1), patches[piece].flatten(0, 1))
        sums.append(moments)
    decoder = ridge.fit(*sums)
    weight, offset = (np.ascontiguousarray(values, np.float32) for values in (decoder.weight, decoder.offset))
    return torch.from_numpy(weight).to(tokens.device), torch.from_numpy(offset).to(tokens.device)


class Decoder(nn.Module):
    """Received and filtered tokens -> patches, as what is left to add to the filtered ridge's answer."""

    def __init__(self, tokens: int, prefix: int, dim: int, values: int, rule: AttackRule) -> None:
        super().__init__()
        self.prefix = prefix
        self.received, self.filtered = nn.Linear(dim, rule.width), nn.Linear(dim, rule.width)
        self.position = nn.Parameter(0.02 * torch.randn(1, tokens, rule.width))
        layers = [
            nn.TransformerEncoderLayer(
                rule.width, rule.heads, 4 * rule.width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(rule.blocks)
        ]
        self.blocks = nn.Sequential(*layers)
        self.norm, self.out = nn.LayerNorm(rule.width), nn.Linear(rule.width, values)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, received: Tensor, places: Tensor, filtered: Tensor) -> Tensor:
        """received (B, S, d) at `places` (S,) of the T tokens, filtered (B, T, d), both standardised."""
        x = self.filtered(filtered) + self.position
        x = x.index_add(1, places, self.received(received).to(x.dtype))
        return self.out(self.norm(self.blocks(x)))[:, self.prefix :]


class Attacker:
    """One release under attack: public pairs to learn from, others to check on."""

    def __init__(
        self, send: Callable[[Tensor], Tensor], restore: Callable[[Tensor], Tensor], places: Tensor, prefix: int,
        public: Pairs, unseen: Pairs,
    ) -> None:  # fmt: skip
        self._send, self._restore, self._places, self._prefix = send, restore, places, prefix
        self._public, self._unseen = public, unseen
        received = send(public.tokens[0][:1000])
        filtered = restore(received)
        self._received = (received.mean((0, 1)), received.std((0, 1)).clamp_min(1e-6))
        self._filtered = (filtered.mean((0, 1)), filtered.std((0, 1)).clamp_min(1e-6))
        self._fit_ridges()

    def _fit_ridges(self) -> None:
        tokens, patches = self._public.tokens[-1][:4000], self._public.patches[:4000]
        received = torch.cat([self._send(part) for part in tokens.split(EVALUATED)])
        sent = self._places[self._prefix :] - self._prefix
        self._sent, self._colour = sent, patches.reshape(-1, 3).mean(0).repeat(patches.shape[2] // 3)
        self._plain = fit_ridge(received[:, self._prefix :], patches[:, sent]) if len(sent) else None
        filtered = torch.cat([self._restore(part) for part in received.split(EVALUATED)])
        self._linear = fit_ridge(filtered[:, self._prefix :], patches)

    def ridge(self, received: Tensor) -> Tensor:
        """Patches (n, N, p) of received tokens; the mean colour where nothing was sent."""
        found = self._colour.expand(len(received), self._public.patches.shape[1], -1).clone()
        if self._plain is not None:
            weight, offset = self._plain
            found[:, self._sent] = received[:, self._prefix :] @ weight + offset
        return found.clamp(0, 1)

    def filtered_ridge(self, received: Tensor) -> Tensor:
        """The same on the filters' estimate of all tokens."""
        return self._linear_of(self._restore(received)).clamp(0, 1)

    def _linear_of(self, filtered: Tensor) -> Tensor:
        weight, offset = self._linear
        return filtered[:, self._prefix :] @ weight + offset

    def train(self, rule: AttackRule, seed: int) -> list[float]:
        """Train the decoder; its PSNR in dB on unseen public images at every check, the last of them at the end."""
        torch.manual_seed(seed)
        tokens = self._public.tokens
        device = tokens[0].device
        dim, values = tokens[0].shape[2], self._public.patches.shape[2]
        self._decoder = Decoder(tokens[0].shape[1], self._prefix, dim, values, rule).to(device)

        def loss(clean: Tensor, wanted: Tensor) -> Tensor:
            with torch.autocast("cuda", enabled=False):
                received = self._send(clean)
                filtered = self._restore(received)
                linear = self._linear_of(filtered)
            return (self._decode(received, filtered, linear).float() - wanted).square().mean()

        stepper = Stepper([(list(self._decoder.parameters()), rule.lr)], loss, bf16=True)
        batch = min(rule.batch, len(self._public))
        found, order = [], torch.empty(0, dtype=torch.int64, device=device)
        for step in range(rule.steps):
            if len(order) < batch:
                order = torch.randperm(len(self._public), device=device)
            rows, order = order[:batch], order[batch:]
            clean = tokens[step % len(tokens)][rows]
            stepper.step(cosine_share(step, rule.steps), clean, self._public.patches[rows])
            if (step + 1) % max(1, rule.steps // rule.checks) == 0:
                found.append(self._check())
        return found

    def _decode(self, received: Tensor, filtered: Tensor, linear: Tensor) -> Tensor:
        standard = [(x - mean) / std for x, (mean, std) in ((received, self._received), (filtered, self._filtered))]
        return linear + self._decoder(standard[0], self._places, standard[1])

    @torch.no_grad()
    def transformer(self, received: Tensor) -> Tensor:
        """The trained decoder's patches (n, N, p)."""
        parts = []
        for part in received.split(EVALUATED):
            filtered = self._restore(part)
            parts.append(self._decode(part, filtered, self._linear_of(filtered)).float().clamp(0, 1))
        return torch.cat(parts)

    def _check(self) -> float:
        tokens = self._unseen.tokens[-1]
        found = self.transformer(torch.cat([self._send(part) for part in tokens.split(EVALUATED)]))
        error = (found - self._unseen.patches).square().flatten(1).mean(1).clamp_min(1e-10)
        return float((-10 * error.log10()).mean())
