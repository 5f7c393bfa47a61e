"""Ridge decoder: one linear map from a noisy token to its own image patch, learnt on public images and the known noise.

The quick yardstick. It flatters a defence: a trained transformer decoder reads 4 to 7 dB more. Running a frontend is
left to the caller; here are the noise law, the fit and the figures, in numpy and float64, and `build`, the attack on a
release in torch: the better of a map from received tokens and one from filtered tokens, judged on other public images.

Symbols: m tokens, d channels of a token, p = 3 ph pw values of a patch, N patches, images (n, h, w, 3) in [0, 1].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contract.tokens import Statistics, add_noise, dequantize, noise_scales, quantize, wire_steps

from . import Effort, Finds, Known, Pairs, Seen
from ._release import images_at_once

FINDS: Finds = "images"
NEEDS = frozenset({"upload"})

STRENGTHS = tuple(float(10.0**power) for power in range(-7, 3))  # of the penalty, on channels of variance 1

Doubles = NDArray[np.float64]


class Moments:
    """Means and centred sums over pairs of token and patch: all that a fit or a held-out error needs, whatever their
    number. Centred from the start: a channel far from zero that hardly varies keeps its digits."""

    def __init__(self, channels: int, values: int) -> None:
        self.count = 0
        self.token_mean, self.patch_mean = np.zeros(channels), np.zeros(values)
        self.token_scatter = np.zeros((channels, channels))
        self.cross = np.zeros((channels, values))
        self.patch_scatter = 0.0  # sum over values of all squared distances from their means

    def add(self, tokens: NDArray[np.floating] | Tensor, patches: NDArray[np.floating] | Tensor) -> None:
        """Tokens (m, d) and the patches (m, p) that they stand for; a Tensor's sums are taken where it lies."""
        x, y = torch.as_tensor(tokens).double(), torch.as_tensor(patches).double()
        if not len(x):
            return
        mean_x, mean_y = x.mean(0), y.mean(0)
        x, y = x - mean_x, y - mean_y
        both = self.count + len(x)
        far_x, far_y = mean_x.cpu().numpy() - self.token_mean, mean_y.cpu().numpy() - self.patch_mean
        between = self.count * len(x) / both  # Chan, Golub and LeVeque: the pieces' own means against each other
        self.token_scatter += (x.T @ x).cpu().numpy() + between * np.outer(far_x, far_x)
        self.cross += (x.T @ y).cpu().numpy() + between * np.outer(far_x, far_y)
        self.patch_scatter += float(y.square().sum()) + between * float(far_y @ far_y)
        self.token_mean += far_x * (len(x) / both)
        self.patch_mean += far_y * (len(x) / both)
        self.count = both

    def mean_square_error(self, decoder: RidgeDecoder) -> float:
        """Mean over values of (patch - decoded)^2 on these pairs, before clipping."""
        w, n = decoder.weight, self.count
        off = self.patch_mean - self.token_mean @ w - decoder.offset
        varies = self.patch_scatter - 2 * np.vdot(w, self.cross) + np.vdot(w, self.token_scatter @ w)
        return float((max(varies, 0.0) / n + off @ off) / len(off))


@dataclass(frozen=True)
class RidgeDecoder:
    """patch = token @ weight + offset; `strength` is the penalty that was chosen."""

    weight: Doubles  # (d, p)
    offset: Doubles  # (p,)
    strength: float

    def decode(self, tokens: NDArray[np.floating]) -> Doubles:
        """Patches (..., p) in [0, 1] of tokens (..., d)."""
        patches: Doubles = np.clip(np.asarray(tokens, np.float64) @ self.weight + self.offset, 0.0, 1.0)
        return patches


