"""Local rounds of a part behind which each device has a head of its own (EEFT and its baselines)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.errors import TrainingError
from contract.messages import Settled
from edge_runtime.head import softmax_gradient
from edge_runtime.part_head import PartHead
from tests.edge_runtime.fake_trainer import CLASSES, RULE, FakeTrainer, cut, training_set
from tests.edge_runtime.test_part_keeper import BATCH, RATE, RUN, SEED, Arrays, Device, Killed, frame

CUT = cut(9, "own-head")
ROUND = {"cut": 9, "size": BATCH, "seed": SEED, "rate": RATE}


def device(folder: Path, mode: str = "client-head") -> Device:
    return Device(folder, mode, changes={"cuts": (CUT,), "class_count": None})


def train(own: Device, number: int, tensors: Arrays | None = None, epochs: int = 2) -> Any:
    first = 1 + (number - 1) * epochs
    return own.ask(f"round-{number}", "local_round", tensors, epoch=first, epochs=epochs, **ROUND)


def expected(rounds: int, epochs: int = 2) -> tuple[FakeTrainer, PartHead, float]:
    """The same by hand: the head goes on, the part's optimiser starts every round anew."""
    images = training_set(11)
    trainer, head, loss = FakeTrainer(CUT), PartHead(CLASSES, bytes(32), RULE), 0.0
    head.begin(RUN)
    for number in range(rounds):
        trainer.load_parameters(dict(trainer.parameters()))
        for epoch in range(1 + number * epochs, 1 + (number + 1) * epochs):
            total = 0.0
            for place in range(images.batch_count(BATCH)):
                batch = images.batch(SEED, epoch, place, BATCH)
                found = head.loss(trainer.forward(batch.images).z, batch.labels)
                trainer.backward(found.gradient)
                trainer.step(RATE)
                head.step(RATE)
                total += found.mean_loss * found.count
            loss = total / len(images)
    return trainer, head, loss


def test_a_round_trains_part_and_head_and_uploads_the_part_alone(tmp_path: Path) -> None:
    update = train(device(tmp_path / "one"), 1)
    trainer, _, loss = expected(1)
    assert update.tensors.keys() == {*CUT.trainable, *CUT.buffers}  # no head
    for name, value in trainer.parameters().items():
        assert update.tensors[name].tobytes() == value.tobytes()
    assert update.mean_loss == pytest.approx(loss) and (update.samples, update.count) == (11, 11)


def test_the_head_goes_on_from_round_to_round_over_restarts(tmp_path: Path) -> None:
    own = device(tmp_path / "one")
    first = train(own, 1)
    own.restart()
    second = train(own, 2, dict(first.tensors))
    trainer, head, _ = expected(2)
    for name, value in trainer.parameters().items():
        assert second.tensors[name].tobytes() == value.tobytes()
    assert own.head is not None
    for name, value in head.state().items():
        assert own.head.state()[name].tobytes() == value.tobytes()


def test_a_killed_round_goes_on_where_its_last_epoch_ended(tmp_path: Path) -> None:
    whole = frame(train(device(tmp_path / "whole"), 1))
    own = device(tmp_path / "killed")
    own.stop_after = 15  # in the second epoch
    with pytest.raises(Killed):
        train(own, 1)
    own.stop_after = None
    own.restart()
    assert frame(train(own, 1)) == whole and own.used == 11
    own.restart()
    assert frame(train(own, 1)) == whole and own.used == 0


def test_what_the_server_hands_out_keeps_the_head_and_predicts(tmp_path: Path) -> None:
    own = device(tmp_path / "one")
    update = train(own, 1)
    averaged = {name: value + np.float32(1) for name, value in update.tensors.items()}
    handed = own.ask("load-1", "load_part", averaged, step=2, after=0, base=0, cut=9)
    assert handed == Settled("load-1", 11)
    head = own.head.as_head()  # type: ignore[union-attr]
    own.restart()
    trainer = own.keeper.predictor(RUN)
    assert trainer is not None and own.head is not None
    assert trainer.parameters()["w"].tobytes() == averaged["w"].tobytes()
    restored = own.head.as_head()
    assert head is not None and restored is not None and np.array_equal(head.weight, restored.weight)
    x = np.zeros((2, 3, 4, 4), np.float32)
    assert restored.logits(trainer.evaluate(x)).shape == (2, CLASSES)


def test_another_run_begins_with_a_new_head(tmp_path: Path) -> None:
    own = device(tmp_path / "one")
    train(own, 1)
    before = own.head.as_head()  # type: ignore[union-attr]
    own.ask("round-1", "local_round", epoch=1, epochs=2, run="run-2", **ROUND)
    after = own.head.as_head()  # type: ignore[union-attr]
    assert before is not None and after is not None and not np.array_equal(before.weight, after.weight)


def test_a_loss_of_the_graphs_own_is_added_to_the_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train(device(tmp_path / "plain"), 1)
    forward = FakeTrainer.forward

    def with_penalty(self: FakeTrainer, x: np.ndarray, **others: Any) -> Any:
        return replace(forward(self, x, **others), loss=0.25)

    monkeypatch.setattr(FakeTrainer, "forward", with_penalty)
    assert train(device(tmp_path / "penalty"), 1).mean_loss == pytest.approx(plain.mean_loss + 0.25)


def test_without_a_head_there_is_no_round(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="needs a head on the device"):
        train(device(tmp_path / "one", "raw-label"), 1)


def test_the_gradient_of_the_head_is_that_of_the_cross_entropy() -> None:
    head = PartHead(CLASSES, bytes(32), RULE)
    head.begin(RUN)
    features, labels = np.random.default_rng(0).random((5, 3), dtype=np.float32), np.array([0, 1, 2, 0, 1])
    found = head.loss(features, labels)
    made = head.as_head()
    assert made is not None
    by_hand = softmax_gradient(made.logits(features), labels)
    assert np.allclose(found.gradient, by_hand.gradient @ made.weight)
