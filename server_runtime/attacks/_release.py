"""What a server receives of clean tokens: which are kept, Laplace noise, wire codes; and the filter that undoes a part.

The laws are contract.tokens' and contract.wiener's, here in torch for whole sets of images, with noise that an attacker
draws itself. Activations of parts that devices train have no codes: there the strength is the noise's deviation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from contract.tokens import CODE_MAX, SentRule, Statistics, TokenLayout, noise_scales, sent_places, wire_steps
from contract.wiener import (
    SpatialFilter,
    SpatialStatistics,
    group_count,
    positive_sigma,
    release_variance,
    spatial_filter,
)

IMAGES_AT_ONCE = 250
VALUES_AT_ONCE = 1 << 24  # of tokens, where images have many
FILTERED_PATCHES_MAX = 1024  # covariances between more positions than that are not worth their memory
STATISTICS_IMAGES = 2000
STATISTICS_VALUES = 1 << 25


def images_at_once(tokens: Tensor) -> int:
    """How many images of tokens (n, T, d) are gone through at a time."""
    return max(1, min(IMAGES_AT_ONCE, VALUES_AT_ONCE // max(1, tokens[0].numel())))


@dataclass(frozen=True)
class Law:
    """How tokens leave a device, at every strength.

    With `statistics` they are INT8 codes and a strength is kappa; None is float activations, whose noise has the
    strength as its standard deviation in every channel (P3SL: Laplace of scale sigma / sqrt 2).
    """

    layout: TokenLayout
    size: tuple[int, int]  # of the images, (h, w)
    statistics: Statistics | None
    sent: SentRule = SentRule()

    def __post_init__(self) -> None:
        if self.size[0] % self.layout.grid[0] or self.size[1] % self.layout.grid[1]:
            raise ValueError(f"tokens {self.layout.grid} do not divide images of {self.size}")

    def places(self) -> np.ndarray:
        """Where the sent tokens stand among all T (S,)."""
        return sent_places(self.layout, self.sent.kept)

    def rows(self, strength: float) -> tuple[np.ndarray, np.ndarray | None]:
        """Laplace scales and wire steps (2, d) of prefix and patch tokens; no steps where nothing is quantized."""
        if self.statistics is None:
            return np.full((2, self.layout.dim), strength / math.sqrt(2.0), np.float32), None
        share = self.sent.prefix_share
        return noise_scales(self.statistics, strength, share), wire_steps(self.statistics, strength, share)


class Release:
    """One law at one strength, as an attacker can repeat it."""

    def __init__(self, law: Law, strength: float, public: Tensor, variance_share: float = 1.0) -> None:
        """`public` are clean tokens (n, T, d) from which the filter's statistics are taken; the filter expects
        `variance_share` of the noise's variance, which is less than 1 where several uploads were combined."""
        self.law, self.layout, self.size, self.strength = law, law.layout, law.size, strength
        self.public, self._device = public, public.device
        places = law.places()
        self.places = torch.from_numpy(places).to(self._device)
        row = (places >= self.layout.prefix).astype(np.int64)
        scales, steps = law.rows(strength)
        self.scales = self._on(scales[row])  # (S, d)
        self.steps = None if steps is None else self._on(steps[row])
        self.sent = self.places[self.layout.prefix :] - self.layout.prefix  # patches (K,)
        self._mean, self._filter = self._open_filter(scales, steps, variance_share)

    def at(self, strength: float) -> Release:
        """The same law at another strength."""
        return Release(self.law, strength, self.public)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Unit Laplace noise (count, S, d)."""
        return self._laplace((count, len(self.places), self.layout.dim), generator)

    def _laplace(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        uniform = torch.rand(shape, generator=generator, device=self._device) - 0.5
        return -uniform.sign() * torch.log1p(-2.0 * uniform.abs().clamp(max=0.49999997))

    def send(self, tokens: Tensor, generator: torch.Generator, noise: Tensor | None = None) -> Tensor:
        """What the server decodes (n, S, d) of clean tokens (n, T, d); noise is drawn unless it is given."""
        chosen = tokens[:, self.places].float()
        if self.strength:
            noise = self.draw(len(tokens), generator) if noise is None else noise
            chosen = chosen + noise * self.scales
        return self._codes(chosen, self.steps)

    def add_noise(self, tokens: Tensor, generator: torch.Generator) -> Tensor:
        """What the server decodes (n, S', d) of a masked frontend's tokens, all of which are sent."""
        is_patch = torch.arange(tokens.shape[1], device=self._device) >= self.layout.prefix
        rows = is_patch.long() * (len(self.places) - 1)  # every patch has the strength of the last place
        noise = self._laplace((len(tokens), tokens.shape[1], self.layout.dim), generator) * self.scales[rows]
        return self._codes(tokens.float() + noise, None if self.steps is None else self.steps[rows])

    def _codes(self, tokens: Tensor, steps: Tensor | None) -> Tensor:
        return tokens if steps is None else torch.round(tokens / steps).clamp(-CODE_MAX, CODE_MAX) * steps

    def restore(self, received: Tensor) -> Tensor:
        """The best linear estimate (n, N, d) of all patch tokens from public statistics; unsent ones are filled in."""
        patches = received[:, self.layout.prefix :]
        if self._filter is not None:
            restored: Tensor = self._filter.restore(patches)
            return restored
        return self._mean.expand(len(received), -1, -1).clone().index_copy(1, self.sent, patches)

    @property
    def filters(self) -> bool:
        """Whether `restore` knows how positions vary together."""
        return self._filter is not None

    def _on(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(self._device)

    def _open_filter(
        self, scales: np.ndarray, steps: np.ndarray | None, share: float
    ) -> tuple[Tensor, SpatialFilter | None]:
        images = min(STATISTICS_IMAGES, max(2, STATISTICS_VALUES // (self.layout.count * self.layout.dim)))
        patches = self.public[:images, self.layout.prefix :].double()
        mean = patches.mean(dim=0).float()
        if self.layout.patches > FILTERED_PATCHES_MAX or len(patches) < 2:
            return mean, None
        sigma = positive_sigma(patches.reshape(-1, self.layout.dim).std(dim=0, correction=0).cpu().numpy())
        rounding = np.zeros(self.layout.dim) if steps is None else steps[1]
        noise = share * release_variance(scales[1], 1.0, rounding)
        found = spatial_filter(spatial_statistics(patches, sigma), sigma, noise, self.sent.cpu().numpy())
        return mean, found.converted(self._on)


def spatial_statistics(patches: Tensor, sigma: np.ndarray) -> SpatialStatistics:
    """How public patch tokens (n, N, d) vary together over the positions, on components as contract.wiener has them.

    Correlations are shrunk by n / (n + unknowns): few images make chance look like knowledge.
    """
    count, places, dim = patches.shape
    scale = torch.from_numpy(sigma).to(patches.device)
    mean = patches.mean(dim=0)
    centred = (patches - patches.mean(dim=(0, 1))) / scale
    flat = centred.reshape(-1, dim)
    energies, basis = torch.linalg.eigh(flat.T @ flat / len(flat))
    components = ((patches - mean) / scale) @ basis  # (n, N, d)
    values = components.square().mean(dim=(0, 1))
    scaled = components / energies.clamp_min(max(1e-6 * float(energies.max()), 1e-12)).sqrt()
    shares = []
    for group in scaled.split(dim // group_count(dim), dim=2):
        joint = group.transpose(0, 1).reshape(places, -1)
        shared = joint @ joint.T
        energy = float(shared.diagonal().mean())
        shared = shared / energy if energy > 0 else torch.eye(places, dtype=shared.dtype, device=shared.device)
        samples = count * group.shape[2]
        variance = shared.diagonal().clone()
        shared = shared * (samples / (samples + places))
        shared.diagonal().copy_(variance)
        shares.append(shared)
    arrays = [each.cpu().numpy() for each in (mean, basis, values, torch.stack(shares))]
    return SpatialStatistics(*arrays)
