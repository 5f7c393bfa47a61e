"""Shift-aware prototypes as a strategy: algorithms.md 5.4, invariants 4 to 9, with devices of torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("timm")

from contract.cut_gradient import WireGradient, read_gradient  # noqa: E402
from contract.errors import ConfigError, TrainingError  # noqa: E402
from contract.messages import Activations, Prototypes, Settled, Update, tensors_of  # noqa: E402
from contract.training import PROJECTION, OptimiserRule, PrototypeRule  # noqa: E402
from edge_runtime.part_prototypes import PartPrototypes  # noqa: E402
from exporter import prototypes  # noqa: E402
from exporter.models import family_of  # noqa: E402
from server_runtime import backend, strategies  # noqa: E402
from server_runtime.plan import Plan  # noqa: E402
from server_runtime.split_model import Shipped  # noqa: E402
from server_runtime.strategies import Ask, PartStrategy, Reply, Settings, State  # noqa: E402
from tests.golden.samples import MANIFEST  # noqa: E402
from tests.server_runtime.tiny_training import (  # noqa: E402
    CLASSES,
    RESNET,
    VIT,
    Device,
    Drive,
    Whole,
    optimiser_of,
    pictures,
    plan_of,
    step_at,
    weights_of,
    whole_model,
)

SETTINGS = Settings("logit-gradient", 0.0, 3, 0, 0.0, 0, batch=8, learning_rate=0.02)
RULE = PrototypeRule(dimension=6, distance="cosine", normalise=True, scale=5.0)
PLAIN = replace(RULE, normalise=False, scale=1.0)


def shipped(projected: PrototypeRule = RULE, model: tuple[str, Mapping[str, Any]] = VIT, **changes: Any) -> Shipped:
    """A whole model whose one part has a projection head, as `split_model.load` gives it."""
    module = whole_model(*model)
    plan = plan_of(module, (2,), **changes)
    (cut,) = plan.cuts
    with torch.random.fork_rng():
        torch.manual_seed(7)
        drawn = torch.nn.Linear(prototypes.width_of(cut.output_shape), projected.dimension)
    for name, values in zip(PROJECTION, (drawn.weight, drawn.bias), strict=True):
        module.register_parameter(name, torch.nn.Parameter(values.detach().clone()))
    cut = replace(cut, trainable=(*cut.trainable, *PROJECTION))
    plan = replace(plan, strategy="prototypes", cuts=(cut,), prototypes=projected)
    return Shipped(module, plan, int(module.num_features), backend.choose_device(1))


class Pulled(Device):
    """A device whose part ends in g, and has a projection head."""

    def _load_part(self) -> Settled:
        told = super()._load_part()
        rule = self._shipped.plan.prototypes
        assert rule is not None
        prototypes.attach(self.part, rule, self._model.projection_weight.shape[1])
        for name in PROJECTION:
            self.part.register_parameter(name, getattr(self._model, name))
        self._optimiser = optimiser_of(self._shipped.plan.optimiser, [*self.part.parameters()])
        self.held = PartPrototypes(CLASSES, rule)
        return told

    def _attend(self) -> Settled:
        return Settled(self._ask, len(self.ids))

    def _set_prototypes(self) -> Settled:
        self._check_place(0)
        self.held.set(_Carried(self._ask, self._numbers, self._tensors))  # type: ignore[arg-type]
        self._step = self._numbers["step"]
        return Settled(self._ask, len(self.ids))

    def _give_prototypes(self) -> Prototypes:
        self._check_place(0)
        return self.held.tell(_Carried(self._ask, self._numbers, self._tensors))  # type: ignore[arg-type]

    def _forward(self) -> Activations:
        n = self._numbers
        self._check_place(n["batch"])
        if n["batch"] > 0:
            self._move()
        chosen = self.batch(n["seed"], n["epoch"], n["place"], n["size"])
        self._y = self.labels[chosen]
        self._z, self._embedding = self.part(self.images[chosen])
        self.held.add(self._embedding.detach().numpy(), self._y)
        self._count += 1
        return Activations(
            self._ask, n["batch"], len(self.ids), "train", self._z.detach().flatten(1).numpy().copy(), None
        )

    def _move(self) -> None:
        rule = self._shipped.plan.prototypes
        assert rule is not None
        values = read_gradient(WireGradient(self._tensors["gradient"], self._tensors.get("scales")))
        anchors = torch.from_numpy(self.held.anchors(self._y))
        apart = prototypes.distance(self._embedding, anchors, rule.distance)
        self._optimiser.zero_grad()
        seeds = [torch.from_numpy(np.array(values)).reshape(self._z.shape), torch.from_numpy(self.held.pull(self._y))]
        torch.autograd.backward([self._z, apart], seeds)
        step_at(self._optimiser, self._numbers["rate"])


class _Carried:
    """An ask as the device's own code reads it."""

    def __init__(self, ask: str, parameters: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
        self.ask, self.parameters, self.tensors = ask, parameters, tensors


def builder(of: Shipped, settings: Settings = SETTINGS, name: str = "prototypes") -> Callable[[], PartStrategy]:
    return lambda: strategies.find(name).build(of, settings)


def device(
    name: str, of: Shipped, count: int, seed: int = 0, labels: tuple[int, ...] = (0, 1, 2), **more: str
) -> Pulled:
    images, own = pictures(count, seed)
    chosen = np.flatnonzero(np.isin(own, labels))
    return Pulled(name, of, images[chosen], own[chosen], "logit-gradient", **more)


def site(of: Shipped, **labels: tuple[int, ...]) -> dict[str, Device]:
    """Three devices of different sizes; `labels` names classes that one has."""
    counts = {"jetson": 24, "laptop": 18, "pi": 9}
    return {
        name: device(name, of, count, seed, labels.get(name, (0, 1, 2)))
        for seed, (name, count) in enumerate(counts.items())
    }


def same(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].tobytes() == each.tobytes() for name, each in wanted.items()
    )


