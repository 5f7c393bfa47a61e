from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.codec import encode
from contract.cut_gradient import write_gradient
from contract.errors import RemoteProtocolError, TrainingError
from contract.messages import Activations, Ask, Checkpoints, Gradient, Message, Settled, Update
from contract.training import AugmentRule
from edge_runtime.head import softmax_gradient
from edge_runtime.part_head import PartHead
from edge_runtime.part_keeper import PartKeeper, PartRules
from edge_runtime.part_store import PartStore
from tests.edge_runtime.fake_trainer import CLASSES, RULE, FakeTrainer, plan, training_set

RUN, COUNT, BATCH, SEED, RATE = "run-1", 11, 4, 7, 0.125  # 11 images: batches of 4, 4 and 3
WIRE_LABELS = np.array([2, 0, 1])
Arrays = dict[str, np.ndarray]


def frame(message: Message) -> bytes:
    return encode(message, seq=1, ack=0)


class Killed(Exception):
    """The device is stopped."""


@dataclass
class Device:
    """A device on a folder of its own; `restart` is what a kill leaves."""

    folder: Path
    mode: str = "raw-label"
    count: int = COUNT
    changes: dict[str, Any] = field(default_factory=dict)
    stop_after: int | None = None  # images
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.restart()

    def restart(self) -> None:
        self.opened: list[FakeTrainer] = []
        self.used = 0
        self.head = PartHead(CLASSES, bytes(32), RULE) if self.mode == "client-head" else None
        rules = PartRules(plan(**self.changes), self.mode, WIRE_LABELS)
        images = training_set(self.count, rules.plan.augment)
        store = PartStore(self.folder, self.said.append)
        self.keeper = PartKeeper(rules, images, self._open, self.head, store, self._tick)  # type: ignore[arg-type]

    def _open(self, cut: Any) -> FakeTrainer:
        self.opened.append(FakeTrainer(cut))
        return self.opened[-1]

    def _tick(self, images: int) -> None:
        self.used += images
        if self.stop_after is not None and self.used >= self.stop_after:
            raise Killed

    def ask(self, name: str, kind: str, tensors: Arrays | None = None, run: str = RUN, **numbers: Any) -> Any:
        return self.keeper.answer(Ask(name, kind, numbers, 1.0, tensors or {}), run)

    def load(self, step: int, after: int = 0, base: int = 0, tensors: Arrays | None = None, cut: int = 2) -> Any:
        return self.ask(f"load-{step}", "load_part", tensors, step=step, after=after, base=base, cut=cut)

    def forward(
        self, after: int, batch: int, tensors: Arrays | None = None, rate: float = RATE, place: int = -1
    ) -> Any:
        place = batch if place < 0 else place
        numbers = {"after": after, "batch": batch, "epoch": 1, "place": place, "size": BATCH, "seed": SEED}
        return self.ask(f"forward-{after}-{batch}", "forward", tensors, rate=rate, **numbers)

    def settle(self, step: int, after: int, batch: int, tensors: Arrays | None = None, base: int = 0) -> Any:
        numbers = {"step": step, "after": after, "base": base, "batch": batch}
        return self.ask(f"settle-{step}", "settle", tensors, rate=RATE, **numbers)

    def loss(self, after: int, batch: int, values: np.ndarray, name: str = "loss") -> Any:
        return self.ask(f"{name}-{after}-{batch}", "batch_loss", {"values": values}, after=after, batch=batch)

    def upload(self, after: int) -> Any:
        return self.ask(f"upload-{after}", "upload_part", after=after)

    def epoch(self, step: int, after: int, base: int = 0) -> list[bytes]:
        """Forwards of all batches, the server's answer to each, then settled; all that was said."""
        said: list[bytes] = []
        sent: Arrays = {}
        for batch in range(3):
            reply = self.forward(after, batch, sent)
            assert isinstance(reply, Activations), reply
            said.append(frame(reply))
            if self.mode in ("logit-gradient", "client-head"):
                loss = self.loss(after, batch, reply.values)
                said.append(frame(loss))
                sent = {"gradient": loss.gradient}
            else:
                sent = {"gradient": gradient_for(reply)}
        assert self.settle(step, after, 3, sent, base) == Settled(f"settle-{step}", self.count)
        return said


