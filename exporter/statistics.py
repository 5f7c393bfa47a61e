"""Public statistics of the tokens at the cut, accumulated batch by batch: what noise, wire steps and filter rest on.

Running the frontend is left to the caller; the noise and filter laws are contract's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contract.errors import ExportError
from contract.tokens import Statistics, TokenLayout

Doubles = NDArray[np.float64]


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

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """As stored in statistics.safetensors."""
        names = ("mean_prefix", "mean_patch", "covariance_prefix", "covariance_patch")
        return {name: getattr(self, name).astype(np.float32) for name in names}


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
