"""Pure rules for putting several devices' replies together: means over nothing are absent, bad values are left out.

Asking the devices is left to the strategies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from contract.messages import Gradient


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float | None:
    """The mean of `values` by `weights`; None when the weights sum to nothing (a void round), never 0 or NaN."""
    total = float(sum(weights))
    if total <= 0.0:
        return None
    return float(sum(value * weight for value, weight in zip(values, weights, strict=True) if weight > 0.0)) / total


def is_usable(reply: Gradient, rows: int, width: int) -> bool:
    """Whether a gradient may move the weights: it has the rows and width that were asked for, and is finite."""
    return (
        reply.gradient.shape == (rows, width)
        and 0 < reply.count <= rows
        and bool(np.isfinite(reply.gradient).all())
        and bool(np.isfinite(reply.mean_loss))
    )