def gradient_for(reply: Activations) -> np.ndarray:
    """What a server might send back: it depends on what it got."""
    return (reply.values * np.float32(0.5) + np.float32(0.25)).astype(np.float32)


def zeros(rows: int) -> Arrays:
    return {"gradient": np.zeros((rows, 3), np.float32)}


def part(device: Device, after: int) -> bytes:
    return frame(device.upload(after))


# --- the steps ---------------------------------------------------------------------------------------------------


def test_batches_move_the_part_as_plain_sgd_by_hand(tmp_path: Path) -> None:
    device = Device(tmp_path / "one")
    assert device.load(1) == Settled("load-1", COUNT)
    device.epoch(2, 1)
    found = device.upload(2)
    w, shift, seen = np.full(3, 2.0), 0.5, 0
    moved_w, moved_shift = np.zeros(3), 0.0
    images = training_set(COUNT)
    for place in range(3):
        means = images.batch(SEED, 1, place, BATCH).images.mean(axis=(2, 3), dtype=np.float64)
        gradient = (means * w + shift) * 0.5 + 0.25
        moved_w = RULE.momentum * moved_w + (gradient * means).sum(axis=0) + RULE.weight_decay * w
        moved_shift = RULE.momentum * moved_shift + gradient.sum() + RULE.weight_decay * shift
        w, shift, seen = w - RATE * moved_w, shift - RATE * moved_shift, seen + len(means)
    assert isinstance(found, Update) and (found.samples, found.count, found.correct) == (COUNT, 0, 0)
    assert found.tensors["w"] == pytest.approx(w, rel=1e-5)
    assert found.tensors["shift"] == pytest.approx(shift, rel=1e-5)
    assert found.tensors["shift"].shape == () and found.tensors["seen"].tolist() == [seen] == [COUNT]


def test_the_same_ask_gets_the_same_bytes_and_moves_nothing_twice(tmp_path: Path) -> None:
    once, twice = Device(tmp_path / "once"), Device(tmp_path / "twice")
    whole = [
        *map(frame, (once.load(1), once.forward(1, 0), once.forward(1, 1, zeros(4)), once.settle(2, 1, 2, zeros(4))))
    ]
    asks = [
        lambda: twice.load(1),
        lambda: twice.forward(1, 0),
        lambda: twice.forward(1, 1, zeros(4)),
        lambda: twice.settle(2, 1, 2, zeros(4)),
    ]
    assert [frame(ask()) for ask in asks for _ in range(3)] == [each for each in whole for _ in range(3)]
    assert part(once, 2) == part(twice, 2) == part(twice, 2)


def test_an_ask_of_the_same_name_with_other_tensors_is_another(tmp_path: Path) -> None:
    """A server on a GPU that went back may come to other weights under the same name."""
    device = Device(tmp_path / "one")
    tensors = {"w": np.ones(3, np.float32), "shift": np.asarray(1, np.float32), "seen": np.zeros(1, np.float32)}
    device.load(1, tensors=tensors)
    device.load(1, tensors=tensors | {"w": np.full(3, 5, np.float32)})
    assert device.upload(1).tensors["w"].tolist() == [5, 5, 5]


def test_an_upload_stays_as_it_was_while_the_part_moves_on(tmp_path: Path) -> None:
    device = Device(tmp_path / "one")
    device.load(1)
    update = device.upload(1)
    before = frame(update)
    device.epoch(2, 1)
    assert frame(update) == before != part(device, 2)


