"""What happens to tokens between device and backend, in torch: feature noise, wire codes, Wiener filter.

The laws are contract.tokens' and contract.wiener's; here they are applied to batches while the backend is tuned. Noise
is drawn fresh from torch's generator: keyed draws protect real images, these are public ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from contract.tokens import CODE_MAX, TokenLayout, noise_scales, wire_steps
from contract.wiener import release_variance, wiener_matrices
from exporter.statistics import PublicTokens


class WireChannel:
    """The wire at a few noise strengths kappa, with one filter for each, computed once."""

    def __init__(self, public: PublicTokens, layout: TokenLayout, kappas: Sequence[float], device: str) -> None:
        self.kappas = tuple(kappas)
        self._prefix = layout.prefix
        self._device = device
        self._levels = [_Level(public, kappa, layout, device) for kappa in self.kappas]

    def release(self, tokens: Tensor, level: int, generator: torch.Generator) -> Tensor:
        """What the server decodes: tokens (B, T, d) with Laplace noise of strength kappas[level], as int8 codes."""
        strength = self._levels[level]
        uniform = torch.rand(tokens.shape, generator=generator, device=self._device) - 0.5
        unit = -uniform.sign() * torch.log1p(-2.0 * uniform.abs().clamp(max=0.4999999))  # inverse CDF, b = 1
        noisy = tokens + unit * strength.scales
        codes = torch.round(noisy / strength.steps).clamp(-CODE_MAX, CODE_MAX)
        return codes * strength.steps

    def restore(self, tokens: Tensor, level: int) -> Tensor:
        """The filter's estimate (B, T, d) of the tokens before the noise."""
        strength = self._levels[level]
        parts = (tokens[:, : self._prefix], tokens[:, self._prefix :])
        return torch.cat(
            [part @ m.T + o for part, m, o in zip(parts, strength.matrices, strength.offsets, strict=True)], 1
        )


class _Level:
    """Constants of one kappa, (T, d) or one per kind of token."""

    def __init__(self, public: PublicTokens, kappa: float, layout: TokenLayout, device: str) -> None:
        rows = np.r_[np.zeros(layout.prefix, int), np.ones(layout.patches, int)]  # statistics row of each token
        scales, steps = noise_scales(public.statistics, kappa), wire_steps(public.statistics, kappa)
        self.scales = torch.from_numpy(scales[rows]).to(device)
        self.steps = torch.from_numpy(steps[rows]).to(device)
        kinds = (
            (public.mean_prefix, public.covariance_prefix, public.statistics.sigma_prefix),
            (public.mean_patch, public.covariance_patch, public.statistics.sigma_patch),
        )
        filters = [
            wiener_matrices(mean, covariance, release_variance(sigma, kappa, steps[row]))
            for row, (mean, covariance, sigma) in enumerate(kinds)
        ]
        self.matrices = [torch.from_numpy(matrix).to(device) for matrix, _ in filters]
        self.offsets = [torch.from_numpy(offset).to(device) for _, offset in filters]
