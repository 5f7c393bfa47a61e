"""The device's own head in client-head mode (U-shaped split learning): one linear layer on the backend's features.

It learns by the same rule as the part, from the same batches; the server sees d loss / d features only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from contract.errors import RemoteProtocolError, TrainingError
from contract.keyed_noise import derive_key
from contract.training import OptimiserRule
from edge_runtime.head import BatchLoss, Floats, Head, Labels, new_head, softmax_gradient
from edge_runtime.optimiser import Optimiser

if TYPE_CHECKING:
    from edge_runtime.trainer import Trainer

_EMPTY = np.zeros((0, 0), np.float32)


class PartHead:
    """Weights (C, f) and bias (C,), made when the first features say how wide they are."""

    def __init__(self, class_count: int, secret: bytes, rule: OptimiserRule) -> None:
        """The secret seeds the head: its start is not the server's choice."""
        self._class_count, self._secret, self._rule = class_count, secret, rule
        self._run = ""
        self._tensors: dict[str, Floats] = {}
        self._optimiser = Optimiser(rule, {})
        self._gradient: dict[str, Floats] | None = None  # of the batch whose loss was taken

    @property
    def run(self) -> str:
        """The run that it was begun for, "" before the first."""
        return self._run

    def begin(self, run: str) -> None:
        """A new head for a new run."""
        self._run, self._tensors, self._gradient = run, {}, None
        self._optimiser = Optimiser(self._rule, {})

    def loss(self, features: Floats, labels: Labels) -> BatchLoss:
        """Mean cross-entropy on features (B, f), and d loss / d features; the head's own gradient waits for `step`.

        Raises: RemoteProtocolError for features of another width than before; TrainingError for a loss or a
        gradient that is not finite.
        """
        width = features.shape[1]
        if not self._tensors:
            seed = int.from_bytes(derive_key(self._secret, "part-head", self._run), "little")
            made = new_head(self._class_count, width, np.random.default_rng(seed))
            self._tensors = {"weight": made.weight, "bias": made.bias}
            self._optimiser = Optimiser(self._rule, self._tensors)
        weight = self._tensors["weight"]
        if weight.shape[1] != width:
            raise RemoteProtocolError(
                f"expected features of {weight.shape[1]} values, found {width}", "start a new run on the server"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            loss = softmax_gradient(features @ weight.T + self._tensors["bias"], labels)
            gradient = {
                "weight": np.ascontiguousarray(loss.gradient.T @ features), "bias": loss.gradient.sum(axis=0),
            }  # fmt: skip
        if not (math.isfinite(loss.mean_loss) and all(np.isfinite(each).all() for each in gradient.values())):
            raise TrainingError("the loss of this device's head is not finite", "lower the learning rate")
        self._gradient = gradient
        return BatchLoss(loss.mean_loss, loss.correct, loss.count, loss.gradient @ weight)

    def step(self, rate: float) -> None:
        """Move by the gradient of the last loss, once; nothing where there was none."""
        if self._gradient is not None:
            self._optimiser.step(self._tensors, self._gradient, rate)
            self._gradient = None

    def state(self) -> dict[str, NDArray[Any]]:
        """All that is needed to go on."""
        return {
            "run": np.frombuffer(self._run.encode(), np.uint8),
            "steps": np.array([self._optimiser.steps], np.int64),
            **self._tensors,
            **self._optimiser.moments,
        }

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """The inverse of `state`."""
        self._run = state["run"].tobytes().decode()
        self._tensors = {name: state[name].copy() for name in ("weight", "bias") if name in state}
        self._optimiser = Optimiser(self._rule, self._tensors)
        self._optimiser.steps = int(state["steps"][0])
        for name, moment in self._optimiser.moments.items():
            moment[...] = state[name]
        self._gradient = None

    def as_head(self) -> Head | None:
        """The head for predictions, None before it has seen features."""
        if not self._tensors:
            return None
        return Head(self._tensors["weight"], self._tensors["bias"], _EMPTY, _EMPTY, 0)


def descend(head: PartHead, trainer: Trainer, images: Floats, labels: Labels, rate: float) -> BatchLoss:
    """One step of a part and of the head behind it; a loss of the graph's own is added to the head's.

    Raises: as the trainer's methods and `PartHead.loss`.
    """
    out = trainer.forward(images)
    loss = head.loss(out.z, labels)
    trainer.backward(loss.gradient)
    trainer.step(rate)
    head.step(rate)
    return replace(loss, mean_loss=loss.mean_loss + (out.loss or 0.0))
