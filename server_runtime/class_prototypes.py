"""Class prototypes on the server: pooled over devices, renewed each round, and how far a device's are from them. Pure.

algorithms.md section 5.1. Symbols: p_{k,c} device k's mean embedding of class c, n_{k,c} how many images it is of,
P_c the prototypes (C, d), d_k a device's shift, lambda_k the strength of its pull. Asking for them is left to
`strategies.prototypes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from contract.errors import TrainingError
from contract.messages import Prototypes

_TOO_LONG = 1.0 + 1e-3  # means of vectors of length 1 are no longer than that, and float32 rounds


@dataclass(frozen=True)
class ClassMeans:
    """Rows (K, d) of rising `classes` (K,), each of `counts` (K,) images."""

    classes: np.ndarray
    counts: np.ndarray
    values: np.ndarray


def means_of(device: str, reply: Prototypes, classes: int, dimension: int) -> ClassMeans:
    """What a device told, held against its site.

    Raises:
        TrainingError: naming the device.
    """
    values = np.zeros((0, dimension), np.float32) if reply.values is None else reply.values
    longest = float(np.linalg.norm(values.astype(np.float64), axis=1).max(initial=0.0))
    if values.shape[1] != dimension or max(reply.classes, default=0) >= classes or longest > _TOO_LONG:
        raise TrainingError(
            f"{device}: prototypes: expected means of unit vectors of {dimension} values, of classes below {classes}; "
            f"found {values.shape[1]} values, length {longest:.3g}, classes to {max(reply.classes, default=0)}",
            "install this run's package on the device and update its software",
        )
    return ClassMeans(np.array(reply.classes, np.int64), np.array(reply.counts, np.int64), np.array(values, np.float64))


def pooled(means: Iterable[ClassMeans], classes: int, dimension: int) -> tuple[np.ndarray, np.ndarray]:
    """p-bar_c = sum_k n_{k,c} p_{k,c} / sum_k n_{k,c} as (C, d), and which classes were seen (C,)."""
    sums, counts = np.zeros((classes, dimension)), np.zeros(classes)
    for each in means:
        sums[each.classes] += each.counts[:, None] * each.values
        counts[each.classes] += each.counts
    seen = counts > 0
    sums[seen] /= counts[seen, None]
    return sums, seen


@dataclass(frozen=True)
class ClassPrototypes:
    """P (C, d) float64, and which of its rows are known (C,)."""

    values: np.ndarray
    known: np.ndarray

    @classmethod
    def none(cls, classes: int, dimension: int) -> ClassPrototypes:
        """Before the first round."""
        return cls(np.zeros((classes, dimension)), np.zeros(classes, bool))

    def renewed(self, means: Iterable[ClassMeans], beta: float) -> ClassPrototypes:
        """P_c <- (1 - beta) P_c + beta p-bar_c for the classes of this round; a new class starts at p-bar_c."""
        found, seen = pooled(means, *self.values.shape)
        values = self.values.copy()
        again, new = seen & self.known, seen & ~self.known
        values[again] = (1.0 - beta) * self.values[again] + beta * found[again]
        values[new] = found[new]
        return ClassPrototypes(values, self.known | seen)


def shift(means: ClassMeans, prototypes: ClassPrototypes, kind: str) -> float | None:
    """d_k = the mean over the device's classes of d(p_{k,c}, P_c); None where it has no class with a prototype."""
    shared = prototypes.known[means.classes]
    if not shared.any():
        return None
    own, common = means.values[shared], prototypes.values[means.classes[shared]]
    if kind == "l2":
        return float(np.linalg.norm(own - common, axis=1).mean())
    lengths = np.linalg.norm(own, axis=1) * np.linalg.norm(common, axis=1)
    products = (own * common).sum(axis=1)
    return float(
        np.maximum(0.0, 1.0 - np.divide(products, lengths, where=lengths > 0, out=np.zeros_like(lengths))).mean()
    )


def strength(shift: float | None, lambda_0: float, alpha: float) -> float:
    """lambda_k = lambda_0 exp(-alpha d_k); 0 for a device that nothing is known of yet."""
    return 0.0 if shift is None else lambda_0 * math.exp(-alpha * shift)


def to_tensors(means: Mapping[str, ClassMeans]) -> dict[str, np.ndarray]:
    """The devices' last means by name, for a checkpoint."""
    return {
        f"{device}/{name}": getattr(each, name)
        for device, each in means.items()
        for name in ("classes", "counts", "values")
    }


def from_tensors(tensors: Mapping[str, np.ndarray]) -> dict[str, ClassMeans]:
    """The inverse of `to_tensors`."""
    devices = {name.rpartition("/")[0] for name in tensors}
    return {
        device: ClassMeans(*(tensors[f"{device}/{name}"].copy() for name in ("classes", "counts", "values")))
        for device in sorted(devices)
    }