def fit(train: Moments, held: Moments, strengths: Sequence[float] = STRENGTHS) -> RidgeDecoder:
    """The decoder whose penalty is best on `held`, pairs of other public images. Raises: ValueError without pairs."""
    if train.count < 2 or held.count < 1:
        raise ValueError(f"a ridge needs pairs to fit and to choose on, found {train.count} and {held.count}")
    mean_x, mean_y = train.token_mean, train.patch_mean
    covariance = train.token_scatter / train.count
    spread = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    spread[spread == 0.0] = 1.0  # a channel that never varies says nothing, at any penalty
    values, vectors = np.linalg.eigh(covariance / np.outer(spread, spread))
    projected = vectors.T @ (train.cross / train.count / spread[:, None])  # (d, p)
    decoders = []
    for strength in strengths:
        weight = (vectors / (np.maximum(values, 0.0) + strength)) @ projected / spread[:, None]
        decoders.append(RidgeDecoder(weight, mean_y - mean_x @ weight, strength))
    return min(decoders, key=held.mean_square_error)


def released(
    tokens: NDArray[np.float32], statistics: Statistics, kappa: float, prefix: int, rng: np.random.Generator
) -> NDArray[np.float32]:
    """Tokens (n, T, d) as a server receives them: Laplace noise of strength kappa, wire codes, dequantized."""
    noisy = add_noise(
        tokens, rng.laplace(size=tokens.shape).astype(np.float32), noise_scales(statistics, kappa), prefix
    )
    steps = wire_steps(statistics, kappa)
    codes, _ = quantize(noisy, steps, prefix)
    return dequantize(codes, steps, prefix)


