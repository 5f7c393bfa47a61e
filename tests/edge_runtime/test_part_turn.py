"""A device's turn in P3SL: noise at the cut, a split that changes, and a part that is taken up where it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.errors import RefusedError, RemoteProtocolError
from contract.messages import Activations, Ask, Checkpoints, Choice, Settled
from edge_runtime.choose_split import SigmaFloor
from edge_runtime.part_ledger import PartLedger
from edge_runtime.part_turn import adapted_state
from edge_runtime.release_ledger import UNDER_NOISE, ReleaseLedger
from edge_runtime.transforms.cut_noise import CutNoise
from tests.edge_runtime.test_part_keeper import BATCH, COUNT, RATE, SEED, Arrays, Device, gradient_for

FRESH = {
    "tensor:conv1": np.zeros(2, np.float32),
    "tensor:conv2": np.zeros(3, np.float32),
    "momentum:conv1": np.zeros(2, np.float32),
    "momentum:conv2": np.zeros(3, np.float32),
    "steps": np.array([0], np.int64),
}
HELD = {
    "tensor:conv1": np.ones(2, np.float32),
    "momentum:conv1": np.full(2, 0.5, np.float32),
    "steps": np.array([7], np.int64),
}


def turn(tensors: Arrays | None = None) -> Ask:
    return Ask("turn", "take_turn", {"step": 1, "after": 0, "base": 0, "cut": 2}, 1.0, tensors or {})


def test_deeper_own_layers_stay_and_new_ones_come_from_the_server_without_momentum() -> None:
    sent = np.full(3, 9.0, np.float32)
    state = adapted_state(FRESH, HELD, turn({"conv2": sent}))
    assert state.keys() == FRESH.keys()
    assert state["tensor:conv1"] is HELD["tensor:conv1"] and state["momentum:conv1"] is HELD["momentum:conv1"]
    assert state["tensor:conv2"] is sent and not state["momentum:conv2"].any()
    assert state["steps"] == [7]


def test_shallower_the_layers_beyond_are_let_go() -> None:
    shallow = {name: value for name, value in FRESH.items() if "conv2" not in name}
    deep = HELD | {"tensor:conv2": np.ones(3, np.float32), "momentum:conv2": np.ones(3, np.float32)}
    assert adapted_state(shallow, deep, turn()).keys() == shallow.keys()


def test_layers_that_nobody_sent_are_the_packages() -> None:
    assert adapted_state(FRESH, HELD, turn())["tensor:conv2"] is FRESH["tensor:conv2"]


def test_no_server_overwrites_a_layer_of_the_devices_own() -> None:
    state = adapted_state(FRESH, HELD, turn({"conv1": np.full(2, 9.0, np.float32)}))
    assert state["tensor:conv1"] is HELD["tensor:conv1"]


@pytest.mark.parametrize("tensors", [{"conv9": np.ones(2, np.float32)}, {"conv2": np.ones(2, np.float32)}])
def test_tensors_that_are_none_of_the_parts_are_refused(tensors: Arrays) -> None:
    with pytest.raises(RemoteProtocolError, match="none of the part's"):
        adapted_state(FRESH, HELD, turn(tensors))


# -- the keeper


class Noisy(Device):
    """With noise, and a choice of split 2."""

    def restart(self) -> None:
        super().restart()
        self.keeper.noise = CutNoise(bytes(32), bytes(32))
        self.keeper._choose = lambda ask: Choice(ask.ask, 2)

    def take(self, step: int, after: int = 0, cut: int = 2, tensors: Arrays | None = None) -> Any:
        return self.ask(f"turn-{step}", "take_turn", tensors, step=step, after=after, base=0, cut=cut)

    def noisy(self, after: int, batch: int, tensors: Arrays | None = None, sigma: float = 0.5, epoch: int = 1) -> Any:
        numbers = {"after": after, "batch": batch, "epoch": epoch, "place": batch, "size": BATCH, "seed": SEED}
        return self.ask(f"noisy-{after}-{batch}-{sigma}", "noisy_forward", tensors, rate=RATE, sigma=sigma, **numbers)

    def turn(self, step: int, after: int) -> None:
        """A whole turn, settled at `step` + 1."""
        assert self.take(step, after) == Settled(f"turn-{step}", COUNT)
        sent: Arrays = {}
        for batch in range(3):
            reply = self.noisy(step, batch, sent)
            assert isinstance(reply, Activations), reply
            sent = {"gradient": gradient_for(reply)}
        self.settle(step + 1, step, 3, sent)


def test_the_keeper_answers_what_its_device_chooses(tmp_path: Path) -> None:
    tensors = {
        "splits": np.array([2], np.uint16), "sigma": np.ones(1, np.float32),
        "strengths": np.zeros(1, np.float32), "leakage": np.zeros((1, 1), np.float32),
    }  # fmt: skip
    assert Noisy(tmp_path / "a").ask("c", "choose_split", tensors, rule="p3sl", round=1) == Choice("c", 2)


def test_what_leaves_has_the_noise_and_what_is_trained_has_not(tmp_path: Path) -> None:
    """The same gradient moves a noisy device's part as it moves a quiet one's: backward goes through the clean z."""
    noisy, quiet = Noisy(tmp_path / "noisy"), Noisy(tmp_path / "quiet")
    for each, sigma in ((noisy, 0.5), (quiet, 0.0)):
        each.take(1)
        each.reply = each.noisy(1, 0, None, sigma)
    difference = noisy.reply.values - quiet.reply.values
    assert difference.shape == (BATCH, 3) and (difference != 0).all()
    assert noisy.reply.labels.tolist() == quiet.reply.labels.tolist()
    gradient = np.full((BATCH, 3), 0.25, np.float32)
    for each in (noisy, quiet):
        each.settle(2, 1, 1, {"gradient": gradient})
    assert noisy.upload(2).tensors["w"].tolist() == quiet.upload(2).tensors["w"].tolist()


def test_an_image_has_a_draw_for_each_epoch_and_another_at_another_sigma() -> None:
    """Noise that stayed the same would cancel between two epochs; an epoch that is sent again must not be averaged."""
    noise, z, ids = CutNoise(bytes(32), bytes(32)), np.zeros((2, 3, 1), np.float32), [b"one", b"two"]
    first = noise.add(z, ids, 2, 0.5, noise.draw_of("epoch 1", "ask-1"))
    assert np.array_equal(first, noise.add(z, ids, 2, 0.5, noise.draw_of("epoch 1", "ask-2")))
    assert not np.array_equal(first, noise.add(z, ids, 2, 0.5, noise.draw_of("epoch 2", "ask-1")))
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first / 0.5, noise.add(z, ids, 2, 1.0, noise.draw_of("epoch 1", "ask-1")))
    fresh = CutNoise(bytes(32), bytes(32), fresh=True)
    one, other = (fresh.add(z, ids, 2, 0.5, fresh.draw_of("epoch 1", ask)) for ask in ("ask-1", "ask-2"))
    assert not np.array_equal(one, other)


def test_a_part_goes_on_from_turn_to_turn_with_its_momentum(tmp_path: Path) -> None:
    one = Noisy(tmp_path / "one")
    one.turn(1, 0)
    before = one.upload(2).tensors
    assert one.take(3, 2) == Settled("turn-3", COUNT)
    after = one.upload(3).tensors
    assert {name: value.tolist() for name, value in after.items()} == {k: v.tolist() for k, v in before.items()}
    assert len(one.opened) == 1  # nothing was loaded again


def test_killed_in_its_turn_a_device_takes_the_next_one_up_where_it_was_settled(tmp_path: Path) -> None:
    calm, killed = Noisy(tmp_path / "calm"), Noisy(tmp_path / "killed")
    for each in (calm, killed):
        each.turn(1, 0)
        each.take(3, 2)
    killed.noisy(3, 0)
    killed.restart()
    reply = killed.noisy(3, 1, {"gradient": np.zeros((BATCH, 3), np.float32)})
    assert isinstance(reply, Checkpoints)  # the server passes it over
    assert killed.take(4, 3) == Settled("turn-4", COUNT)
    assert killed.upload(4).tensors["w"].tolist() == calm.upload(3).tensors["w"].tolist()


def test_a_turn_that_the_server_knows_nothing_of_does_not_matter(tmp_path: Path) -> None:
    """The reply to its last settle was lost: it goes on from what it holds, and says nothing of checkpoints."""
    device = Noisy(tmp_path / "a")
    device.turn(1, 0)
    device.turn(3, 2)
    held = device.upload(4).tensors["w"].tolist()
    assert device.take(5, 2) == Settled("turn-5", COUNT)  # the server last heard of step 2, which is dropped
    assert device.upload(5).tensors["w"].tolist() == held


def test_a_server_that_begins_anew_gets_the_packages_part(tmp_path: Path) -> None:
    device = Noisy(tmp_path / "a")
    device.turn(1, 0)
    assert device.take(1, 0) == Settled("turn-1", COUNT)
    assert device.upload(1).tensors["w"].tolist() == [2.0, 2.0, 2.0]


def test_less_noise_than_the_floor_never_leaves_and_is_not_on_record(tmp_path: Path) -> None:
    device = Noisy(tmp_path / "a")
    ledger = ReleaseLedger(tmp_path / "ledger", pytest.fail)
    device.keeper.before_release = PartLedger(ledger, "ab" * 32, (8, 8), 1.0, SigmaFloor(0.25, {2: 0.5})).release
    device.take(1)
    for ask in (lambda: device.noisy(1, 0, None, 0.45), lambda: device.forward(1, 0)):
        with pytest.raises(RefusedError, match=r"noise at split 2: here at least 0\.5"):
            ask()
    assert ledger.images == ()
    assert isinstance(device.noisy(1, 0, None, 0.5), Activations)
    (release,) = ledger.of(ledger.images[0])
    assert (release.kind, release.scale, release.cut, release.draws) == (UNDER_NOISE, 0.5, 2, 1)
    assert ledger.releases(ledger.images[0]) == 0  # max_releases counts draws before one frontend


def test_noise_that_is_no_number_is_refused(tmp_path: Path) -> None:
    device = Noisy(tmp_path / "a")
    device.take(1)
    for sigma in (float("nan"), -1.0, float("inf")):
        with pytest.raises(RemoteProtocolError, match="sigma"):
            device.noisy(1, 0, None, sigma)
