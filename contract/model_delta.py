"""How far layers have moved from those of the signed package, which every device has: what travels instead of them.

A change is small, so that it can be coded coarsely: float16 keeps its 11 bits of the change and not of the weight; int8
has one scale for each row of the first axis. Nothing adds up over rounds, because the reference is always the package.
Pure; both sides use it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.errors import RemoteProtocolError

Floats = NDArray[np.float32]
Arrays = Mapping[str, NDArray[Any]]
SCALE = ".delta_scale"  # behind a tensor's name: the scales (n,) of its rows, or (1,) of a vector
_LEVELS = 127


def write_delta(now: Mapping[str, Floats], shipped: Mapping[str, Floats], precision: str) -> dict[str, NDArray[Any]]:
    """Coded changes by tensor name; tensors that have not moved at all do not travel."""
    coded: dict[str, NDArray[Any]] = {}
    for name, value in now.items():
        change = value - shipped[name]
        if not change.any():
            continue
        if precision == "int8":
            rows = _rows(change)
            largest = np.abs(rows).max(axis=1)
            scales = np.where(largest > 0, largest / _LEVELS, 1.0).astype(np.float32)
            codes = np.clip(np.rint(rows / scales[:, None]), -_LEVELS, _LEVELS).astype(np.int8)
            coded[name], coded[name + SCALE] = codes.reshape(change.shape), scales
        else:
            coded[name] = change.astype(np.float16 if precision == "float16" else np.float32)
    return coded


def names_in(coded: Collection[str]) -> set[str]:
    """The tensors that a coded change moves."""
    return {name for name in coded if not name.endswith(SCALE)}


def read_delta(coded: Arrays, shipped: Mapping[str, Floats]) -> dict[str, Floats]:
    """The tensors of `shipped` as they are now: those that did not travel are as they were shipped.

    Raises: RemoteProtocolError for an unknown name, another shape, or scales that do not fit.
    """
    scaled = {name for name, value in coded.items() if value.dtype == np.int8}
    unknown = set(coded) - set(shipped) - {name + SCALE for name in scaled}
    if unknown:
        raise _unfit(min(unknown), "a tensor that the server trains", "another name")
    found: dict[str, Floats] = {}
    for name, value in shipped.items():
        change = coded.get(name)
        if change is None:
            found[name] = value
            continue
        if change.shape != value.shape:
            raise _unfit(name, f"the shape {value.shape}", str(change.shape))
        if name in scaled:
            scales, rows = coded.get(name + SCALE), _rows(change)
            if scales is None or scales.shape != rows.shape[:1] or scales.dtype != np.float32:
                raise _unfit(name, f"{len(rows)} float32 scales", "none" if scales is None else str(scales.shape))
            change = (rows.astype(np.float32) * scales[:, None]).reshape(value.shape)
        found[name] = value + change.astype(np.float32)
    return found


def _rows(change: NDArray[Any]) -> NDArray[Any]:
    """(n, m): rows of a matrix or kernel; a vector is one row."""
    return change.reshape(len(change), -1) if change.ndim > 1 else change.reshape(1, -1)


def _unfit(name: str, expected: str, found: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"tensor {name}: expected {expected}, found {found}", "start a new run on the server")