def test_int8_and_float16_gradients_move_the_part(tmp_path: Path) -> None:
    gradient = np.array([[127, -64, 0]] * 4, np.float32) / 128
    found = []
    for precision in ("float32", "float16", "int8"):
        device = Device(tmp_path / precision)
        device.load(1)
        device.forward(1, 0)
        wire, _ = write_gradient(gradient, precision)  # type: ignore[arg-type]
        sent = {"gradient": wire.values} | ({} if wire.scales is None else {"scales": wire.scales})
        device.settle(2, 1, 1, sent)
        found.append(device.upload(2).tensors["w"])
    assert found[0].tolist() == found[1].tolist() and found[2] == pytest.approx(found[0], abs=1e-2)
    assert found[0].tolist() != [2, 2, 2]


def test_a_load_begins_the_optimiser_anew_and_takes_any_cut(tmp_path: Path) -> None:
    device, fresh = Device(tmp_path / "one"), Device(tmp_path / "fresh")
    device.load(1)
    device.epoch(2, 1)
    tensors = dict(device.upload(2).tensors)
    device.load(3, after=2, tensors=tensors, cut=1)
    fresh.load(3, tensors=tensors, cut=1)
    assert device.epoch(4, 3) == fresh.epoch(4, 3)
    assert part(device, 4) == part(fresh, 4)


# --- going on, going back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["raw-label", "logit-gradient", "client-head"])
def test_a_device_that_was_killed_goes_on_from_its_settled_step_bit_for_bit(tmp_path: Path, mode: str) -> None:
    whole, broken = Device(tmp_path / "whole", mode), Device(tmp_path / "broken", mode)
    for device in (whole, broken):
        device.load(1)
    said = [whole.epoch(2, 1), whole.epoch(3, 2)]
    again = [broken.epoch(2, 1)]
    broken.forward(2, 0)
    broken.restart()
    assert broken.forward(2, 1, zeros(4)) == Checkpoints("forward-2-1", (0, 2))
    assert broken.settle(3, 2, 1, zeros(4)) == Checkpoints("settle-3", (0, 2))
    again.append(broken.epoch(3, 2))
    assert said == again and part(whole, 3) == part(broken, 3)
    broken.restart()
    assert part(whole, 3) == part(broken, 3)


def test_a_server_that_goes_back_in_the_middle_of_an_epoch_sees_the_same_again(tmp_path: Path) -> None:
    device = Device(tmp_path / "one", "logit-gradient")
    device.load(1)
    first = device.epoch(2, 1, base=1)
    uploaded = part(device, 2)
    device.epoch(2, 1, base=1)
    device.forward(2, 0)
    assert isinstance(device.loss(2, 0, np.zeros((4, 3), np.float32)), Gradient)
    device.forward(2, 1, zeros(4))
    assert device.epoch(2, 1, base=1) == first and part(device, 2) == uploaded


@pytest.mark.parametrize("restarted", [False, True])
def test_going_back_to_the_server_s_checkpoint_drops_what_came_later(tmp_path: Path, restarted: bool) -> None:
    whole, device = Device(tmp_path / "whole"), Device(tmp_path / "one")
    bases = {2: 0, 3: 2, 4: 2, 5: 4, 6: 4, 7: 6}
    for each in (whole, device):
        each.load(1)
        for step, base in bases.items():
            each.epoch(step, step - 1, base)
    if restarted:
        device.restart()
    assert device.upload(9) == Checkpoints("upload-9", (0, 4, 6, 7))
    device.epoch(5, 4, base=4)  # the server has lost 6 and stands at 4
    assert device.upload(9) == Checkpoints("upload-9", (0, 4, 5))
    device.epoch(6, 5, base=4)
    device.epoch(7, 6, base=6)
    assert part(device, 7) == part(whole, 7)


def test_an_ask_about_a_part_that_was_never_here_is_answered_by_what_is(tmp_path: Path) -> None:
    device = Device(tmp_path / "one")
    assert device.forward(0, 0) == Checkpoints("forward-0-0", (0,))
    assert device.upload(3) == Checkpoints("upload-3", (0,))
    device.load(1)
    assert device.settle(3, 2, 0) == Checkpoints("settle-3", (0, 1))
    assert device.loss(1, 0, np.zeros((4, 3), np.float32)) == Checkpoints("loss-1-0", (0, 1))  # no batch waits
    assert device.ask("upload-1", "upload_part", run="run-2", after=1) == Checkpoints("upload-1", (0,))


