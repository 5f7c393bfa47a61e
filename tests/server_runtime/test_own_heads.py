"""Rounds of devices with heads of their own: EEFT and what it is compared to (algorithms.md 2.4)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the server's training process needs torch")

import safetensors.torch  # noqa: E402

from contract.errors import ConfigError, TrainingError  # noqa: E402
from contract.messages import Settled, Update  # noqa: E402
from contract.training import HOLDS, OWN_HEADS, TrainingCut  # noqa: E402
from server_runtime import strategies  # noqa: E402
from server_runtime.own_heads import OwnHeads, Part, Released  # noqa: E402
from server_runtime.similarity import sigmoid  # noqa: E402
from server_runtime.strategies import Ask, Record, Settings, Site, State, fed_mtl, selective_masking  # noqa: E402

CUT = TrainingCut(
    4, 4, "skips", "f", "b", "e", (6,), (6,), None, None, ("alpha", "skip.weight"), ("frozen",), ("bn.running_mean",),
    0, 0, "own-head",
)  # fmt: skip
INITIAL = {
    "alpha": np.full(3, -3, np.float32), "skip.weight": np.arange(4, dtype=np.float32).reshape(2, 2),
    "bn.running_mean": np.zeros(2, np.float32),
}  # fmt: skip
TASK = {"a1": 0.0, "a2": 0.0, "b1": 1.0, "b2": 1.0}  # where each device's factors go
Answer = Callable[[str, Part, int], "Part | None"]  # device, its part, round -> what it trained; None: it is away


def drift(device: str, part: Part, number: int) -> Part:
    """Devices of one task move alike, nearly."""
    rng = np.random.default_rng([number, *device.encode()])
    moved = {name: array + 0.01 * rng.standard_normal(array.shape).astype(np.float32) for name, array in part.items()}
    moved["alpha"] = moved["alpha"] + np.float32(TASK.get(device, 0.0)) * np.array([1, -1, 1], np.float32)
    return moved


class World:
    """Drives a strategy as the conductor would; at every round it is saved, loaded anew and goes on."""

    def __init__(
        self, name: str, answer: Answer = drift, devices: Mapping[str, float] = TASK, **settings: object
    ) -> None:
        self._name, self._answer = name, answer
        self._settings = Settings("client-head", 0.0, epochs=6, augmentations=0, replaced=0.0, seed=1, **settings)
        self.site = Site("federation", tuple(devices), 0)
        self.after: Callable[[], object] = lambda: None
        self.asks: list[Ask] = []
        self.lines: list[dict] = []
        self.trained: list[dict[str, Part]] = []

    def build(self) -> OwnHeads:
        return strategies.find(self._name).build(Released(CUT, INITIAL), self._settings)

    def run(self) -> OwnHeads:
        strategy = self.build()
        conduct, sent = strategy.run(self.site), None
        while True:
            try:
                step = next(conduct) if sent is None else conduct.send(sent)
            except StopIteration:
                return strategy
            sent = {}
            if isinstance(step, Ask):
                self.asks.append(step)
                sent = self._replies(step)
            elif isinstance(step, Record):
                self.lines.append(dict(step.values))
                kept = strategy.state()
                values = json.loads(json.dumps(dict(kept.values), allow_nan=False))
                tensors = safetensors.torch.load(safetensors.torch.save(dict(kept.tensors)))
                strategy = self.build()
                strategy.load(self.site, State(tensors, values))
                conduct, sent = strategy.run(self.site), None

    def _replies(self, ask: Ask) -> dict[str, Update | Settled]:
        if ask.kind == "load_part":
            self.handed = dict(ask.tensors)
            return {device: Settled(ask.name, 5) for device in ask.tensors}
        replies, number = {}, len(self.lines)
        for place, (device, part) in enumerate(ask.tensors.items()):
            made = self._answer(device, part or INITIAL, number)
            if made is not None:
                replies[device] = Update(ask.name, 5 + place, 5 + place, 0.5, 2, dict(made))
        self.after()
        self.trained.append({device: reply.tensors for device, reply in replies.items()})
        return replies


def equal(one: Part, other: Part) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def mean(parts: list[Part]) -> dict[str, np.ndarray]:
    return {name: np.mean([part[name].astype(np.float64) for part in parts], axis=0) for name in parts[0]}


def close(one: Part, other: Part) -> bool:
    return all(np.allclose(one[name], other[name], rtol=1e-6, atol=1e-7) for name in other)


def test_devices_of_one_task_are_averaged_with_each_other() -> None:
    world = World("eeft", alone=2)
    strategy = world.run()
    last = world.trained[-1]
    for a, b in (("a1", "a2"), ("b1", "b2")):
        assert close(strategy.part_of(a), mean([last[a], last[b]]))
        assert equal(strategy.part_of(a), strategy.part_of(b)) and equal(world.handed[a], strategy.part_of(a))
    assert json.loads(world.lines[-1]["groups"]) == {"a1": 0, "a2": 0, "b1": 1, "b2": 1}
    told = json.loads(world.lines[-1]["alpha"])
    assert told["b1"] == pytest.approx(sigmoid(last["b1"]["alpha"]).tolist(), abs=1e-6)


def test_a_device_is_averaged_with_nobody_in_its_first_rounds() -> None:
    world = World("eeft", alone=2, threshold="inf")
    world.run()
    for number in (1, 2):  # asked with what it trained the round before
        for device, part in world.asks[number].tensors.items():
            assert equal(part, world.trained[number - 1][device])
    assert [line["groups"] is None for line in world.lines] == [True, True, False, False, False, False]
    assert close(world.asks[3].tensors["a1"], mean(list(world.trained[2].values())))


def test_threshold_0_is_local_training_and_infinity_the_average_over_all() -> None:
    alone, together = World("eeft", alone=0, threshold="0"), World("eeft", alone=0, threshold="inf")
    local, averaged = alone.run(), together.run()
    for device in TASK:
        assert equal(local.part_of(device), alone.trained[-1][device])
        assert close(averaged.part_of(device), mean(list(together.trained[-1].values())))


def test_averaging_identical_modules_changes_no_bit() -> None:
    same = {name: array + np.float32(0.1) for name, array in INITIAL.items()}
    for name in ("eeft", "fed_avg_own_heads"):
        strategy = World(name, lambda device, part, number: same, alone=0).run()
        assert all(equal(strategy.part_of(device), same) for device in TASK)


@pytest.mark.parametrize("name", sorted(name for name, holds in HOLDS.items() if holds in OWN_HEADS))
def test_the_order_of_devices_is_irrelevant(name: str) -> None:
    one = World(name, alone=0).run()
    other = World(name, alone=0, devices=dict(reversed(TASK.items())))
    other_strategy = other.run()
    if name == "fed_avg_own_heads" or name == "selective_masking":
        return  # weighted by images, which follow the order here
    assert all(close(one.part_of(device), other_strategy.part_of(device)) for device in TASK)


def test_a_device_that_joins_late_starts_from_the_package_and_is_first_left_alone() -> None:
    def answer(device: str, part: Part, number: int) -> Part | None:
        if device == "b2" and number < 2:
            return None
        if device == "b2" and number == 2:
            assert equal(part, INITIAL)
        return drift(device, part, number)

    world = World("eeft", answer, alone=2, threshold="inf", quorum=3)
    strategy = world.run()
    assert [line["devices"] for line in world.lines] == [3, 3, 4, 4, 4, 4]
    assert set(json.loads(world.lines[3]["groups"])) == {"a1", "a2", "b1"}  # its own rounds begin when it comes
    others = [world.trained[3][device] for device in ("a1", "a2", "b1")]
    assert close(world.asks[4].tensors["a1"], mean(others))
    assert equal(world.asks[4].tensors["b2"], world.trained[3]["b2"])
    assert close(strategy.part_of("b2"), mean(list(world.trained[-1].values())))
    assert strategy.last_part("b2").tensors["b2"].keys() == INITIAL.keys()


def test_an_update_that_is_not_finite_is_left_out_and_noted() -> None:
    def answer(device: str, part: Part, number: int) -> Part:
        moved = drift(device, part, number)
        if device == "a2" and number == 5:
            spoiled.append(moved["alpha"])
        return moved

    spoiled: list[np.ndarray] = []
    world = World("eeft", answer, alone=0, threshold="inf")
    world.after = lambda: [array.fill(np.nan) for array in spoiled]  # after the honest device has made its message
    strategy = world.run()
    assert world.lines[-1]["quarantined"] == "a2: not finite: alpha"
    assert close(strategy.part_of("a1"), mean([world.trained[-1][device] for device in ("a1", "b1", "b2")]))
    assert equal(strategy.part_of("a2"), world.asks[5].tensors["a2"])


def test_a_part_of_another_model_is_refused() -> None:
    odd = World("eeft", lambda device, part, number: {**INITIAL, "backbone.conv1.weight": np.zeros(1, np.float32)})
    with pytest.raises(TrainingError, match="3 rounds in a row .*unknown backbone.conv1.weight"):
        odd.run()
    with pytest.raises(ConfigError, match="threshold must be auto"):
        World("eeft", threshold="near").build()


def test_fine_tuning_averages_nothing_and_federated_averaging_weighs_by_images() -> None:
    world = World("fine_tuning")
    strategy = world.run()
    assert all(equal(strategy.part_of(device), world.trained[-1][device]) for device in TASK)
    world = World("fed_avg_own_heads")
    strategy, last, n = world.run(), world.trained[-1], np.arange(5, 9)
    expected = {name: np.average([last[device][name] for device in TASK], axis=0, weights=n) for name in INITIAL}
    assert all(close(strategy.part_of(device), expected) for device in TASK)


def test_fed_mtl_listens_most_to_devices_whose_updates_are_alike() -> None:
    rng = np.random.default_rng(0)
    u, v = rng.standard_normal((2, 50)).astype(np.float32)
    w = fed_mtl.weights(np.stack([u, 1.1 * u, v, np.zeros_like(u)]))
    assert w.sum(axis=1) == pytest.approx(np.ones(4)) and w[0, 1] == pytest.approx(w[0, 0])
    assert w[0, 1] > 10 * w[0, 2] and np.isfinite(w).all()
    assert fed_mtl.weights(np.stack([u, u])) == pytest.approx(np.full((2, 2), 0.5))
    world = World("fed_mtl")
    strategy = world.run()
    together = float(np.abs(strategy.part_of("a1")["alpha"] - strategy.part_of("a2")["alpha"]).max())
    apart = float(np.abs(strategy.part_of("a1")["alpha"] - strategy.part_of("b1")["alpha"]).max())
    assert together < apart


def test_masking_keeps_the_largest_changes_and_whole_statistics() -> None:
    before = {"w": np.zeros((10, 10), np.float32), "v": np.zeros(100, np.float32), "bn": np.zeros(3, np.float32)}
    rng = np.random.default_rng(0)
    part = {name: rng.standard_normal(array.shape).astype(np.float32) for name, array in before.items()}
    masked = selective_masking.mask(part, before, ("w", "v"))
    kept = np.concatenate([masked["w"].reshape(-1), masked["v"]])
    whole = np.concatenate([part["w"].reshape(-1), part["v"]])
    assert np.count_nonzero(kept) == 24 and np.array_equal(masked["bn"], part["bn"])
    assert np.abs(whole[kept == 0]).max() < np.abs(kept[kept != 0]).min()
    assert selective_masking.masked_bytes(part, ("w", "v")) == 24 * 4 + 200 // 8 + 3 * 4
