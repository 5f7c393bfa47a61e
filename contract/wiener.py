"""The Wiener filter in front of the backend: the best linear estimate of a token under the known noise law.

Pure numpy, computed from public statistics only; who applies it, and to which tokens, is left to the server's
training and to the exporter's tuning, which must use the same law.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def release_variance(sigma: ArrayLike, kappa: float, steps: ArrayLike) -> NDArray[np.float64]:
    """Variance (d,) that the wire adds per channel: Laplace of scale kappa * sigma, and rounding to `steps`.

    Var Laplace(b) = 2 b^2; rounding to a step q adds q^2 / 12 (uniform error).
    """
    scale = kappa * np.asarray(sigma, dtype=np.float64)
    return 2.0 * scale**2 + np.asarray(steps, dtype=np.float64) ** 2 / 12.0


def wiener_matrices(
    mean: ArrayLike, covariance: ArrayLike, noise_variance: ArrayLike
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Affine map of x_hat = mean + S (S + N)^-1 (z - mean) for z = x + noise (noise.md, W-tok).

    mean (d,), covariance (d, d), noise_variance (d,), in the tokens' unit. Returns `matrix` (d, d) float32 and
    `offset` (d,) float32 with x_hat = z @ matrix.T + offset.

    Computed in float64 on channels whitened by the noise, so that S + N becomes R + I, whose eigenvalues are at
    least 1: a singular S, channels that never vary and channels thousands of times larger than others are safe.
    Without noise the map is the identity wherever S has energy.

    Raises ValueError when a shape does not fit or a value is not finite.
    """
    mu = np.asarray(mean, dtype=np.float64)
    signal = np.asarray(covariance, dtype=np.float64)
    noise = np.asarray(noise_variance, dtype=np.float64)
    if mu.ndim != 1 or signal.shape != (mu.size, mu.size) or noise.shape != mu.shape:
        raise ValueError(
            f"expected mean (d,), covariance (d, d), noise (d,); found {mu.shape}, {signal.shape}, {noise.shape}"
        )
    if not (np.isfinite(mu).all() and np.isfinite(signal).all() and np.isfinite(noise).all()) or (noise < 0).any():
        raise ValueError("the Wiener filter needs finite statistics and a noise variance of at least 0")
    root = np.sqrt(np.maximum(noise, _noise_floor(signal)))
    whitened = (signal + signal.T) / 2.0 / np.outer(root, root)
    values, vectors = np.linalg.eigh(whitened)
    values = np.maximum(values, 0.0)  # rounding can leave tiny negative eigenvalues of a semidefinite matrix
    gain = values / (values + 1.0)
    matrix = (root[:, None] * vectors * gain) @ (vectors.T / root[None, :])
    offset = mu - matrix @ mu
    return matrix.astype(np.float32), offset.astype(np.float32)