def test_de_04_a_torn_newest_step_is_set_aside_and_the_one_before_is_offered(tmp_path: Path) -> None:
    whole, device = Device(tmp_path / "whole"), Device(tmp_path / "one")
    for each in (whole, device):
        each.load(1)
        each.epoch(2, 1)
        each.epoch(3, 2, base=2)
    torn = device.folder / f"part.{RUN}.3.safetensors"
    torn.write_bytes(torn.read_bytes()[:-7])
    device.restart()
    assert device.upload(3) == Checkpoints("upload-3", (0, 2))
    assert "unreadable" in device.said[0] and torn.with_name(torn.name + ".bad").exists()
    device.epoch(3, 2, base=2)
    assert part(device, 3) == part(whole, 3)


def test_another_run_drops_the_files_of_the_one_before(tmp_path: Path) -> None:
    device = Device(tmp_path / "one")
    device.load(1)
    device.ask("load-1", "load_part", run="run-2", step=1, after=0, base=0, cut=2)
    assert [path.name for path in device.folder.iterdir()] == ["part.run-2.1.safetensors"]
    assert device.upload(1) == Checkpoints("upload-1", (0,))


# --- refused -----------------------------------------------------------------------------------------------------


def begun(folder: Path, mode: str = "raw-label") -> Device:
    """A device with a batch that waits for its gradient."""
    device = Device(folder, mode)
    device.load(1)
    device.forward(1, 0)
    return device


WRONG = {
    "missing": {},
    "rows": zeros(3),
    "width": {"gradient": np.zeros((4, 2), np.float32)},
    "int8 without scales": {"gradient": np.zeros((4, 3), np.int8)},
    "scales without int8": {**zeros(4), "scales": np.ones(4, np.float32)},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_gradient_that_does_not_fit_is_refused_and_the_batch_still_waits(tmp_path: Path, name: str) -> None:
    device, whole = begun(tmp_path / "one"), begun(tmp_path / "whole")
    with pytest.raises(RemoteProtocolError, match="gradient"):
        device.forward(1, 1, WRONG[name])
    with pytest.raises(RemoteProtocolError, match="gradient"):
        device.settle(2, 1, 1, WRONG[name])
    for each in (device, whole):
        each.settle(2, 1, 1, zeros(4))
    assert part(device, 2) == part(whole, 2)


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -0.125])
def test_a_learning_rate_that_is_none_is_refused(tmp_path: Path, rate: float) -> None:
    device = begun(tmp_path / "one")
    with pytest.raises(RemoteProtocolError, match="learning rate of 0 or more"):
        device.forward(1, 1, zeros(4), rate=rate)
    numbers = {"cut": 9, "epoch": 1, "epochs": 1, "size": BATCH, "seed": SEED}
    with pytest.raises(RemoteProtocolError, match="learning rate of 0 or more"):
        device.ask("round", "local_round", rate=rate, **numbers)
    assert isinstance(device.forward(1, 1, zeros(4)), Activations)


@pytest.mark.parametrize(
    ("tensors", "cut"),
    [({"weight": np.ones(3, np.float32)}, 2), ({"weight": np.ones(3, np.float32)}, 1), ({}, 3)],
)
def test_a_part_that_does_not_fit_is_refused_and_nothing_has_changed(tmp_path: Path, tensors: Arrays, cut: int) -> None:
    device, whole = Device(tmp_path / "one", "client-head"), Device(tmp_path / "whole", "client-head")
    for each in (device, whole):
        each.load(1)
        each.epoch(2, 1)
    for after in (2, 0):
        with pytest.raises(RemoteProtocolError):
            device.load(3, after=after, tensors=tensors, cut=cut)
    assert device.epoch(3, 2) == whole.epoch(3, 2)
    assert part(device, 3) == part(whole, 3)


