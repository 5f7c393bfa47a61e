"""The Wiener filter in front of the backend: the best linear estimate of a token under the known noise law.

Pure numpy, computed from public statistics only; who applies it, and to which tokens, is left to the server's
training and to the exporter's tuning, which must use the same law.
"""

from __future__ import annotations

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