# -- what it is


@pytest.mark.parametrize("distance", ["cosine", "l2"])
def test_invariant_7_one_device_trains_as_the_whole_model_would(distance: str) -> None:
    rule = replace(RULE, distance=distance)
    of = shipped(rule, rule=OptimiserRule(momentum=0.0))
    settings = replace(SETTINGS, epochs=3, batch=64, prototype_strength=0.7, prototype_renewal=0.5)
    alone = device("pi", of, 24)
    run = Drive(builder(of, settings), {"pi": alone})
    found = weights_of(run.run())

    whole = Whole(of, "clinic", settings.seed)
    part, rest = family_of(whole.body)[1].cut(whole.body, 2)
    prototypes.attach(part, rule, whole.body.projection_weight.shape[1])
    for name in PROJECTION:
        part.register_parameter(name, getattr(whole.body, name))
    optimiser = optimiser_of(of.plan.optimiser, [*whole.parameters()])
    common: np.ndarray | None = None
    means = np.zeros((CLASSES, rule.dimension))
    for epoch in range(1, settings.epochs + 1):
        chosen = alone.batch(settings.seed, epoch, 0, settings.batch)
        y = torch.from_numpy(alone.labels[chosen])
        z, embedding = part(alone.images[chosen])
        loss = torch.nn.functional.cross_entropy(whole.head(rest(z)), y)
        if common is not None:
            lengths = [np.linalg.norm(each, axis=1, keepdims=True) for each in (common, means)]
            shift = (1 - (common * means).sum(1, keepdims=True) / lengths[0] / lengths[1]).mean()
            shift = np.linalg.norm(common - means, axis=1).mean() if distance == "l2" else shift
            anchors = common / lengths[0] if distance == "cosine" else common
            held = torch.from_numpy(anchors.astype(np.float32))[y]
            pull = settings.prototype_strength * np.exp(-settings.prototype_shift * shift)
            loss = loss + float(pull) * prototypes.distance(embedding, held, distance).mean()
        rows = embedding.detach().double().numpy()
        means = np.stack([rows[alone.labels[chosen] == label].mean(axis=0) for label in range(CLASSES)])
        common = means if common is None else 0.5 * common + 0.5 * means
        optimiser.zero_grad()
        loss.backward()
        step_at(optimiser, settings.learning_rate)
    for name, wanted in whole.named().items():
        np.testing.assert_allclose(found[name], wanted, rtol=0, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("model", [VIT, pytest.param(RESNET, marks=pytest.mark.slow)], ids=["vit", "resnet"])
def test_invariant_5_without_g_and_pull_it_is_split_fed_bit_for_bit(model: tuple[str, Mapping[str, Any]]) -> None:
    of = shipped(PLAIN, model)
    settings = replace(SETTINGS, prototype_strength=0.0, epochs=2)
    ours, theirs = Drive(builder(of, settings), site(of)), Drive(builder(of, settings, "split_fed"), site(of))
    found, wanted = weights_of(ours.run()), weights_of(theirs.run())
    assert same(found, wanted)
    assert [ask.kind for ask in ours.asks] == [ask.kind for ask in theirs.asks]
    for one, other in zip(ours.records, theirs.records, strict=True):
        assert {name: one[name] for name in other} == other  # bytes and losses too


def test_invariant_6_no_label_leaves_a_device_and_prototypes_are_by_class() -> None:
    of = shipped()
    replies: list[Reply] = []

    def note(ask: Ask, device: str, reply: Reply) -> Reply:
        replies.append(reply)
        return reply

    Drive(builder(of), site(of), change=note).run()
    assert {type(each).__name__ for each in replies} == {"Activations", "Gradient", "Prototypes", "Settled", "Update"}
    for reply in replies:
        for name, array in tensors_of(reply).items():  # type: ignore[arg-type]
            assert array.dtype.kind == "f", name
        if isinstance(reply, Prototypes):
            assert len(reply.classes) <= CLASSES and len(reply.classes) == len(reply.counts)


def test_invariant_8_the_average_is_by_images_over_the_devices_that_count() -> None:
    of = shipped()
    parts: dict[str, dict[str, np.ndarray]] = {}

    def note(ask: Ask, device: str, reply: Reply) -> Reply:
        if isinstance(reply, Update):
            parts[device] = dict(reply.tensors)
        return reply

    run = Drive(builder(of, replace(SETTINGS, epochs=1)), site(of), change=note)
    found, n = weights_of(run.run()), {"jetson": 24, "laptop": 18, "pi": 9}
    weights = {name: count / sum(n.values()) for name, count in n.items()}
    assert sum(weights.values()) == pytest.approx(1.0)
    for name in of.plan.cuts[0].trainable:
        wanted = sum(weights[each] * parts[each][name].astype(np.float64) for each in n)
        np.testing.assert_allclose(found[f"backend.{name}"], wanted, atol=1e-6)


# -- what devices may lack


@pytest.mark.parametrize("has", [(0, 1), (2,)])
def test_invariant_9_a_device_without_some_classes_takes_part(has: tuple[int, ...]) -> None:
    of = shipped()
    told: list[Prototypes] = []

    def note(ask: Ask, device: str, reply: Reply) -> Reply:
        if isinstance(reply, Prototypes) and device == "pi":
            told.append(reply)
        return reply

    run = Drive(builder(of), site(of, pi=has), change=note)
    run.run()
    assert {each.classes for each in told} == {has}
    assert run.records[-1]["prototypes"] == CLASSES and run.records[-1]["loss"] < run.records[0]["loss"]


def test_a_class_that_one_device_alone_has_pulls_the_others_only_by_what_they_have() -> None:
    of = shipped()
    run = Drive(builder(of), site(of, jetson=(0, 1), laptop=(0, 1)))
    run.run()
    asked = [ask for ask in run.asks if ask.kind == "set_prototypes"]
    assert [each.tensors["jetson"]["classes"].tolist() for each in asked] == [[0, 1, 2]] * 2
    assert run.records[-1]["devices"] == 3


def test_a_device_without_images_is_left_alone_until_the_end() -> None:
    of = shipped()
    devices = {**site(of), "empty": device("empty", of, 3, labels=())}
    run = Drive(builder(of), devices)
    run.run()
    assert devices["empty"].asked == ["load_part", "load_part"] and run.records[-1]["devices"] == 3


def away(rounds: range) -> Callable[[Ask, str, Reply], Reply | None]:
    def change(ask: Ask, device: str, reply: Reply) -> Reply | None:
        gone = device == "pi" and ask.kind == "attend" and ask.parameters["epoch"] in rounds
        return None if gone else reply

    return change


def test_a_device_that_vanishes_for_some_rounds_is_missed_in_these_alone() -> None:
    of = shipped()
    devices = site(of, jetson=(0, 1), laptop=(0, 1))  # the third class is the vanishing device's
    settings = replace(SETTINGS, epochs=5, quorum=2)
    run = Drive(builder(of, settings), devices, change=away(range(2, 4)))
    strategy = run.run()
    assert [each["devices"] for each in run.records] == [3, 2, 2, 3, 3]
    known = [each["prototypes"] for each in run.records]
    assert known == [3] * 5  # its class keeps its prototype
    trained = [ask for ask in run.asks if ask.kind == "upload_part"]
    assert ["pi" in ask.tensors for ask in trained] == [True, False, False, True, True]
    assert run.asks[-1].kind == "load_part" and set(run.asks[-1].tensors) == set(devices)
    last = strategy.last_part("pi")  # type: ignore[attr-defined]
    assert same(dict(last.tensors["pi"]), dict(run.asks[-1].tensors["pi"]))


def test_a_round_that_nobody_attends_with_images_ends_with_a_reason() -> None:
    of = shipped()
    devices = {name: device(name, of, 3, labels=()) for name in ("jetson", "pi")}
    with pytest.raises(TrainingError, match="no sample"):
        Drive(builder(of, replace(SETTINGS, quorum=1)), devices).run()


# -- the pull


def test_the_first_round_has_no_prototypes_and_later_ones_are_broadcast_once() -> None:
    of = shipped()
    run = Drive(builder(of, replace(SETTINGS, epochs=4)), site(of))
    run.run()
    asked = [ask for ask in run.asks if ask.kind == "set_prototypes"]
    assert len(asked) == 3 and run.records[0]["strength"] == 0.0
    for ask in asked:
        assert {name: dict(each) for name, each in ask.own.items()}.keys() == {"jetson", "laptop", "pi"}
        assert all(0 < each["strength"] <= 1 for each in ask.own.values())  # invariant 3
    strengths = {device: each["strength"] for device, each in asked[-1].own.items()}
    assert len(set(strengths.values())) == 3
    fixed = Drive(builder(of, replace(SETTINGS, prototype_shift=0.0)), site(of))
    fixed.run()
    (ask, *_) = [ask for ask in fixed.asks if ask.kind == "set_prototypes"]
    assert {each["strength"] for each in ask.own.values()} == {1.0}


def test_prototypes_change_what_is_learned() -> None:
    of = shipped()
    found = [
        weights_of(Drive(builder(of, replace(SETTINGS, prototype_strength=strength)), site(of)).run())
        for strength in (0.0, 1.0)
    ]
    assert not same(*found)


def test_bytes_of_prototypes_are_counted() -> None:
    of = shipped()
    records = []
    for strength in (0.0, 1.0):
        run = Drive(builder(of, replace(SETTINGS, prototype_strength=strength)), site(of))
        run.run()
        records.append(run.records[1])
    up, down = (records[1][name] - records[0][name] for name in ("bytes_up", "bytes_down"))
    assert up == 3 * CLASSES * (4 * RULE.dimension + 4) and down == 3 * CLASSES * (4 * RULE.dimension + 2)


# -- one copy on the server, stops, settings


def test_with_one_copy_devices_follow_one_another_on_one_rest_of_the_model() -> None:
    of = shipped()
    run = Drive(builder(of, replace(SETTINGS, server_copies="one", epochs=2)), site(of))
    run.run()
    order = [next(iter(ask.tensors)) for ask in run.asks if ask.kind == "forward"]
    assert all(len(ask.tensors) == 1 for ask in run.asks if ask.kind == "forward")
    assert order == (["jetson"] * 3 + ["laptop"] * 3 + ["pi"]) * 2
    assert run.records[-1]["loss"] < run.records[0]["loss"]
    both = Drive(builder(of, replace(SETTINGS, epochs=2)), site(of))
    assert not same(weights_of(both.run()), weights_of(run.strategy))


@pytest.mark.parametrize("copies", ["each", "one"])
def test_an_interrupted_run_equals_an_undisturbed_one_bit_for_bit(copies: str) -> None:
    of = shipped()
    settings = replace(SETTINGS, server_copies=copies)
    undisturbed = Drive(builder(of, settings), site(of))
    stopped = Drive(builder(of, settings), site(of), due=lambda progress: progress % 2 == 0)
    wanted, found = undisturbed.run(), stopped.run()
    assert stopped.reloads > 3
    assert same(weights_of(found), weights_of(wanted)) and stopped.records == undisturbed.records


def test_a_state_of_prototypes_goes_on_with_the_same_ones() -> None:
    of = shipped()
    strategy = Drive(builder(of), site(of)).run()
    state = strategy.state()
    again = strategies.find("prototypes").build(of, SETTINGS)
    again.load(strategies.Site("clinic", ("jetson", "laptop", "pi"), CLASSES), copy.deepcopy(state))
    other: State = again.state()
    assert state.values == other.values and state.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(state.tensors[name], other.tensors[name]) for name in state.tensors)


def test_what_a_plan_asks_of_prototypes_is_checked() -> None:
    of = shipped()
    plan = Plan("prototypes", "", "", "logit-gradient", 0.0, 3, 0, 0.0, 0, 1, quorum=1)
    rules = replace(MANIFEST.transforms, kappa_max=0.0)
    plan.check(rules, ("logit-gradient",), of.plan, ("a", "b"))
    for change in ({"prototype_strength": -1.0}, {"prototype_renewal": 1.5}, {"prototype_shift": float("nan")}):
        with pytest.raises(ConfigError, match=next(iter(change))):
            replace(plan, **change).check(rules, ("logit-gradient",), of.plan, ("a", "b"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="server_copies"):
        replace(plan, server_copies="two").check(rules, ("logit-gradient",), of.plan, ("a", "b"))
    with pytest.raises(ConfigError, match="projection head"):
        plan.check(rules, ("logit-gradient",), replace(of.plan, prototypes=None), ("a", "b"))
    recorded = replace(plan, prototype_shift=1.0).values()
    assert plan.differences(recorded, frozenset({"prototype_shift"}))
