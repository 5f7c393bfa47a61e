"""Which devices' modules are averaged for whom: distances of utilisation factors, and the threshold of nearness.

Pure (algorithms.md 2.1, 2.2). Neighbourhood is each device's own and not transitive: a near b, b near c, a far from c.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from contract.errors import ConfigError

AUTOMATIC = "auto"
CLOSE = 0.05  # of logits: distances that are all below are no difference
REACH = 2.0  # times what half the devices have to their nearest: no gap is looked for within it
CLEAR = 1.6  # a gap counts where its upper end is so many times its lower one


def read_threshold(text: str) -> float | None:
    """tau, None where it is to be found from the distances.

    Raises:
        ConfigError: it is neither a distance nor "auto".
    """
    if text == AUTOMATIC:
        return None
    try:
        tau = float(text)
    except ValueError:
        tau = -1.0
    if not tau >= 0:
        raise ConfigError(
            f"threshold must be {AUTOMATIC}, or a distance of 0 or more; found {text!r}",
            "correct --threshold: 0 averages nobody, inf everybody",
        )
    return tau


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """alpha in (0, 1), float64."""
    return 1.0 / (1.0 + np.exp(-logits.astype(np.float64)))


def distances(alphas: Sequence[np.ndarray]) -> np.ndarray:
    """d(i, j) = ||alpha_i - alpha_j||_2 of N vectors (L,) of values in (0, 1): (N, N) float64."""
    stacked = np.stack(alphas)
    found: np.ndarray = np.linalg.norm(stacked[:, None] - stacked[None], axis=-1)
    return found


def close_of(start: np.ndarray) -> float:
    """What CLOSE is among values in (0, 1) of factors whose logits began at `start` (L,).

    At -3 a logit's change of 0.05 moves a factor by 0.0023, and short training moves none by 0.05.
    """
    alpha = sigmoid(start)
    return CLOSE * float((alpha * (1.0 - alpha)).mean())


def find_threshold(found: np.ndarray, close: float) -> float:
    """tau from distances (N, N): the lower end of their first clear gap.

    Not of the largest: where one task drifts far away, the largest gap parts it from all others, and puts together
    tasks that had been told apart. Where no gap is clear: everybody together if all are below `close`, else only who
    is nearer than mean - deviation.
    """
    pairs = np.sort(found[np.triu_indices(len(found), 1)])
    if len(pairs) == 0 or pairs[-1] == pairs[0]:
        return float("inf") if len(pairs) == 0 or pairs[-1] < close else 0.0
    nearest = np.where(np.eye(len(found), dtype=bool), np.inf, found).min(axis=1)
    reach = REACH * float(np.median(nearest))
    ends = np.array([reach, *pairs[pairs > reach]])
    ratios = ends[1:] / np.maximum(ends[:-1], np.finfo(float).tiny)
    clear = np.flatnonzero(ratios >= CLEAR)
    if len(clear):
        return float(ends[clear[0]])
    return float("inf") if pairs[-1] < close else max(0.0, float(pairs.mean() - pairs.std()))


def neighbours(found: np.ndarray, tau: float) -> np.ndarray:
    """(N, N) bool: row i says whose modules are averaged for device i, itself always included."""
    return (found <= tau) | np.eye(len(found), dtype=bool)


def groups(near: np.ndarray) -> list[int]:
    """Number of each device's group, where neighbours of neighbours belong together; for reports."""
    known = [-1] * len(near)
    for first in range(len(near)):
        if known[first] >= 0:
            continue
        number, waiting = max(known) + 1, [first]
        while waiting:
            here = waiting.pop()
            if known[here] < 0:
                known[here] = number
                waiting.extend(int(other) for other in np.flatnonzero(near[here]))
    return known
