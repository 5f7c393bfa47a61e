"""FEDBFPT: one block and the head of a round, shallow blocks first; and rounds that ask some devices only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("timm")

from contract.messages import Update  # noqa: E402
from contract.training import OptimiserRule  # noqa: E402
from server_runtime import strategies  # noqa: E402
from server_runtime.split_model import Shipped  # noqa: E402
from server_runtime.strategies import Ask, Reply, Settings  # noqa: E402
from tests.server_runtime.tiny_training import (  # noqa: E402
    Device,
    Drive,
    Whole,
    optimiser_of,
    pictures,
    shipped,
    weights_of,
)

SETTINGS = Settings("raw-label", 0.0, 6, 0, 0.0, 0, batch=8, learning_rate=1e-3, local_epochs=2)
ADAMW = OptimiserRule("adamw", 0.0, 0.01)


@pytest.fixture(scope="module")
def of(tmp_path_factory: pytest.TempPathFactory) -> Shipped:
    made = shipped(tmp_path_factory.mktemp("export") / "whole.backend", cuts=(), whole=True, rule=ADAMW)
    (whole,) = made.plan.cuts
    return replace(made, plan=replace(made.plan, cuts=(replace(whole, layer="head"),)))  # as the exporter names it


class KeepingDevice(Device):
    """A device that keeps the whole model from round to round, as `edge_runtime.round_keeper` does."""

    def _block_round(self) -> Update:
        n = self._numbers
        if n["after"] == 0:
            self._kept = Whole(self._shipped, None)
        for name, value in self._tensors.items():
            self._named(name).data.copy_(torch.from_numpy(np.array(value)))
        trained = [name for name in self._names_of() if name.startswith((f"blocks.{n['block']}.", "head."))]
        optimiser = optimiser_of(self._shipped.plan.optimiser, [self._named(name) for name in trained])
        losses, correct = 0.0, 0
        for epoch in range(n["epoch"], n["epoch"] + n["epochs"]):
            losses, correct = 0.0, 0
            for place in range(-(-len(self.ids) // n["size"])):
                chosen = self.batch(n["seed"], epoch, place, n["size"])
                loss, hits = self._kept.descend(self.images[chosen], self.labels[chosen], optimiser, n["rate"])
                losses, correct = losses + loss * len(chosen), correct + hits
        tensors = {name: self._named(name).detach().numpy().copy() for name in trained}
        return Update(self._ask, len(self.ids), len(self.ids), losses / len(self.ids), correct, tensors)

    def _names_of(self) -> list[str]:
        body = [name for name, _ in self._kept.body.named_parameters()]
        return [*body, "head.weight", "head.bias"]

    def _named(self, name: str) -> torch.nn.Parameter:
        if name.startswith("head."):
            return self._kept.head.get_parameter(name[5:])
        return self._kept.body.get_parameter(name)


def devices(of: Shipped, count: int = 2) -> dict[str, Device]:
    return {f"pi-{number}": KeepingDevice(f"pi-{number}", of, *pictures(16, number)) for number in range(count)}


def builder(of: Shipped, settings: Settings, name: str = "fed_bfpt") -> Callable[[], strategies.PartStrategy]:
    return lambda: strategies.find(name).build(of, settings)


def test_a_round_moves_one_block_and_the_head(of: Shipped) -> None:
    sent: list[set[str]] = []

    def note(ask: Ask, device: str, reply: Reply) -> Reply:
        if isinstance(reply, Update):
            sent.append(set(reply.tensors))
        return reply

    run = Drive(builder(of, SETTINGS), devices(of), change=note)
    strategy = run.run()
    for record, one, other in zip(run.records, sent[::2], sent[1::2], strict=True):
        start = f"blocks.{record['block']}."
        assert one == other and {name.startswith((start, "head.")) for name in one} == {True}
        assert record["macs_devices"] > 0
    moved = {f"blocks.{record['block']}." for record in run.records}
    for name, value in weights_of(strategy).items():
        before = of.module.state_dict().get(name.removeprefix("backend."))
        if before is not None:
            touched = any(name.removeprefix("backend.").startswith(start) for start in moved)
            assert bool((before.numpy() != value).any()) == touched, name
    assert run.records[-1]["loss"] < run.records[0]["loss"]


def test_what_a_device_has_is_not_sent_again(of: Shipped) -> None:
    run = Drive(builder(of, SETTINGS), devices(of))
    run.run()
    first, *others = [ask for ask in run.asks if ask.kind == "block_round"]
    assert set(first.tensors["pi-0"]) == {"head.weight", "head.bias"}
    for ask, record in zip(others, run.records, strict=False):
        start = f"blocks.{record['block']}."  # of the round before
        assert {name.startswith((start, "head.")) for name in ask.tensors["pi-0"]} == {True}


def test_shallow_blocks_come_first_and_deep_ones_last(of: Shipped) -> None:
    chosen: dict[int, list[int]] = {0: [], 1: []}
    for seed in range(16):
        settings = replace(SETTINGS, seed=seed, epochs=2, local_epochs=1)
        run = Drive(builder(of, settings), devices(of, 1))
        run.run()
        for place, record in enumerate(run.records):
            chosen[place].append(record["block"])
    assert np.mean(chosen[0]) < 1.0 < np.mean(chosen[1])  # of blocks 0, 1, 2


def test_a_server_that_stops_goes_on_to_the_same_bits(of: Shipped, tmp_path: Path) -> None:
    one = weights_of(Drive(builder(of, SETTINGS), devices(of)).run())
    stopped = builder(of, SETTINGS)()
    run = Drive(lambda: stopped, devices(of))
    run.run()
    state = stopped.state()
    again = builder(of, SETTINGS)()
    again.load(run.site, state)
    assert again.state().values == state.values
    for name, value in weights_of(again).items():
        assert value.tobytes() == one[name].tobytes()


@pytest.mark.parametrize("name", ["fed_avg", "fed_bfpt"])
def test_a_fraction_of_the_devices_is_asked_in_a_round(of: Shipped, name: str) -> None:
    run = Drive(builder(of, replace(SETTINGS, fraction=0.5, epochs=12), name), devices(of, 4))
    run.run()
    rounds = [tuple(ask.tensors) for ask in run.asks if ask.kind.endswith("_round")]
    assert {len(each) for each in rounds} == {2} and len(set(rounds)) > 1
    assert len(run.asks[-1].tensors) == 4  # all get what was trained
