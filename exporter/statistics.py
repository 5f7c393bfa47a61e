"""Public statistics of the tokens at the cut, accumulated batch by batch: what noise, wire steps and filter rest on.

Running the frontend is left to the caller; the noise and filter laws are contract's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from contract.errors import ExportError, UsageError
from contract.tokens import Kept, Statistics, TokenLayout
from contract.wiener import SpatialStatistics, group_count, positive_sigma

SPATIAL_PATCHES_MAX = 1024  # covariances between positions take up to 4 bytes * d / 32 * N^2

Doubles = NDArray[np.float64]


def check_sent(layout: TokenLayout, kept: Kept) -> None:
    """Whether patches may be left out at this cut. Raises: UsageError where nothing could fill them in."""
    if kept == "none" and not layout.prefix:
        raise UsageError(
            "--sent-patches none sends the class token alone, and this model has none at the cut", "send some patches"
        )
    if kept != "all" and layout.patches > SPATIAL_PATCHES_MAX:
        raise UsageError(
            f"--sent-patches {kept} needs patches few enough to be filled in from each other, at most "
            f"{SPATIAL_PATCHES_MAX}, found {layout.patches}",
            "use --sent-patches all, or another --split",
        )


@dataclass(frozen=True)
class PublicTokens:
    """Means (d,) and covariances (d, d) of the INT8 tokens before noise, prefix and patch tokens apart.

    Without prefix tokens their row is zero.
    """

    statistics: Statistics
    mean_prefix: Doubles
    mean_patch: Doubles
    covariance_prefix: Doubles
    covariance_patch: Doubles
    spatial: SpatialStatistics | None = None  # None: too many patches for covariances between them

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """As stored in statistics.safetensors."""
        names = ("mean_prefix", "mean_patch", "covariance_prefix", "covariance_patch")
        found = {name: getattr(self, name) for name in names}
        if self.spatial is not None:
            found |= {"mean_positions" if name == "mean" else name: each for name, each in vars(self.spatial).items()}
        return {name: np.ascontiguousarray(each, np.float32) for name, each in found.items()}


def measure_tokens(layout: TokenLayout, batches: Callable[[], Iterable[NDArray[np.floating]]]) -> PublicTokens:
    """Statistics of all tokens (B, T, d) in the batches, which are gone through twice: channels, then positions.

    Raises ExportError when a token is not finite.
    """
    moments = TokenMoments(layout)
    for batch in batches():
        moments.add(batch.astype(np.float32))
    public = moments.finish()
    if layout.patches > SPATIAL_PATCHES_MAX:
        return public
    positions = PositionMoments(layout, public)
    for batch in batches():
        positions.add(batch)
    return replace(public, spatial=positions.finish())


class TokenMoments:
    """Count, sum, sum of outer products and largest magnitude so far; memory is 2 d^2 whatever the number of tokens."""

    def __init__(self, layout: TokenLayout) -> None:
        self._layout = layout
        self._prefix = _Moments(layout.dim)
        self._patch = _Moments(layout.dim)

    def add(self, tokens: NDArray[np.float32]) -> None:
        """Tokens (B, T, d) of more images. Raises ExportError when one is not finite."""
        if not np.isfinite(tokens).all():
            raise ExportError("the frontend's tokens should be finite, found NaN or infinity", "check the weights file")
        self._prefix.add(tokens[:, : self._layout.prefix].reshape(-1, self._layout.dim))
        self._patch.add(tokens[:, self._layout.prefix :].reshape(-1, self._layout.dim))

    def finish(self) -> PublicTokens:
        """Statistics of everything added."""
        prefix_mean, prefix_covariance = self._prefix.finish()
        patch_mean, patch_covariance = self._patch.finish()
        statistics = Statistics(
            sigma_prefix=_floats(np.sqrt(np.diag(prefix_covariance))),
            sigma_patch=_floats(np.sqrt(np.diag(patch_covariance))),
            absmax_prefix=_floats(self._prefix.absmax),
            absmax_patch=_floats(self._patch.absmax),
        )
        return PublicTokens(statistics, prefix_mean, patch_mean, prefix_covariance, patch_covariance)


class _Moments:
    def __init__(self, dim: int) -> None:
        self.count = 0
        self.total = np.zeros(dim)
        self.outer = np.zeros((dim, dim))
        self.absmax = np.zeros(dim)

    def add(self, rows: NDArray[np.float32]) -> None:
        if not len(rows):
            return
        exact = rows.astype(np.float64)
        self.count += len(rows)
        self.total += exact.sum(axis=0)
        self.outer += exact.T @ exact
        self.absmax = np.maximum(self.absmax, np.abs(exact).max(axis=0))

    def finish(self) -> tuple[Doubles, Doubles]:
        """Mean, and covariance whose off-diagonal is shrunk by n / (n + d).

        Fewer rows than channels give a singular matrix full of chance correlations, which a filter would take for
        knowledge; the variances themselves are kept.
        """
        if not self.count:
            return self.total, self.outer
        mean = self.total / self.count
        covariance = self.outer / self.count - np.outer(mean, mean)
        variance = np.maximum(np.diag(covariance), 0.0)
        covariance *= self.count / (self.count + len(mean))
        np.fill_diagonal(covariance, variance)
        return mean, covariance


def _floats(values: Doubles) -> tuple[float, ...]:
    """As the manifest states them: float32 values, so that every machine computes with the same numbers."""
    return tuple(float(each) for each in values.astype(np.float32))


class PositionMoments:
    """How components of patch tokens vary together over the positions, accumulated like `TokenMoments`.

    Components are those of contract.wiener.SpatialStatistics: channels over their standard deviation, turned so that
    they are uncorrelated. Memory is groups * N^2 + N d.
    """

    def __init__(self, layout: TokenLayout, public: PublicTokens) -> None:
        self._layout, self._mean = layout, public.mean_patch
        self._sigma = positive_sigma(public.statistics.sigma_patch)
        self._energies, vectors = np.linalg.eigh(public.covariance_patch / np.outer(self._sigma, self._sigma))
        self._basis = vectors
        self._turn = (vectors / self._sigma[:, None]).astype(np.float32)  # (d, d)
        self._groups = np.split(np.arange(layout.dim), group_count(layout.dim))
        self._floor = max(1e-6 * float(self._energies.max(initial=0.0)), 1e-12)
        self.count = 0
        self._sum = np.zeros((layout.patches, layout.dim))
        self._square = np.zeros((layout.patches, layout.dim))
        self._products = np.zeros((len(self._groups), layout.patches, layout.patches))

    def add(self, tokens: NDArray[np.floating]) -> None:
        """Tokens (B, T, d) of more images, finite."""
        patches = tokens[:, self._layout.prefix :].astype(np.float32) - self._mean.astype(np.float32)
        components = patches @ self._turn  # (B, N, d)
        self.count += len(components)
        self._sum += components.sum(axis=0)
        self._square += np.square(components).sum(axis=0)
        scaled = components / np.sqrt(self._weights).astype(np.float32)
        for group, members in enumerate(self._groups):
            part = np.ascontiguousarray(scaled[:, :, members].transpose(1, 0, 2)).reshape(self._layout.patches, -1)
            self._products[group] += part @ part.T

    def finish(self) -> SpatialStatistics:
        """Statistics of everything added, at least one image. Correlations are shrunk as covariances are elsewhere."""
        mean = self._sum / self.count  # (N, d)
        values = np.maximum((self._square / self.count - np.square(mean)).mean(axis=0), 0.0)
        positions = np.empty_like(self._products)
        patches = self._layout.patches
        for group, members in enumerate(self._groups):
            centre = mean[:, members] / np.sqrt(self._weights[members])
            shared = self._products[group] / self.count - centre @ centre.T
            energy = float(np.trace(shared)) / patches
            shared = shared / energy if energy > 0 else np.eye(patches)
            samples = self.count * len(members)
            variance = np.diag(shared).copy()
            shared *= samples / (samples + patches)
            np.fill_diagonal(shared, variance)
            positions[group] = shared
        tokens_mean = self._mean + (mean @ self._basis.T) * self._sigma
        return SpatialStatistics(tokens_mean, self._basis, values, positions)

    @property
    def _weights(self) -> Doubles:
        return np.maximum(self._energies, self._floor)
