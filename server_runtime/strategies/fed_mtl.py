"""FedMTL as EEFT compares itself to it: every device gets its own weighted mean of all devices' models.

algorithms.md section 7 defines what the paper does not: the weights are a softmax over how alike the updates are. With
u_i = W_i - (what i was given), c(i,j) the cosine of u_i and u_j, T the temperature:

    W_i <- sum_j w_ij W_j,   w_i = softmax_j(c(i,j) / T)
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..own_heads import LABEL_MODES, Answered, OwnHeads, Part, Released
from . import Metric, Settings

__all__ = ["LABEL_MODES", "build"]

TEMPERATURE = 0.1  # T; cosines of updates to one task are some tenths above those to two


def combine(rounds: OwnHeads, answered: Answered) -> Mapping[str, Metric]:
    """Each device's own mean."""
    devices = list(answered.parts)
    w = weights(np.stack([_update(answered.parts[device], rounds.part_of(device)) for device in devices]))  # (N, N)
    mixed: list[dict[str, np.ndarray]] = [{} for _ in devices]
    for name, value in rounds.released.initial.items():
        stacked = np.stack([answered.parts[device][name].reshape(-1) for device in devices])  # (N, size)
        for part, row in zip(mixed, w @ stacked, strict=True):
            part[name] = row.reshape(value.shape).astype(np.float32)
    for device, part in zip(devices, mixed, strict=True):
        rounds.members[device].part = part
    return {"own_weight": float(w.diagonal().mean())}


def weights(updates: np.ndarray) -> np.ndarray:
    """Of updates (N, P): (N, N) float32, rows sum to 1. An update of nothing is like no other."""
    products = (updates @ updates.T).astype(np.float64)
    norms = np.sqrt(np.maximum(products.diagonal(), 1e-24))
    cosines = products / np.outer(norms, norms)
    powers = np.exp((cosines - cosines.max(axis=1, keepdims=True)) / TEMPERATURE)
    found: np.ndarray = (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)
    return found


def _update(part: Part, before: Part) -> np.ndarray:
    """u_i as one vector."""
    return np.concatenate([(part[name] - before[name]).reshape(-1) for name in sorted(part)])


def build(released: Released, settings: Settings) -> OwnHeads:
    """A strategy for one site."""
    return OwnHeads(released, settings, combine)
