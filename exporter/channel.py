"""What happens to tokens between device and backend, in torch: feature noise, wire codes, Wiener filter.

The laws are contract.tokens' and contract.wiener's; here they are applied to batches while the backend is tuned. Noise
is drawn fresh from torch's generator: keyed draws protect real images, these are public ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from contract.tokens import CODE_MAX, SentRule, TokenLayout, kept_patches, noise_scales, sent_places, wire_steps
from contract.wiener import SpatialFilter, release_variance, spatial_filter, wiener_matrices
from exporter.statistics import PublicTokens

EVERYTHING = SentRule()


class WireChannel:
    """The wire at a few noise strengths kappa, with one filter for each, computed once."""

    def __init__(
        self, public: PublicTokens, layout: TokenLayout, kappas: Sequence[float], device: str,
        sent: SentRule = EVERYTHING,
    ) -> None:  # fmt: skip
        self.kappas = tuple(kappas)
        self._prefix = layout.prefix
        self._device = device
        self._places = torch.from_numpy(sent_places(layout, sent.kept)).to(device)
        self._levels = [_Level(public, kappa, layout, sent, device) for kappa in self.kappas]

    def release(self, tokens: Tensor, level: int, generator: torch.Generator) -> Tensor:
        """What the server decodes: of tokens (B, T, d) those that are sent (B, S, d), with Laplace noise of strength
        kappas[level], as int8 codes."""
        strength = self._levels[level]
        chosen = tokens[:, self._places]
        uniform = torch.rand(chosen.shape, generator=generator, device=self._device) - 0.5
        unit = -uniform.sign() * torch.log1p(-2.0 * uniform.abs().clamp(max=0.4999999))  # inverse CDF, b = 1
        noisy = chosen + unit * strength.scales
        codes = torch.round(noisy / strength.steps).clamp(-CODE_MAX, CODE_MAX)
        return codes * strength.steps

    def restore(self, tokens: Tensor, level: int) -> Tensor:
        """The filter's estimate (B, T, d) of all tokens before the noise, from those that are sent (B, S, d)."""
        strength = self._levels[level]
        parts = [tokens[:, : self._prefix], tokens[:, self._prefix :]]
        found = [part @ m.T + o for part, m, o in zip(parts, strength.matrices, strength.offsets, strict=True)]
        if strength.spatial is not None:
            found[1] = strength.spatial.restore(parts[1])
        return torch.cat(found, 1)


class _Level:
    """Constants of one kappa, (S, d) or one per kind of token."""

    def __init__(self, public: PublicTokens, kappa: float, layout: TokenLayout, sent: SentRule, device: str) -> None:
        kept = kept_patches(layout.grid, sent.kept)
        rows = np.r_[np.zeros(layout.prefix, int), np.ones(len(kept), int)]  # statistics row of each token
        scales = noise_scales(public.statistics, kappa, sent.prefix_share)
        steps = wire_steps(public.statistics, kappa, sent.prefix_share)
        self.scales = torch.from_numpy(scales[rows]).to(device)
        self.steps = torch.from_numpy(steps[rows]).to(device)
        variances = (
            release_variance(public.statistics.sigma_prefix, kappa * sent.prefix_share, steps[0]),
            release_variance(public.statistics.sigma_patch, kappa, steps[1]),
        )
        kinds = ((public.mean_prefix, public.covariance_prefix), (public.mean_patch, public.covariance_patch))
        filters = [wiener_matrices(*kind, variance) for kind, variance in zip(kinds, variances, strict=True)]
        self.matrices = [torch.from_numpy(matrix).to(device) for matrix, _ in filters]
        self.offsets = [torch.from_numpy(offset).to(device) for _, offset in filters]
        self.spatial: SpatialFilter | None = None
        if public.spatial is not None:
            found = spatial_filter(public.spatial, public.statistics.sigma_patch, variances[1], kept)
            self.spatial = found.converted(lambda array: torch.from_numpy(array).to(device))