def test_an_unknown_cut_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(RemoteProtocolError, match="cut 3, the package has 1, 2, 9"):
        Device(tmp_path / "one").load(1, cut=3)


@pytest.mark.parametrize(("step", "after"), [(0, 0), (1, 1), (1, 2)])
def test_a_step_that_does_not_follow_the_one_before_is_refused(tmp_path: Path, step: int, after: int) -> None:
    device = Device(tmp_path / "one")
    with pytest.raises(RemoteProtocolError, match=f"a step after {after}, found {step}"):
        device.load(step, after=after)
    device.load(2)
    with pytest.raises(RemoteProtocolError, match="a step after 2, found 2"):
        device.settle(2, 2, 0)


def test_a_batch_that_the_epoch_does_not_have_is_refused(tmp_path: Path) -> None:
    device = Device(tmp_path / "one")
    device.load(1)
    with pytest.raises(RemoteProtocolError, match="a batch from 0 to 2 of 11 images, found 3"):
        device.forward(1, 0, place=3)


def test_a_step_that_must_not_be_taken_changes_nothing_and_its_batch_is_gone(tmp_path: Path) -> None:
    device, whole = begun(tmp_path / "one"), begun(tmp_path / "whole")
    huge = {"gradient": np.full((4, 3), 3e38, np.float32)}
    with pytest.raises(TrainingError, match="not finite"), np.errstate(over="ignore"):
        device.settle(2, 1, 1, huge)
    assert device.settle(2, 1, 1, zeros(4)) == Checkpoints("settle-2", (0, 1))
    assert device.epoch(2, 1) == whole.epoch(2, 1)


def test_activations_that_float16_cannot_hold_are_an_error_of_the_training(tmp_path: Path) -> None:
    tensors = {"w": np.full(3, 1e6, np.float32), "shift": np.asarray(1e6, np.float32), "seen": np.ones(1, np.float32)}
    half = Device(tmp_path / "half", changes={"activations": "float16"})
    half.load(1)
    assert half.forward(1, 0).values.dtype == np.float16
    half.load(2, after=1, tensors=tensors)
    with pytest.raises(TrainingError, match="not finite in float16"):
        half.forward(2, 0)
    full = Device(tmp_path / "full")
    full.load(1, tensors=tensors)
    assert full.forward(1, 0).values.dtype == np.float32


# --- labels and losses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["raw-label", "permuted-label", "logit-gradient", "client-head"])
def test_the_label_mode_decides_what_is_told_of_labels(tmp_path: Path, mode: str) -> None:
    device = Device(tmp_path / "one", mode)
    device.keeper._rules = PartRules(plan(), mode, WIRE_LABELS if mode == "permuted-label" else np.arange(CLASSES))
    device.load(1)
    reply = device.forward(1, 0)
    true = training_set(COUNT).batch(SEED, 1, 0, BATCH).labels
    assert (reply.batch, reply.total, reply.split, len(reply.values)) == (0, COUNT, "train", 4)
    if mode == "raw-label":
        assert reply.labels.dtype == np.uint16 and reply.labels.tolist() == true.tolist()
    elif mode == "permuted-label":
        assert reply.labels.tolist() == WIRE_LABELS[true].tolist() != true.tolist()
    else:
        assert reply.labels is None


def test_the_loss_of_logits_is_that_of_the_batch_that_waits(tmp_path: Path) -> None:
    device = begun(tmp_path / "one", "logit-gradient")
    logits = np.random.default_rng(0).normal(size=(4, CLASSES)).astype(np.float32)
    expected = softmax_gradient(logits, training_set(COUNT).batch(SEED, 1, 0, BATCH).labels)
    reply = device.loss(1, 0, logits)
    assert (reply.mean_loss, reply.correct, reply.count) == (expected.mean_loss, expected.correct, 4)
    assert reply.gradient.tobytes() == expected.gradient.tobytes()


