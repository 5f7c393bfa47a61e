"""Noise recipes and what a server receives under them: kept tokens, Laplace noise, wire codes, and the filters.

The laws are contract.tokens' and contract.wiener's, here in torch for whole sets of images. Forms that no device has
are a study's own: patches of two strengths, patches hidden from the frontend, and noise whose shape was learnt.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from contract.tokens import CODE_MAX, Kept, TokenLayout, kept_patches, noise_scales, wire_steps
from contract.wiener import SpatialStatistics, component_variance, positive_sigma, release_variance, wiener_matrices
from exporter.statistics import PositionMoments, PublicTokens, TokenMoments

STATISTICS_IMAGES = 2000


@dataclass(frozen=True)
class Release:
    """What a device sends: patches kept, strengths of patch and prefix noise, and what is unusual about it.

    `kappa_rest` sends the patches that `kept` leaves out as well, under this noise. `hidden` leaves them out before the
    frontend sees the picture. `learnt` allocates the noise to channels by what a trained attacker reads.
    """

    kept: Kept = "all"
    kappa: float = 0.0
    kappa_prefix: float = 0.0
    kappa_rest: float | None = None
    hidden: bool = False
    learnt: bool = False
    prefix_alone: bool = False  # no patch token is sent

    @property
    def name(self) -> str:
        """As tables say it."""
        parts = ["prefix alone" if self.prefix_alone else self.kept]
        parts += ["hidden from the frontend"] if self.hidden else []
        parts += ["learnt noise"] if self.learnt else []
        strength = f"kappa {self.kappa:g}" + ("" if self.kappa_rest is None else f" and {self.kappa_rest:g}")
        return ", ".join([*parts, strength, f"prefix {self.kappa_prefix:g}"])


@dataclass(frozen=True)
class Known:
    """Public statistics of one frontend's tokens, from which noise, wire steps and filters follow."""

    layout: TokenLayout
    public: PublicTokens
    moments: PositionMoments


def know(layout: TokenLayout, tokens: Tensor) -> Known:
    """Of public tokens (n, T, d), which a device's wire does not carry yet."""
    moments = TokenMoments(layout)
    parts = [part.float().cpu().numpy() for part in tokens[:STATISTICS_IMAGES].split(200)]
    for part in parts:
        moments.add(part)
    public = moments.finish()
    positions = PositionMoments(layout, public)
    for part in parts:
        positions.add(part)
    return Known(layout, public, positions)


class Wire:
    """One release's wire and both filters, in torch."""

    def __init__(self, release: Release, known: Known, device: torch.device, shape: Tensor | None = None) -> None:
        """`shape` (d,) multiplies the noise of patch channels (learnt); None is 1 everywhere."""
        self.release, self.layout, self.device = release, known.layout, device
        layout, statistics = known.layout, known.public.statistics
        self._kept = kept_patches(layout.grid, release.kept)
        sent = np.arange(layout.patches) if release.kappa_rest is not None else self._kept
        self.sent = sent[:0] if release.prefix_alone else sent  # patch positions on the wire
        places = np.r_[np.arange(layout.prefix), layout.prefix + self.sent]
        self.places = torch.from_numpy(places).to(device)
        multiple = np.ones(layout.dim) if shape is None else shape.double().cpu().numpy()
        kappas = np.full(len(places), release.kappa)
        kappas[: layout.prefix] = release.kappa_prefix
        if release.kappa_rest is not None:
            kappas[layout.prefix :][~np.isin(sent, self._kept)] = release.kappa_rest
        scales, steps = [], []
        for place, kappa in zip(places, kappas, strict=True):
            row = int(place >= layout.prefix)
            scales.append(noise_scales(statistics, kappa)[row] * (multiple if row else 1.0))
            steps.append(wire_steps(statistics, kappa)[row])
        self.scales = torch.from_numpy(np.stack(scales).astype(np.float32)).to(device)  # (S, d)
        self.steps = torch.from_numpy(np.stack(steps)).to(device)  # (S, d)
        self._open_filters(known, multiple, kappas)

    def _open_filters(self, known: Known, multiple: np.ndarray, kappas: np.ndarray) -> None:
        public, statistics, layout = known.public, known.public.statistics, known.layout
        steps = self.steps.cpu().numpy()
        if layout.prefix:
            noise = release_variance(statistics.sigma_prefix, self.release.kappa_prefix, steps[0])
            matrix, offset = wiener_matrices(public.mean_prefix, public.covariance_prefix, noise)
            self._prefix = (self._on(matrix), self._on(offset))
        spatial = known.moments.finish()
        sigma = positive_sigma(statistics.sigma_patch)
        noise = [
            component_variance(spatial.basis, sigma, release_variance(sigma * multiple, kappa, step))
            for kappa, step in zip(kappas[layout.prefix :], steps[layout.prefix :], strict=True)
        ]
        self._mean, self._sigma = self._on(spatial.mean), self._on(sigma)
        self._basis = self._on(spatial.basis)
        self._sent = torch.from_numpy(self.sent).to(self.device)
        self._matrices = self._on(spatial_matrices(spatial, np.stack(noise, 1), self.sent)) if noise else None

    def _on(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(self.device)

    def send(self, tokens: Tensor) -> Tensor:
        """What the server decodes (B, S, d) of clean tokens (B, T, d); noise is drawn anew at every call."""
        chosen = tokens[:, self.places].float()
        uniform = torch.rand(chosen.shape, device=chosen.device) - 0.5
        unit = -uniform.sign() * torch.log1p(-2.0 * uniform.abs().clamp(max=0.4999999))
        return torch.round((chosen + unit * self.scales) / self.steps).clamp(-CODE_MAX, CODE_MAX) * self.steps

    def restore(self, received: Tensor) -> Tensor:
        """The filters' estimate (B, T, d) of all tokens."""
        prefix = self.layout.prefix
        if self._matrices is None:
            patches = self._mean.expand(len(received), -1, -1)
        else:
            components = ((received[:, prefix:] - self._mean[self._sent]) / self._sigma) @ self._basis  # (B, K, d)
            found = torch.einsum("cnk,bkc->bnc", self._matrices, components)
            patches = self._mean + (found @ self._basis.T) * self._sigma
        if not prefix:
            return patches
        matrix, offset = self._prefix
        return torch.cat([received[:, :prefix] @ matrix.T + offset, patches], dim=1)


def spatial_matrices(statistics: SpatialStatistics, noise: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """contract.wiener.spatial_filter where positions differ in noise (d, K): per component S[:, kept] (S[kept, kept] +
    noise)^-1, all of them (d, N, K)."""
    matrices = np.empty((len(statistics.values), statistics.positions.shape[1], len(kept)), np.float32)
    members = np.split(np.arange(len(statistics.values)), len(statistics.positions))
    for shared, group in zip(statistics.positions, members, strict=True):
        across = np.maximum(statistics.values[group], 0.0)[:, None, None] * shared[:, kept]  # (m, N, K)
        inside = across[:, kept] + np.maximum(noise[group], 1e-6)[:, :, None] * np.eye(len(kept))
        matrices[group] = np.linalg.solve(inside, across.swapaxes(1, 2)).swapaxes(1, 2)
    return matrices