def _noise_floor(signal: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least noise variance (d,) assumed: a millionth of a channel's own variance, and never zero."""
    variance = np.maximum(np.diag(signal), 0.0)
    top = float(variance.max(initial=0.0))
    return np.maximum(1e-6 * variance, max(1e-12 * top, float(np.finfo(np.float32).tiny)))


_COMPONENT_FLOOR = 1e-6  # least noise of a component, whose own variance is about 1 on average
_GROUP_COMPONENTS = 32  # most components that share one covariance over the positions (noise.md)


@dataclass(frozen=True)
class SpatialStatistics:
    """What public patch tokens are like across positions: N patches, d channels, G groups of d / G components each.

    Tokens minus `mean` (N, d), divided by sigma (d,) and turned by `basis` (d, d) are components that are nearly
    uncorrelated; component c varies by `values` (d,) and, over the positions, like all of its group: `positions`
    (G, N, N) are covariances with a mean diagonal of 1.
    """

    mean: NDArray[np.floating]
    basis: NDArray[np.floating]
    values: NDArray[np.floating]
    positions: NDArray[np.floating]


@dataclass(frozen=True)
class SpatialFilter:
    """The best linear estimate of all N patch tokens from the K that were sent; arrays of numpy or of torch alike."""

    mean: Any  # (N, d)
    mean_sent: Any  # (K, d)
    sigma: Any  # (d,)
    basis: Any  # (d, d)
    turn: Any  # (G, K, K)
    gains: Any  # (G, K, d / G)
    spread: Any  # (G, N, K)

    def restore(self, received: Any) -> Any:
        """Noisy tokens (B, K, d) -> estimates (B, N, d)."""
        groups, sent, members = self.gains.shape
        images = received.shape[0]
        components = ((received - self.mean_sent) / self.sigma) @ self.basis
        grouped = components.reshape(images, sent, groups, members).swapaxes(1, 2)  # (B, G, K, m)
        found = self.spread @ ((self.turn @ grouped) * self.gains)  # (B, G, N, m)
        together = found.swapaxes(1, 2).reshape(images, *self.mean.shape)
        return self.mean + (together @ self.basis.T) * self.sigma

    def converted(self, convert: Callable[[Any], Any]) -> SpatialFilter:
        """The same with every array converted."""
        return SpatialFilter(**{name: convert(value) for name, value in vars(self).items()})


def spatial_filter(
    statistics: SpatialStatistics, sigma: ArrayLike, noise_variance: ArrayLike, kept: NDArray[np.int64]
) -> SpatialFilter:
    """The filter for noise of `noise_variance` (d,) per channel on the patches `kept` (K,), in float32 numpy arrays.

    Per component x_hat = S[:, kept] (S[kept, kept] + n)^-1 y with S = value * positions: neighbours help each other,
    and positions that are not sent are filled in. `sigma` (d,) is the one that the statistics were taken with.

    Raises ValueError when a shape does not fit or a value is not finite.
    """
    deviation = positive_sigma(sigma)
    mean, basis, positions = (np.asarray(each, np.float64) for each in (statistics.mean, statistics.basis,
                                                                        statistics.positions))  # fmt: skip
    values = np.maximum(np.asarray(statistics.values, np.float64), 0.0)
    patches, dim = mean.shape
    if positions.shape[1:] != (patches, patches) or dim % len(positions) or not len(basis) == len(values) == dim:
        raise ValueError(f"spatial statistics do not fit each other: {mean.shape}, {basis.shape}, {positions.shape}")
    if not all(np.isfinite(each).all() for each in (mean, basis, values, positions)):
        raise ValueError("the Wiener filter needs finite statistics")
    variance = component_variance(basis, deviation, noise_variance).reshape(len(positions), 1, -1)  # (G, 1, m)
    energies, vectors = np.linalg.eigh(positions[:, kept][:, :, kept])  # (G, K), (G, K, K)
    scale = values.reshape(len(positions), 1, -1)
    gains = scale / (scale * np.maximum(energies, 0.0)[:, :, None] + np.maximum(variance, _COMPONENT_FLOOR))
    arrays = SpatialFilter(
        mean, mean[kept], deviation, basis, vectors.swapaxes(1, 2), gains, positions[:, :, kept] @ vectors
    )
    return arrays.converted(lambda array: np.ascontiguousarray(array, np.float32))


def positive_sigma(sigma: ArrayLike) -> NDArray[np.float64]:
    """Standard deviations (d,) to divide by: a channel that never varies counts as 1."""
    values = np.asarray(sigma, np.float64)
    return np.where(values > 0.0, values, 1.0)


def component_variance(basis: NDArray[np.floating], sigma: ArrayLike, variance: ArrayLike) -> NDArray[np.float64]:
    """Variance (d,) per component of `SpatialStatistics` of noise with `variance` (d,) per channel."""
    channels = np.asarray(variance, np.float64) / np.square(positive_sigma(sigma))
    turned: NDArray[np.float64] = np.square(np.asarray(basis, np.float64)).T @ channels
    return turned


def group_count(components: int) -> int:
    """G: as few groups of equal size as there can be with at most 32 components in each."""
    return components // max(size for size in range(1, _GROUP_COMPONENTS + 1) if components % size == 0)
