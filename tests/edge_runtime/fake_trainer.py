"""A client part of one number for each colour, with the methods of `edge_runtime.trainer.Trainer`, in plain float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from contract.errors import DeviceError, RemoteProtocolError, TrainingError
from contract.images import ImageRule
from contract.training import AugmentRule, OptimiserRule, TrainingCut, TrainingPlan
from edge_runtime.data import Sample
from edge_runtime.head import softmax_gradient
from edge_runtime.optimiser import Optimiser
from edge_runtime.picture_cache import PictureCache
from edge_runtime.trainer import Forward, StepFacts
from edge_runtime.training_set import TrainingSet

CLASSES, SIZE = 3, 4
RULE = OptimiserRule("sgd", 0.5, 0.25)
IMAGE = ImageRule(SIZE, SIZE, "bicubic", 1.0, "center", (0.5,) * 3, (0.5,) * 3, "white", 1_000_000)


def cut(index: int, loss: str = "none") -> TrainingCut:
    """z (B, 3, 1) = w * the mean of each colour + shift; the cut's index is where w starts."""
    shape = (3,) if loss != "none" else (3, 1)
    return TrainingCut(
        index, 9, f"layer{index}", "f.onnx", "b.onnx", "e.onnx", shape, shape, None, None, ("w", "shift"),
        (), ("seen",), 0, 0, loss,  # type: ignore[arg-type]
    )  # fmt: skip


CUTS = (cut(1), cut(2), cut(9, "cross-entropy"))


def plan(**changes: Any) -> TrainingPlan:
    """A package of two parts and of the whole, which trains on pictures that are varied."""
    fields: dict[str, Any] = {
        "format": "cutlayer-training/1",
        "strategy": "parallel_split",
        "whole_model": True,
        "class_count": CLASSES,
        "cuts": CUTS,
        "optimiser": RULE,
        "augment": AugmentRule(1, True, 0.25),
        "gradient": "float32",
        "activations": "float32",
    }
    return TrainingPlan(**fields | changes)


def samples(count: int) -> list[Sample]:
    """Samples whose files nobody opens."""
    return [
        Sample(Path(f"{number}"), f"{number}", bytes([number]) * 16, bytes([number]) * 32, number % CLASSES)
        for number in range(count)
    ]


def picture(sample: Sample) -> np.ndarray:
    """The picture (h, w, 3) of a sample."""
    return np.random.default_rng(sample.sample_id[0]).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)


def training_set(count: int, rule: AugmentRule | None = None) -> TrainingSet:
    """The labelled images of a device."""
    return TrainingSet(samples(count), CLASSES, IMAGE, rule or plan().augment, PictureCache(picture), bytes(32))


class FakeTrainer:
    """`seen` stands for a BatchNorm statistic: it counts images, and moves with the step."""

    def __init__(self, its: TrainingCut, rule: OptimiserRule = RULE) -> None:
        self.cut = its
        self.tensors = {
            "w": np.full(3, its.index, np.float32),
            "shift": np.asarray(0.5, np.float32),  # without axes, as the scales of some models
            "seen": np.zeros(1, np.float32),
        }
        self.optimiser = Optimiser(rule, {name: self.tensors[name] for name in its.trainable})
        self.saved: tuple[np.ndarray, np.ndarray | None] | None = None
        self.gradients: dict[str, np.ndarray] | None = None
        self.kept: list[object] = []  # of each forward

    def _means(self, x: np.ndarray) -> np.ndarray:
        means: np.ndarray = x.mean(axis=(2, 3), dtype=np.float32)
        return means

    def forward(self, x: np.ndarray, targets: np.ndarray | None = None, keep: object = None) -> Forward:
        means = self._means(x)
        self.kept.append(keep)
        z = means * self.tensors["w"] + self.tensors["shift"]
        self.saved, self.gradients, loss = (means, None), None, None
        if targets is not None:
            found = softmax_gradient(z, targets.argmax(axis=1))
            loss, self.saved = found.mean_loss, (means, found.gradient)
        return Forward(z.reshape(-1, *self.cut.output_shape), loss)

    def backward(self, grad_z: np.ndarray | None = None) -> dict[str, np.ndarray]:
        assert self.saved is not None
        means, own = self.saved
        gradient = own if grad_z is None else grad_z.reshape(-1, 3)
        assert gradient is not None
        self.seen = np.float32(len(means))
        self.gradients = {
            "w": (gradient * means).sum(axis=0, dtype=np.float32), "shift": np.asarray(gradient.sum(dtype=np.float32)),
        }  # fmt: skip
        self.saved = None
        return self.gradients

    def step(self, learning_rate: float) -> StepFacts:
        assert self.gradients is not None
        gradients, self.gradients = self.gradients, None
        if not all(np.isfinite(each).all() for each in gradients.values()):
            raise TrainingError("the gradient of w is not finite; nothing was changed", "lower the learning rate")
        self.optimiser.step(self.tensors, gradients, learning_rate)
        self.tensors["seen"] += self.seen
        return StepFacts(0.0, self.optimiser.steps)

    def evaluate(self, x: np.ndarray) -> np.ndarray:
        z: np.ndarray = self._means(x) * self.tensors["w"] + self.tensors["shift"]
        return z.reshape(-1, *self.cut.output_shape)

    def parameters(self) -> dict[str, np.ndarray]:
        return dict(self.tensors)

    def load_parameters(self, tensors: Mapping[str, np.ndarray]) -> None:
        if tensors.keys() != self.tensors.keys():
            raise RemoteProtocolError("expected other tensors", "start a new run on the server")
        for name, array in tensors.items():
            if array.shape != self.tensors[name].shape:
                raise RemoteProtocolError(f"tensor {name}: another shape", "start a new run on the server")
        for name, array in tensors.items():
            self.tensors[name][...] = array
        self.optimiser.reset()
        self.saved = None

    def state(self) -> dict[str, np.ndarray]:
        tensors = {f"tensor:{name}": array for name, array in self.tensors.items()}
        return {**tensors, **self.optimiser.moments, "steps": np.array([self.optimiser.steps])}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        held = self.state()
        if state.keys() != held.keys() or any(state[name].shape != held[name].shape for name in held):
            raise DeviceError("the saved training state is of another cut", "start a new run on the server")
        for name in self.tensors:
            self.tensors[name][...] = state[f"tensor:{name}"]
        for name, moment in self.optimiser.moments.items():
            moment[...] = state[name]
        self.optimiser.steps = int(state["steps"][0])
        self.saved = None
