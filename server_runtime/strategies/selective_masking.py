"""Selective masking: FedAvg of the largest changes alone (EEFT's third baseline).

algorithms.md section 7. u_i = W_i - W; of its values the SHARE that is largest in size counts, the others count as 0:

    W <- W + sum_i n_i masked(u_i) / sum_i n_i

The masking is done here, on whole uploads, which the wire carries: `masked_bytes_up` is what a device would send that
masks by itself (the values, and one bit for each place). Statistics of norms are averaged whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..aggregation import average
from ..own_heads import LABEL_MODES, Answered, OwnHeads, Part, Released
from . import Metric, Settings

__all__ = ["LABEL_MODES", "build"]

SHARE = 0.12  # as the paper's 1.34 M of 11.18 M parameters


def combine(rounds: OwnHeads, answered: Answered) -> Mapping[str, Metric]:
    """The average of what the masks let through, for everybody."""
    trainable = rounds.released.cut.trainable
    w = rounds.part_of(next(iter(answered.parts)))  # the same for all
    masked = [mask(part, w, trainable) for part in answered.parts.values()]
    n = [rounds.members[device].samples for device in answered.parts]
    averaged = average(rounds.released.initial, masked, n)
    for member in rounds.members.values():
        member.part = averaged
    return {"masked_bytes_up": len(masked) * masked_bytes(w, trainable)}


def mask(part: Part, before: Part, trainable: tuple[str, ...]) -> dict[str, np.ndarray]:
    """`before` with the largest changes of the trainable tensors."""
    sizes = np.concatenate([np.abs(part[name] - before[name]).reshape(-1) for name in trainable])
    kept = max(1, round(SHARE * sizes.size))
    least = float(np.partition(sizes, sizes.size - kept)[sizes.size - kept])
    found = {name: array for name, array in part.items() if name not in trainable}
    for name in trainable:
        is_large = np.abs(part[name] - before[name]) >= least
        found[name] = np.where(is_large, part[name], before[name])
    return found


def masked_bytes(part: Part, trainable: tuple[str, ...]) -> int:
    """Of one device's upload: kept values, a bit for each place, and the statistics."""
    places = sum(part[name].size for name in trainable)
    whole = sum(array.nbytes for name, array in part.items() if name not in trainable)
    return 4 * max(1, round(SHARE * places)) + (places + 7) // 8 + whole


def build(released: Released, settings: Settings) -> OwnHeads:
    """A strategy for one site."""
    return OwnHeads(released, settings, combine)
