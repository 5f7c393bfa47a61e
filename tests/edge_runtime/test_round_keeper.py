"""Devices that keep what they have from round to round, with a model of three numbers: no torch, no onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.asks import EVERY_IMAGE
from contract.errors import RemoteProtocolError
from contract.messages import Ask, Checkpoints, Message, PatchFeatures, Settled, Update
from contract.training import OptimiserRule, TrainingCut
from edge_runtime.head import softmax_gradient
from edge_runtime.optimiser import Optimiser
from edge_runtime.part_keeper import PartRules
from edge_runtime.part_store import PartStore
from edge_runtime.round_keeper import RoundKeeper
from edge_runtime.trainer import Forward, StepFacts
from tests.edge_runtime import fake_trainer
from tests.edge_runtime.fake_trainer import CLASSES, SIZE, training_set

RUN, PATCHES, KEPT = "run", 16, 4
LOCAL = replace(
    fake_trainer.cut(1), trainable=("blocks.0.w",), buffers=(), kept=KEPT, patches=PATCHES, output_shape=(KEPT, 3),
    evaluated_shape=(PATCHES, 3),
)  # fmt: skip
WHOLE = replace(
    fake_trainer.cut(9, "cross-entropy"), layer="head", trainable=("blocks.0.w", "head.weight"), frozen=("norm.w",),
    buffers=(), kept=KEPT, patches=PATCHES,
)  # fmt: skip
SHIPPED = {
    "blocks.0.w": np.ones(3, np.float32), "norm.w": np.full(3, 2, np.float32),
    "head.weight": np.eye(3, dtype=np.float32),
}  # fmt: skip
PLAN = replace(fake_trainer.plan(), strategy="eft_vit", cuts=(LOCAL, WHOLE), activations="float16")
ROUND = {"base": 0, "epoch": 1, "epochs": 2, "size": 4, "seed": 7, "rate": 0.1}


class SmallTrainer:
    """logits = head (norm * w * mean colour of the kept patches); features are w * each kept patch."""

    def __init__(self, cut: TrainingCut) -> None:
        self.cut = cut
        self.tensors = {name: SHIPPED[name].copy() for name in cut.tensors}
        self.optimiser = Optimiser(OptimiserRule("sgd", 0.0, 0.0), {n: self.tensors[n] for n in cut.trainable})

    def _patches(self, x: np.ndarray, keep: np.ndarray | None) -> np.ndarray:
        cells = x.reshape(len(x), 3, SIZE * SIZE).transpose(0, 2, 1)  # a patch is a pixel
        return cells if keep is None else np.take_along_axis(cells, keep[..., None], axis=1)

    def features(self, x: np.ndarray, keep: np.ndarray | None = None) -> np.ndarray:
        found: np.ndarray = self._patches(x, keep) * self.tensors["blocks.0.w"]
        return found

    def forward(self, x: np.ndarray, targets: np.ndarray | None = None, keep: np.ndarray | None = None) -> Forward:
        assert targets is not None
        self.mean = self._patches(x, keep).mean(axis=1, dtype=np.float32)
        self.inner = self.mean * self.tensors["blocks.0.w"] * self.tensors["norm.w"]
        z = self.inner @ self.tensors["head.weight"].T
        self.loss = softmax_gradient(z, targets.argmax(axis=1))
        return Forward(z, self.loss.mean_loss)

    def backward(self, grad_z: None = None, pull: None = None, only: Collection[str] | None = None) -> None:
        g = self.loss.gradient
        local = ((g @ self.tensors["head.weight"]) * self.tensors["norm.w"] * self.mean).sum(axis=0, dtype=np.float32)
        found = {"blocks.0.w": local, "head.weight": np.ascontiguousarray(g.T @ self.inner)}
        self.gradients = {name: each for name, each in found.items() if only is None or name in only}

    def step(self, learning_rate: float) -> StepFacts:
        self.optimiser.step(self.tensors, self.gradients, learning_rate)
        return StepFacts(0.0, self.optimiser.steps)

    def parameters(self) -> dict[str, np.ndarray]:
        return {name: self.tensors[name] for name in self.cut.trainable}

    def load_parameters(self, tensors: Mapping[str, np.ndarray]) -> None:
        for name in self.cut.trainable:
            self.tensors[name][...] = tensors[name]
        self.optimiser.reset()

    def load_frozen(self, tensors: Mapping[str, np.ndarray]) -> None:
        assert set(tensors) == set(self.cut.frozen)
        self.tensors.update({name: np.array(value) for name, value in tensors.items()})

    def state(self) -> dict[str, np.ndarray]:
        return {name: value.copy() for name, value in self.parameters().items()}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        self.load_parameters(state)


def keeper(folder: Path, count: int = 9, tick: Callable[[int], None] = lambda images: None) -> RoundKeeper:
    folder.mkdir(exist_ok=True)
    rules = PartRules(PLAN, "raw-label", np.arange(CLASSES, dtype=np.int64))

    def shipped(names: Sequence[str]) -> dict[str, np.ndarray]:
        return {name: SHIPPED[name] for name in names}

    store = PartStore(folder, print)
    return RoundKeeper(rules, training_set(count), SmallTrainer, shipped, store, tick)  # type: ignore[arg-type]


def masked(step: int, after: int, tensors: Mapping[str, np.ndarray] | None = None, **changes: Any) -> Ask:
    parameters = {**ROUND, "step": step, "after": after, "threshold": 1.0, **changes}
    return Ask(f"masked-{step}", "masked_round", parameters, 60.0, dict(tensors or {}))


def features(reply: Message) -> PatchFeatures:
    assert isinstance(reply, PatchFeatures)
    return reply


def test_a_round_trains_local_module_and_head_and_sends_a_balanced_set(tmp_path: Path) -> None:
    device = keeper(tmp_path)
    reply = features(device.answer(masked(1, 0), RUN))
    assert (reply.samples, reply.count) == (9, 9) and np.isfinite(reply.mean_loss)
    assert reply.values is not None and reply.values.dtype == np.float16 and reply.values.shape == (9, KEPT, 3)
    assert reply.labels is not None and list(np.bincount(reply.labels)) == [3, 3, 3]
    own = device.local_weights()
    assert own is not None and (own["blocks.0.w"] != SHIPPED["blocks.0.w"]).all()


def test_every_image_is_sent_once_where_that_is_asked(tmp_path: Path) -> None:
    device = keeper(tmp_path, 8)  # classes of 3, 3 and 2
    balanced = features(device.answer(masked(1, 0, rate=0.0), RUN))
    every = features(device.answer(masked(2, 1, epoch=3, rate=0.0, threshold=EVERY_IMAGE), RUN))
    assert balanced.labels is not None and list(np.bincount(balanced.labels)) == [3, 3, 3]
    assert every.labels is not None and list(np.bincount(every.labels)) == [3, 3, 2]
    assert every.values is not None and len({value.tobytes() for value in every.values}) == 8
    assert balanced.values is not None  # the same masks: what is sent of an image is what was
    assert {value.tobytes() for value in every.values} == {value.tobytes() for value in balanced.values}
    assert features(keeper(tmp_path / "empty", 0).answer(masked(1, 0, threshold=EVERY_IMAGE), RUN)).values is None


def test_the_local_module_is_kept_and_the_head_is_the_servers(tmp_path: Path) -> None:
    device, head = keeper(tmp_path), {"head.weight": np.full((3, 3), 0.5, np.float32)}
    device.answer(masked(1, 0, head, rate=0.0), RUN)
    trainer: Any = device._trainers[WHOLE.index]
    np.testing.assert_array_equal(trainer.tensors["head.weight"], head["head.weight"])  # a rate of 0 moves nothing
    device.answer(masked(2, 1, epoch=3), RUN)
    moved = trainer.tensors["blocks.0.w"].copy()
    change = {"norm.w": np.array([0.5, 0, -0.5], np.float16), **head}
    device.answer(masked(3, 2, change, epoch=5, rate=0.0), RUN)
    np.testing.assert_array_equal(trainer.tensors["blocks.0.w"], moved)
    np.testing.assert_array_equal(trainer.tensors["norm.w"], [2.5, 2, 1.5])
    np.testing.assert_array_equal(trainer.tensors["head.weight"], head["head.weight"])
    device.answer(masked(4, 3, epoch=7, rate=0.0), RUN)  # nothing new: what was received stays
    np.testing.assert_array_equal(trainer.tensors["norm.w"], [2.5, 2, 1.5])


def test_a_new_process_goes_on_where_the_disk_is(tmp_path: Path) -> None:
    change = {"norm.w": np.array([0.5, 0, -0.5], np.float16), "head.weight": np.full((3, 3), 0.5, np.float32)}
    asks = [masked(1, 0, change), masked(2, 1, epoch=3), masked(3, 2, epoch=5)]
    device = keeper(tmp_path / "one")
    expected = [features(device.answer(ask, RUN)) for ask in asks]
    for ask, wanted in zip(asks, expected, strict=True):
        found = features(keeper(tmp_path / "other").answer(ask, RUN))
        assert found.values is not None and wanted.values is not None
        assert found.values.tobytes() == wanted.values.tobytes() and found.mean_loss == wanted.mean_loss


def test_a_round_that_was_cut_off_goes_on_at_its_epoch(tmp_path: Path) -> None:
    seen: list[int] = []

    def stop_after(images: int) -> None:
        seen.append(images)
        if len(seen) == 4:  # in the second epoch of three batches
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        keeper(tmp_path / "cut", tick=stop_after).answer(masked(1, 0), RUN)
    again: list[int] = []
    found = features(keeper(tmp_path / "cut", tick=again.append).answer(masked(1, 0), RUN))
    whole = features(keeper(tmp_path / "whole").answer(masked(1, 0), RUN))
    assert sum(again) == 9  # one epoch, not two
    assert found.values is not None and whole.values is not None and found.values.tobytes() == whole.values.tobytes()


def test_a_device_that_has_lost_a_step_says_which_it_holds(tmp_path: Path) -> None:
    device = keeper(tmp_path)
    device.answer(masked(1, 0), RUN)
    reply = device.answer(masked(5, 4), RUN)
    assert isinstance(reply, Checkpoints) and reply.steps == (0, 1)


def test_a_device_without_images_sends_none(tmp_path: Path) -> None:
    reply = features(keeper(tmp_path, 0).answer(masked(1, 0), RUN))
    assert (reply.samples, reply.count, reply.values, reply.labels) == (0, 0, None, None)


def test_the_end_is_loaded_and_predicted_with(tmp_path: Path) -> None:
    change = {"norm.w": np.array([0.5, 0, -0.5], np.float16), "head.weight": np.full((3, 3), 0.5, np.float32)}
    ask = Ask("last", "load_global", {"step": 3, "after": 0, "base": 0}, 60.0, change)
    assert isinstance(keeper(tmp_path).answer(ask, RUN), Settled)
    trainer: Any = keeper(tmp_path).predictor(RUN)  # a new process
    np.testing.assert_array_equal(trainer.tensors["norm.w"], [2.5, 2, 1.5])
    np.testing.assert_array_equal(trainer.tensors["head.weight"], change["head.weight"])


def test_a_block_round_moves_its_block_and_the_head(tmp_path: Path) -> None:
    ask = Ask("block-1", "block_round", {**ROUND, "step": 1, "after": 0, "block": 0}, 60.0)
    reply = keeper(tmp_path).answer(ask, RUN)
    assert isinstance(reply, Update) and set(reply.tensors) == {"blocks.0.w", "head.weight"}
    other = Ask("block-2", "block_round", {**ROUND, "step": 1, "after": 0, "block": 5}, 60.0)
    with pytest.raises(RemoteProtocolError, match="the model has no blocks.5 to train"):
        keeper(tmp_path / "other").answer(other, RUN)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [({"epochs": 0}, "expected one epoch or more"), ({"rate": -0.1}, "expected a learning rate of 0 or more")],
)
def test_rounds_that_make_no_sense_are_refused(tmp_path: Path, changes: dict[str, Any], cause: str) -> None:
    with pytest.raises(RemoteProtocolError, match=cause):
        keeper(tmp_path).answer(masked(1, 0, **changes), RUN)
