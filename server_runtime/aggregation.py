"""Pure rules for putting several devices' replies together: means over nothing are absent.

Asking the devices is left to the strategies, who is left out to `gates`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from contract.messages import Gradient

Arrays = Mapping[str, np.ndarray]
RULES = ("mean", "trimmed", "median")
TRIMMED = 0.2  # of the values, at each end


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


def average(
    whole: Arrays, parts: Sequence[Arrays], weights: Sequence[float], rule: str = "mean"
) -> dict[str, np.ndarray]:
    """One part of several, by a rule of `RULES`; a tensor that a part lacks counts as W's (P3SL Eq. 1).

    "mean" is sum_i n_i (W_ci (+) W) / sum_i n_i, by weight, summed in float64, so that equal parts give that part, bit
    for bit. The robust rules leave weights out, as a device that lies about its work lies about its images too:
    "trimmed" drops a fifth of the values at each end, coordinate by coordinate (one at least, where three or more are
    there), and takes the mean of the others; "median" takes the median (Yin et al. 2018).
    Only tensors of some part are in the result: the others stay what they are. Types are W's. Weights are positive.
    """
    names = sorted({name for part in parts for name in part})
    if rule == "mean":
        return {name: _mean(whole[name], [part.get(name) for part in parts], weights) for name in names}
    robust = {"trimmed": _trimmed_mean, "median": lambda values: np.median(values, axis=0)}[rule]
    return {
        name: robust(np.stack([part.get(name, whole[name]) for part in parts]).astype(np.float64)).astype(
            whole[name].dtype
        )
        for name in names
    }


def _mean(own: np.ndarray, values: Sequence[np.ndarray | None], weights: Sequence[float]) -> np.ndarray:
    total, summed = float(sum(weights)), np.zeros(own.shape)
    for value, weight in zip(values, weights, strict=True):
        summed += np.multiply(own if value is None else value, float(weight) / total, dtype=np.float64)
    return summed.astype(own.dtype)


def _trimmed_mean(values: np.ndarray) -> np.ndarray:
    """(devices, ...) -> (...)."""
    count = len(values)
    dropped = max(1, int(TRIMMED * count)) if count >= 3 else 0
    kept = np.sort(values, axis=0)[dropped : count - dropped]
    return np.asarray(kept.mean(axis=0))
