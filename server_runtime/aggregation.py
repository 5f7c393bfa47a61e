"""Pure rules for putting several devices' replies together: means over nothing are absent, bad values are left out.

Asking the devices is left to the strategies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from contract.errors import TrainingError
from contract.messages import Gradient

Arrays = Mapping[str, np.ndarray]
_SHOWN = 3  # names in an error's text


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


def is_finite(part: Arrays) -> bool:
    """Whether no value of a part is NaN or infinite."""
    return all(bool(np.isfinite(value).all()) for value in part.values())


def check_part(device: str, part: Arrays, expected: Arrays) -> None:
    """Hold a device's part against the model's: the same names, each of the same shape.

    Raises:
        TrainingError: naming the device and the tensors.
    """
    missing, unknown = expected.keys() - part.keys(), part.keys() - expected.keys()
    reshaped = {
        f"{name} {part[name].shape} instead of {expected[name].shape}"
        for name in part.keys() & expected.keys()
        if part[name].shape != expected[name].shape
    }
    faults = [
        f"{what} {', '.join(sorted(names)[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
        for what, names in (("without", missing), ("with the unknown", unknown), ("with", reshaped))
        if names
    ]
    if faults:
        raise TrainingError(
            f"{device}: update.tensors: expected the {len(expected)} tensors of its client part, "
            f"found it {'; '.join(faults)}",
            "install this run's package on the device and update its software",
        )


def average(whole: Arrays, parts: Sequence[Arrays], weights: Sequence[float]) -> dict[str, np.ndarray]:
    """sum_i n_i (W_ci (+) W) / sum_i n_i (P3SL Eq. 1, by weight): a tensor that a part lacks counts as W's.

    Only tensors of some part are in the result: the others stay what they are. Summed in float64, so that equal parts
    give that part, bit for bit; types are W's. Weights are positive.
    """
    total = float(sum(weights))
    averaged = {}
    for name in sorted({name for part in parts for name in part}):
        summed = np.zeros(whole[name].shape)
        for part, weight in zip(parts, weights, strict=True):
            summed += np.multiply(part.get(name, whole[name]), float(weight) / total, dtype=np.float64)
        averaged[name] = summed.astype(whole[name].dtype)
    return averaged
