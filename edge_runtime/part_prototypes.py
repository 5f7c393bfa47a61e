"""A device's side of shift-aware prototypes (algorithms.md section 5.1): its own class means, and the pull towards the
broadcast ones.

Symbols: z an embedding (d,) of length 1; p_{k,c} the mean of this device's z of class c since its part was loaded,
n_{k,c} how many; P_c the prototypes of all devices; lambda_k the strength. The loss on top of the task's is
lambda_k * mean over a batch of d(z, P_y), where an image whose class has no P_y counts as 0. P is data: nothing here
gives it a gradient. When batches go is `part_keeper`'s part, d and its gradient are in the part's graphs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.errors import RemoteProtocolError
from contract.messages import Ask, Prototypes
from contract.training import PrototypeRule
from edge_runtime.head import Floats, Labels

_START, _START_ANEW = "prototypes.", "start a new run on the server"


class PartPrototypes:
    """Sums (C, d) and counts (C,) of this device's images; anchors (C, d), known (C,) and strength as received."""

    def __init__(self, class_count: int, rule: PrototypeRule) -> None:
        self._shape, self._rule = (class_count, rule.dimension), rule
        self.begin()

    def begin(self) -> None:
        """A part was loaded: nothing is counted, nothing pulls."""
        self._sums = np.zeros(self._shape)
        self._counts = np.zeros(self._shape[0], np.int64)
        self._anchors = np.zeros(self._shape, np.float32)
        self._known = np.zeros(self._shape[0], np.uint8)
        self._strength = 0.0

    def set(self, ask: Ask) -> None:
        """Be pulled towards these from now on. Raises: RemoteProtocolError when they do not fit."""
        classes, values = ask.tensors["classes"].astype(np.int64), ask.tensors["values"]
        strength = float(ask.parameters["strength"])
        rising = bool((np.diff(classes) > 0).all())
        if values.shape[1] != self._shape[1] or int(classes.max()) >= self._shape[0] or not rising:
            raise RemoteProtocolError(
                f"ask {ask.ask}: expected prototypes of {self._shape[1]} values of classes below {self._shape[0]}, "
                f"found {values.shape[1]} values, classes to {int(classes.max())}",
                _START_ANEW,
            )
        if not 0.0 <= strength < math.inf:
            raise RemoteProtocolError(f"ask {ask.ask}: expected a strength of 0 or more, found {strength}", _START_ANEW)
        self._anchors[...], self._known[...], self._strength = 0.0, 0, strength
        self._anchors[classes], self._known[classes] = values, 1
        if self._rule.distance == "cosine":
            lengths = np.sqrt((self._anchors.astype(np.float64) ** 2).sum(axis=1, keepdims=True))
            self._anchors[...] = np.divide(self._anchors, lengths, where=lengths > 0, out=self._anchors.copy())

    def anchors(self, labels: Labels) -> Floats:
        """P_y of each image (B, d)."""
        return self._anchors[labels]

    def pull(self, labels: Labels) -> Floats:
        """Weight of each image's distance in the loss (B,): lambda_k / B, 0 where its class has no prototype."""
        return (self._known[labels] * (self._strength / len(labels))).astype(np.float32)

    def add(self, embedding: Floats, labels: Labels) -> None:
        """Count a batch (B, d)."""
        np.add.at(self._sums, labels, embedding.astype(np.float64))
        np.add.at(self._counts, labels, 1)

    def tell(self, ask: Ask) -> Prototypes:
        """M_k = {(p_{k,c}, n_{k,c}) : n_{k,c} > 0}; counts are rounded up: a class that is there stays."""
        own = np.flatnonzero(self._counts)
        step = self._rule.count_step
        counts = tuple(-(-int(self._counts[each]) // step) * step for each in own)
        values = (self._sums[own] / self._counts[own, None]).astype(np.float32) if len(own) else None
        return Prototypes(ask.ask, tuple(int(each) for each in own), counts, values)

    def state(self) -> dict[str, NDArray[Any]]:
        """All that is needed to go on."""
        named: dict[str, NDArray[Any]] = {
            "sums": self._sums,
            "counts": self._counts,
            "anchors": self._anchors,
            "known": self._known,
            "strength": np.array([self._strength]),
        }
        return {_START + name: value.copy() for name, value in named.items()}

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """The inverse of `state`."""
        own = {name.removeprefix(_START): value.copy() for name, value in state.items() if name.startswith(_START)}
        self._sums, self._counts = own["sums"], own["counts"]
        self._anchors, self._known = own["anchors"], own["known"]
        self._strength = float(own["strength"][0])