def patches_of(images: NDArray[np.floating], grid: tuple[int, int]) -> NDArray[np.floating]:
    """Patches (n, N, p) of images (n, h, w, 3), row by row as the tokens are."""
    n, height, width, _ = images.shape
    rows, columns = grid
    parts = images.reshape(n, rows, height // rows, columns, width // columns, 3)
    return parts.transpose(0, 1, 3, 2, 4, 5).reshape(n, rows * columns, -1)


def images_of(patches: NDArray[np.floating], grid: tuple[int, int], size: tuple[int, int]) -> NDArray[np.floating]:
    """The inverse of `patches_of`; `size` is (h, w)."""
    rows, columns = grid
    high, wide = size[0] // rows, size[1] // columns
    parts = patches.reshape(len(patches), rows, columns, high, wide, 3)
    return parts.transpose(0, 1, 3, 2, 4, 5).reshape(len(patches), *size, 3)


def mean_psnr_db(images: NDArray[np.floating], found: NDArray[np.floating]) -> float:
    """Mean over images of 10 log10(1 / MSE); a perfect image counts as 100 dB."""
    error = np.square(np.asarray(images, np.float64) - found).reshape(len(images), -1).mean(axis=1)
    return float(np.mean(-10.0 * np.log10(np.maximum(error, 1e-10))))


def mean_colour(moments: Moments) -> Doubles:
    """The best guess without any token: the public images' mean colour (3,)."""
    colour: Doubles = moments.patch_mean.reshape(-1, 3).mean(axis=0)
    return colour


# The attack on a release, in torch: images (n, 3, h, w), tokens (n, S, d).


def split_patches(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """Patches (n, N, p) of images (n, 3, h, w)."""
    n, channels, height, width = images.shape
    rows, columns = grid
    parts = images.reshape(n, channels, rows, height // rows, columns, width // columns)
    return parts.permute(0, 2, 4, 3, 5, 1).reshape(n, rows * columns, -1)


def join_patches(patches: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """The inverse of `split_patches`; `size` is (h, w)."""
    rows, columns = grid
    parts = patches.reshape(len(patches), rows, columns, size[0] // rows, size[1] // columns, 3)
    return parts.permute(0, 5, 1, 3, 2, 4).reshape(len(patches), 3, *size)


def image_psnr_db(images: Tensor, found: Tensor) -> Tensor:
    """10 log10(1 / MSE) of each image (n,); a perfect one counts as 100 dB."""
    error = (images - found).double().square().flatten(1).mean(dim=1)
    return -10.0 * error.clamp_min(1e-10).log10()


@dataclass(frozen=True)
class LinearMap:
    """y = x @ weight + offset."""

    weight: Tensor  # (f, p)
    offset: Tensor  # (p,)

    def __call__(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight + self.offset


Batches = Iterable[tuple[Tensor, Tensor]]


def fit_map(train: Batches, held: Batches) -> LinearMap:
    """The ridge from x (..., f) to y (..., p) whose penalty is best on `held`. Raises: ValueError without pairs."""
    sums: list[Moments] = []
    device = torch.device("cpu")
    for batches in (train, held):
        moments: Moments | None = None
        for inputs, wanted in batches:
            device = inputs.device
            moments = moments or Moments(inputs.shape[-1], wanted.shape[-1])
            moments.add(inputs.reshape(-1, inputs.shape[-1]), wanted.reshape(-1, wanted.shape[-1]))
        sums.append(moments or Moments(1, 1))
    decoder = fit(sums[0], sums[1])
    weight, offset = (np.ascontiguousarray(values, np.float32) for values in (decoder.weight, decoder.offset))
    return LinearMap(torch.from_numpy(weight).to(device), torch.from_numpy(offset).to(device))


def in_parts(pairs: Pairs) -> Iterable[tuple[Tensor, Tensor]]:
    """Clean tokens (b, T, d) of each frontend in turn, and their images (b, 3, h, w)."""
    for tokens in pairs.tokens:
        size = images_at_once(tokens)
        for part, images in zip(tokens.split(size), pairs.images.split(size), strict=True):
            yield part.float(), images


class RidgeAttack:
    """Decodes the newest upload; `decode` is also what a trained decoder starts from."""

    def __init__(self, effort: Effort) -> None:
        self._seed = effort.seed

    def fit(self, known: Known) -> None:
        release = known.release
        self._release, self._grid = release, release.layout.grid
        generator = torch.Generator(known.learn.images.device).manual_seed(self._seed)
        self._colour = known.learn.images.mean(dim=(0, 2, 3))
        candidates: list[Callable[[Tensor], Tensor]] = [self._of_mean_colour]
        if len(release.sent):
            self._plain = self._learn(known, generator, self._received_patches, release.sent)
            candidates.append(self._of_received)
        if release.filters:
            self._filtered = self._learn(known, generator, release.restore, None)
            candidates.append(self._of_filtered)
        held = [(release.send(tokens, generator), images) for tokens, images in in_parts(known.held)]
        scores = [
            float(torch.cat([image_psnr_db(images, decode(x).clamp(0, 1)) for x, images in held]).mean())
            for decode in candidates
        ]
        best = int(np.argmax(scores))
        self.held_psnr_db, self.decode = scores[best], candidates[best]

    def reconstruct(self, seen: Seen) -> Tensor:
        received = seen.uploads[-1].received
        return torch.cat([self.decode(part).clamp(0, 1) for part in received.split(images_at_once(received))])

    def _learn(
        self, known: Known, generator: torch.Generator, read: Callable[[Tensor], Tensor], patches: Tensor | None
    ) -> LinearMap:
        def batches(pairs: Pairs) -> Batches:
            for tokens, images in in_parts(pairs):
                wanted = split_patches(images, self._grid)
                yield (
                    read(known.release.send(tokens, generator)),
                    wanted if patches is None else wanted[:, patches],
                )

        return fit_map(batches(known.learn), batches(known.held))

    def _received_patches(self, received: Tensor) -> Tensor:
        return received[:, self._release.layout.prefix :]

    def _of_mean_colour(self, received: Tensor) -> Tensor:
        return self._colour[None, :, None, None].expand(len(received), 3, *self._release.size)

    def _of_received(self, received: Tensor) -> Tensor:
        patches = split_patches(self._of_mean_colour(received), self._grid).clone()
        return self._join(patches.index_copy(1, self._release.sent, self._plain(self._received_patches(received))))

    def _of_filtered(self, received: Tensor) -> Tensor:
        return self._join(self._filtered(self._release.restore(received)))

    def _join(self, patches: Tensor) -> Tensor:
        return join_patches(patches, self._grid, self._release.size)


def planned_steps(asked: int | None, images: int) -> int:
    """None."""
    return 0


def build(effort: Effort) -> RidgeAttack:
    """The attack; it has no steps to take."""
    return RidgeAttack(effort)
