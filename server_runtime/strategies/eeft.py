"""EEFT: federated tuning of light modules around a frozen model; who is averaged with whom follows from how the modules
use it.

algorithms.md section 2. Symbols: alpha_i in (0,1)^L device i's utilisation factors, M_i its modules (skips with the
statistics of their norms, alpha, beta), d(i,j) = ||alpha_i - alpha_j||_2, tau the threshold:

    M_i <- mean of M_j over all j with d(i,j) <= tau, i itself included

Decided here: all devices start at one alpha, so in its first rounds (`alone`) a device is averaged with nobody, nor
counted for others; with one that joins late these rounds begin when it comes. Heads never travel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from ..aggregation import average
from ..own_heads import LABEL_MODES, Answered, OwnHeads, Part, Released
from ..similarity import close_of, distances, find_threshold, groups, neighbours, read_threshold, sigmoid
from . import Metric, Settings

__all__ = ["LABEL_MODES", "build"]


def combine(rounds: OwnHeads, answered: Answered) -> Mapping[str, Metric]:
    """The selective average; the line tells alpha of all devices, tau and the groups that it makes."""
    for device, modules in answered.parts.items():
        rounds.members[device].part = modules
    alphas = {device: sigmoid(modules["alpha"]) for device, modules in answered.parts.items()}
    told = json.dumps({device: [round(float(each), 6) for each in alpha] for device, alpha in alphas.items()})
    ready = [device for device in answered.parts if rounds.members[device].rounds > rounds.settings.alone]
    if not ready:
        return {"alpha": told, "threshold": None, "groups": None}
    d = distances([alphas[device] for device in ready])  # (N, N)
    fixed = read_threshold(rounds.settings.threshold)
    tau = find_threshold(d, close_of(rounds.released.initial["alpha"])) if fixed is None else fixed
    near = neighbours(d, tau)
    averaged: dict[bytes, Part] = {}  # by row: devices with the same neighbours get the same
    for row, device in zip(near, ready, strict=True):
        chosen = [answered.parts[other] for other, is_near in zip(ready, row, strict=True) if is_near]
        key = row.tobytes()
        averaged[key] = averaged.get(key) or average(rounds.released.initial, chosen, [1.0] * len(chosen))
        rounds.members[device].part = averaged[key]
    numbers = dict(zip(ready, groups(near), strict=True))
    return {"alpha": told, "threshold": tau if np.isfinite(tau) else None, "groups": json.dumps(numbers)}


def build(released: Released, settings: Settings) -> OwnHeads:
    """A strategy for one site."""
    read_threshold(settings.threshold)
    return OwnHeads(released, settings, combine)
