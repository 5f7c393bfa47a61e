"""The gradient at the cut on the wire: float32, float16, or int8 with one scale per sample and error feedback.

What int8 rounds off is carried over and added to the next gradient of the same device, shared out evenly over its rows:
summed over all batches, what was received differs from what was meant by the last batch's residue only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from contract.training import Precision

Floats: TypeAlias = NDArray[np.float32]
CODE_MAX = 127
FLOAT16_MAX = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class WireGradient:
    """Values (B, n) float32, float16 or int8; scales (B,) float32 with int8 only: value = code * scale."""

    values: NDArray[Any]
    scales: Floats | None


def write_gradient(
    gradient: Floats, precision: Precision, residue: Floats | None = None
) -> tuple[WireGradient, Floats | None]:
    """A gradient (B, n) as it travels, and the residue (n,) to hand in with the device's next one.

    Float16 saturates at its largest value instead of becoming infinite.
    """
    if precision == "float32":
        return WireGradient(gradient.astype(np.float32, copy=False), None), None
    if precision == "float16":
        return WireGradient(np.clip(gradient, -FLOAT16_MAX, FLOAT16_MAX).astype(np.float16), None), None
    meant = gradient if residue is None else gradient + residue / np.float32(len(gradient))
    scales = np.abs(meant).max(axis=1) / np.float32(CODE_MAX)
    steps = np.where(scales > 0, scales, 1).astype(np.float32)[:, None]  # an all-zero row stays zero
    codes = np.clip(np.rint(meant / steps), -CODE_MAX, CODE_MAX).astype(np.int8)
    left = (meant - codes * steps).sum(axis=0, dtype=np.float32)
    return WireGradient(codes, scales.astype(np.float32)), left


def read_gradient(wire: WireGradient) -> Floats:
    """The gradient (B, n) float32 as the device uses it."""
    values = wire.values.astype(np.float32, copy=False)
    if wire.scales is None:
        return values
    restored: Floats = values * wire.scales[:, None]
    return restored
