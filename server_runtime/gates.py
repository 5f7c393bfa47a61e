"""What is let into an average: parts of the model's own tensors, finite, and not moved much further than the others'.

Pure. Who is left out is told with the reason, and the round goes on; what is made of the rest is `aggregation`'s part.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

import numpy as np

Arrays = Mapping[str, np.ndarray]
_SHOWN = 3  # names in a reason
_FEWEST = 3  # parts among which one can be told from the others


def fault_of(part: Arrays, expected: Arrays) -> str | None:
    """Why a part may move no weights: other names, shapes or types than expected, or NaN and infinity; None: it may."""
    faults = [
        f"{what} {', '.join(sorted(names)[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
        for what, names in (
            ("without", expected.keys() - part.keys()),
            ("with the unknown", part.keys() - expected.keys()),
            ("with", _reshaped(part, expected)),
        )
        if names
    ]
    if faults:
        return "; ".join(faults)
    spoiled = sorted(name for name, value in part.items() if not np.isfinite(value).all())
    if spoiled:
        return f"not finite: {', '.join(spoiled[:_SHOWN])}{', ...' if len(spoiled) > _SHOWN else ''}"
    return None


def _reshaped(part: Arrays, expected: Arrays) -> set[str]:
    return {
        f"{name} {part[name].dtype} {part[name].shape} instead of {expected[name].dtype} {expected[name].shape}"
        for name in part.keys() & expected.keys()
        if (part[name].shape, part[name].dtype) != (expected[name].shape, expected[name].dtype)
    }


def move_of(part: Arrays, start: Arrays) -> float:
    """How far a part moved from where it started: the L2 norm of the difference over all its tensors."""
    squares = sum(float(np.square(np.subtract(part[name], start[name], dtype=np.float64)).sum()) for name in part)
    return float(np.sqrt(squares))


def outliers(moves: Mapping[str, float], factor: float) -> dict[str, str]:
    """Devices, with the reason, that moved more than `factor` times as far as the median one; `factor` 0: none.

    Fewer than three cannot be judged, nor can a round in which most did not move.
    """
    middle = median(moves.values()) if len(moves) >= _FEWEST else 0.0
    if not (factor > 0.0 and middle > 0.0):
        return {}
    return {
        device: f"moved {move / middle:.3g} times as far as the median device, more than {factor:g}"
        for device, move in moves.items()
        if move > factor * middle
    }