@pytest.mark.parametrize("shape", [(3, CLASSES), (5, CLASSES), (4, CLASSES + 1)])
def test_logits_of_another_batch_or_other_classes_are_refused(tmp_path: Path, shape: tuple[int, int]) -> None:
    device = begun(tmp_path / "one", "logit-gradient")
    with pytest.raises(RemoteProtocolError, match="expected"):
        device.loss(1, 0, np.zeros(shape, np.float32))
    assert isinstance(device.loss(1, 0, np.zeros((4, CLASSES), np.float32)), Gradient)


def test_a_loss_that_is_asked_for_twice_counts_once(tmp_path: Path) -> None:
    device = begun(tmp_path / "one", "logit-gradient")
    logits = np.zeros((4, CLASSES), np.float32)
    for name in ("loss", "loss", "other"):
        device.loss(1, 0, logits, name)
    device.settle(2, 1, 1, zeros(4))
    update = device.upload(2)
    assert (update.count, update.mean_loss) == (4, pytest.approx(np.log(CLASSES)))
    device.restart()
    assert frame(device.upload(2)) == frame(update)
    device.load(3, after=2)
    assert device.upload(3).count == 0


def test_a_head_of_its_own_moves_once_a_step_and_is_held_with_the_part(tmp_path: Path) -> None:
    device = begun(tmp_path / "one", "client-head")
    assert device.head is not None
    values = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    first = device.loss(1, 0, values)
    before = device.head.state()["weight"].copy()
    assert first.gradient.shape == (4, 5)
    assert frame(device.loss(1, 0, values)) == frame(first)
    assert device.loss(1, 0, values, "other").mean_loss == first.mean_loss
    assert device.head.state()["weight"].tolist() == before.tolist()  # a loss moves nothing
    device.settle(2, 1, 1, zeros(4))
    moved = {name: value.tobytes() for name, value in device.head.state().items()}
    assert int(device.head.state()["steps"][0]) == 1 and moved["weight"] != before.tobytes()
    device.settle(2, 1, 1, zeros(4))
    assert {name: value.tobytes() for name, value in device.head.state().items()} == moved
    device.restart()
    device.upload(2)
    assert {name: value.tobytes() for name, value in device.head.state().items()} == moved
    assert device.load(3, after=2, tensors=dict(device.upload(2).tensors)) == Settled("load-3", COUNT)
    assert {name: value.tobytes() for name, value in device.head.state().items()} == moved  # a load leaves it alone


def test_a_part_for_a_head_that_is_not_held_is_not_loaded(tmp_path: Path) -> None:
    assert Device(tmp_path / "one", "client-head").load(3, after=2) == Checkpoints("load-3", (0,))
    assert Device(tmp_path / "two").load(3, after=2) == Settled("load-3", COUNT)  # all that it holds comes with it


# --- rounds of its own -------------------------------------------------------------------------------------------


def local_round(device: Device, cut: int = 9, epochs: int = 3, size: int = BATCH, tensors: Arrays | None = None) -> Any:
    numbers = {"cut": cut, "epoch": 4, "epochs": epochs, "size": size, "seed": SEED}
    return device.ask("round-1", "local_round", tensors, rate=RATE, **numbers)


def test_a_local_round_is_plain_training_of_the_whole_part(tmp_path: Path) -> None:
    device, trainer, images = Device(tmp_path / "one"), FakeTrainer(plan().cuts[2]), training_set(COUNT)
    update = local_round(device)
    loss, correct = 0.0, 0
    for epoch in (4, 5, 6):
        loss, correct = 0.0, 0
        for place in range(3):
            batch = images.batch(SEED, epoch, place, BATCH)
            out = trainer.forward(batch.images, targets=images.one_hot(batch.labels))
            trainer.backward()
            trainer.step(RATE)
            assert out.loss is not None
            loss += out.loss * len(batch.labels)
            correct += int((out.z.argmax(axis=1) == batch.labels).sum())
    assert (update.samples, update.count, update.correct) == (COUNT, COUNT, correct)
    assert update.mean_loss == pytest.approx(loss / COUNT)
    assert {name: each.tobytes() for name, each in update.tensors.items()} == {
        name: each.tobytes() for name, each in trainer.tensors.items()
    }
    assert device.used == 3 * COUNT


