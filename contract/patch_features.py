"""How features of kept patches travel (EFTViT): float32, float16, or int8 codes with one scale for each channel.

Pure; both sides use it. Which samples and which patches is left to the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.errors import RemoteProtocolError, TrainingError

Floats = NDArray[np.float32]
TYPES: dict[str, type[np.generic]] = {"float32": np.float32, "float16": np.float16, "int8": np.int8}
_LEVELS = 127


@dataclass(frozen=True)
class WireFeatures:
    """values (B, T, d); scales (d,) with int8 only: a value is code times scale."""

    values: NDArray[Any]
    scales: Floats | None


def write_features(features: Floats, precision: str) -> WireFeatures:
    """Features (B, T, d) as they travel. int8: half a step of a channel's largest magnitude is lost at most.

    Raises: TrainingError for values that are not finite, or too large for float16.
    """
    if precision == "int8":
        if not np.isfinite(features).all():
            raise _unfit(precision)
        largest = np.abs(features).max(axis=(0, 1), initial=0.0)
        scales = np.where(largest > 0, largest / _LEVELS, 1.0).astype(np.float32)
        return WireFeatures(np.clip(np.rint(features / scales), -_LEVELS, _LEVELS).astype(np.int8), scales)
    with np.errstate(over="ignore"):
        values = features.astype(TYPES[precision], copy=False)
    if not np.isfinite(values).all():
        raise _unfit(precision)
    return WireFeatures(values, None)


def read_features(wire: WireFeatures) -> Floats:
    """(B, T, d) float32. Raises: RemoteProtocolError when scales are missing, not wanted, or of another width."""
    values, scales = wire.values, wire.scales
    if (values.dtype == np.int8) != (scales is not None):
        raise RemoteProtocolError(
            "features: scales belong to int8 codes, and to them only", "update the device's software"
        )
    if scales is None:
        return values.astype(np.float32)
    if scales.shape != values.shape[-1:]:
        raise RemoteProtocolError(
            f"features: expected {values.shape[-1]} scales, found {scales.shape}", "update the device's software"
        )
    found: Floats = values.astype(np.float32) * scales
    return found


def _unfit(precision: str) -> TrainingError:
    return TrainingError(
        f"the features at the cut are not finite in {precision}",
        "lower the learning rate; with float16 export with --activations float32",
    )
