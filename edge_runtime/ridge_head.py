"""The head that answers without a server: ridge regression on pooled features, in closed form, with probabilities.

Pure numpy. Of an image it takes the mean of the prefix tokens beside the mean of the patch tokens: p = 2 d values, d
where a cut has no prefix. Penalty and steepness of the softmax go by images that were left out, in five parts drawn by
a seed, each with as many of every class as it can have. How logistic regression and either mean alone compare is in
docs/field.md. Keeping features and head is left to `local_answers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from contract.tokens import TokenLayout
from edge_runtime.head import Floats, Labels

Doubles: TypeAlias = NDArray[np.float64]

PARTS = 5
SEED = 0
PENALTIES = np.logspace(-4, 2, 13)  # beside a kernel whose diagonal is about 1
STEEPNESSES = np.logspace(-0.5, 2.5, 31)  # of the softmax on scores between 0 and 1
PLAIN_PENALTY, PLAIN_STEEPNESS = 1.0, 10.0  # where nothing can be left out
LEAST_SPREAD = 1e-6  # beside the mean spread: a channel that stands still says nothing


@dataclass(frozen=True)
class FittedHead:
    """Logits of pooled features x (B, p) are x @ weight.T + bias. The accuracy is that on images that were left out."""

    weight: Floats  # (C, p)
    bias: Floats  # (C,)
    held_out_accuracy: float | None  # None: no class has two images
    held_out_images: int

    def logits(self, pooled: NDArray[np.float16]) -> Floats:
        """(B, p) -> (B, C)"""
        logits: Floats = pooled.astype(np.float32) @ self.weight.T + self.bias
        return logits


def pool(tokens: NDArray[np.float16], layout: TokenLayout) -> NDArray[np.float16]:
    """Clean tokens (B, T, d) to (B, p): the prefix tokens' mean, then the patch tokens'."""
    parts = [tokens[:, : layout.prefix], tokens[:, layout.prefix :]]
    means = [part.mean(axis=1, dtype=np.float32) for part in parts if part.shape[1]]
    return np.concatenate(means, axis=1).astype(np.float16)


def fit(pooled: NDArray[np.float16], labels: Labels, class_count: int) -> FittedHead:
    """The head of images (n, p) with class numbers (n,); the same ones in the same order give the same head.

    Time goes by m, the smaller of n and p: six decompositions of (m, m) matrices, about 10 m^3 operations each.
    """
    x, targets = pooled.astype(np.float64), np.eye(class_count)[labels]  # (n, p), (n, C)
    part = parts_of(labels)
    penalty, steepness, accuracy = PLAIN_PENALTY, PLAIN_STEEPNESS, None
    judged = np.flatnonzero(part >= 0)
    if len(judged):
        scores = np.zeros((len(PENALTIES), len(labels), class_count))
        for number in np.unique(part[judged]):
            left_out = part == number
            solved = Ridge(x[~left_out], targets[~left_out])
            for row, each in enumerate(PENALTIES):
                scores[row, left_out] = solved.scores(x[left_out], each)
        scores = scores[:, judged]
        losses = ((scores - targets[judged]) ** 2).mean(axis=(1, 2))
        best = int(losses.argmin())
        penalty, steepness = float(PENALTIES[best]), _steepness(scores[best], labels[judged])
        accuracy = float(np.mean(scores[best].argmax(axis=1) == labels[judged]))
    weight, bias = Ridge(x, targets).linear(penalty)
    return FittedHead(
        (steepness * weight).astype(np.float32), (steepness * bias).astype(np.float32), accuracy, len(judged)
    )


def parts_of(labels: Labels) -> NDArray[np.int64]:
    """(n,) which part an image is left out with; -1 where its class has no other image to learn from."""
    rng, part = np.random.default_rng(SEED), np.full(len(labels), -1, np.int64)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        if len(rows) > 1:
            part[rows] = np.arange(len(rows)) % PARTS
    return part


class Ridge:
    """Ridge regression with an intercept on standardised features, decomposed once for all penalties."""

    def __init__(self, x: Doubles, targets: Doubles) -> None:
        """(n, p) and (n, C)."""
        self._mean, spread = x.mean(axis=0), x.std(axis=0)
        floor = LEAST_SPREAD * max(float(spread.mean()), float(np.finfo(np.float32).tiny))
        self._scale = np.where(spread > floor, spread, np.inf) * np.sqrt(x.shape[1])
        x = (x - self._mean) / self._scale
        self._offset = targets.mean(axis=0)
        centred = targets - self._offset
        if len(x) <= x.shape[1]:  # the smaller of the two matrices that have the same eigenvalues
            values, vectors = np.linalg.eigh(x @ x.T)
            self._axes, self._turned = x.T @ vectors, vectors.T @ centred  # (p, m) and (m, C)
        else:
            values, self._axes = np.linalg.eigh(x.T @ x)
            self._turned = self._axes.T @ (x.T @ centred)
        self._values = np.maximum(values, 0.0)

    def linear(self, penalty: float) -> tuple[Doubles, Doubles]:
        """(C, p) and (C,)"""
        weight: Doubles = (self._axes @ (self._turned / (self._values + penalty)[:, None])).T / self._scale
        return weight, self._offset - weight @ self._mean

    def scores(self, x: Doubles, penalty: float) -> Doubles:
        """(B, p) -> (B, C), about 1 for the right class and 0 for others."""
        weight, bias = self.linear(penalty)
        scores: Doubles = x @ weight.T + bias
        return scores


def _steepness(scores: Doubles, labels: Labels) -> float:
    """By which scores are multiplied before the softmax: where the labels of what was left out surprise least."""
    rows = np.arange(len(labels))
    surprises = []
    for steepness in STEEPNESSES:
        logits = steepness * (scores - scores.max(axis=1, keepdims=True))
        surprises.append(float(np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[rows, labels])))
    return float(STEEPNESSES[int(np.argmin(surprises))])