def test_a_masked_whole_model_sees_other_patches_in_every_epoch(tmp_path: Path) -> None:
    masked = replace(plan().cuts[2], kept=2, patches=16)
    device = Device(tmp_path / "one", count=3, changes={"cuts": (masked,)})
    local_round(device)
    kept = [np.asarray(each) for each in device.opened[0].kept]
    assert [each.shape for each in kept] == [(3, 2)] * 3  # one batch in each of three epochs
    assert len({each.tobytes() for each in kept}) == 3


@pytest.mark.parametrize("stop_after", [4, COUNT, 2 * COUNT - 1, 2 * COUNT + 4])
def test_an_interrupted_round_goes_on_bit_for_bit(tmp_path: Path, stop_after: int) -> None:
    expected = frame(local_round(Device(tmp_path / "whole")))
    device = Device(tmp_path / "one", stop_after=stop_after)
    with pytest.raises(Killed):
        local_round(device)
    device.stop_after = None
    device.restart()
    assert frame(local_round(device)) == expected
    assert device.used == 3 * COUNT - (stop_after - 1) // COUNT * COUNT  # whole epochs are not trained again
    device.restart()
    assert frame(local_round(device)) == expected and device.used == 0


def test_a_round_is_not_gone_on_with_from_other_parameters(tmp_path: Path) -> None:
    tensors = {"w": np.ones(3, np.float32), "shift": np.asarray(1, np.float32), "seen": np.zeros(1, np.float32)}
    expected = frame(local_round(Device(tmp_path / "whole"), tensors=tensors))
    device = Device(tmp_path / "one")
    assert frame(local_round(device)) != expected
    device.restart()
    assert frame(local_round(device, tensors=tensors)) == expected


def test_a_round_leaves_the_settled_part_alone(tmp_path: Path) -> None:
    device, whole = Device(tmp_path / "one"), Device(tmp_path / "whole")
    for each in (device, whole):
        each.load(1, cut=9)
    local_round(device)
    assert device.epoch(2, 1) == whole.epoch(2, 1)


@pytest.mark.parametrize("cut", [1, 2])
def test_a_part_without_a_loss_cannot_be_trained_alone_and_nothing_has_changed(tmp_path: Path, cut: int) -> None:
    device, whole = begun(tmp_path / "one"), begun(tmp_path / "whole")
    with pytest.raises(RemoteProtocolError, match=f"cut {cut} has no loss of its own"):
        local_round(device, cut)
    assert frame(device.settle(2, 1, 1, zeros(4))) == frame(whole.settle(2, 1, 1, zeros(4)))
    assert part(device, 2) == part(whole, 2)


@pytest.mark.parametrize(("changes", "text"), [({"epochs": 0}, "one epoch"), ({"size": 0}, "batches of one image")])
def test_a_round_of_nothing_is_refused(tmp_path: Path, changes: dict[str, int], text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=text):
        local_round(Device(tmp_path / "one"), **changes)


# --- prediction --------------------------------------------------------------------------------------------------


def test_predictions_are_made_by_the_newest_part_of_the_run(tmp_path: Path) -> None:
    device = Device(tmp_path / "one", changes={"augment": AugmentRule()})
    assert device.keeper.predictor(RUN) is None
    device.load(1)
    device.epoch(2, 1)
    expected = device.upload(2).tensors["w"].tolist()
    device.forward(2, 0)
    device.forward(2, 1, {"gradient": np.ones((4, 3), np.float32)})  # not settled
    trainer = device.keeper.predictor(RUN)
    assert trainer is not None and trainer.parameters()["w"].tolist() == expected
    assert device.keeper.predictor("run-2") is None
