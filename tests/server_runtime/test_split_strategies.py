"""Split training against its references: the unsplit model, itself without stops, and what the devices hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("timm")

from contract.errors import ConfigError, TrainingError  # noqa: E402
from contract.messages import Activations, Gradient, Update  # noqa: E402
from contract.training import HOLDS, OptimiserRule  # noqa: E402
from server_runtime import strategies  # noqa: E402
from server_runtime.aggregation import average  # noqa: E402
from server_runtime.split_model import Shipped  # noqa: E402
from server_runtime.strategies import Ask, PartStrategy, Reply, Settings  # noqa: E402
from tests.server_runtime.tiny_training import (  # noqa: E402
    MODES,
    RESNET,
    Device,
    Drive,
    Whole,
    optimiser_of,
    pictures,
    shipped,
    weights_of,
)

SETTINGS = Settings("raw-label", 0.0, 2, 0, 0.0, 0, batch=8, learning_rate=0.02)
PLAIN = OptimiserRule(momentum=0.0)
SPLIT = ("sequential_split", "parallel_split", "split_fed")
Model = Callable[..., Shipped]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Shipped models, each made once."""
    made: dict[str, Shipped] = {}

    def make(**changes: object) -> Shipped:
        key = repr(changes)
        if key not in made:
            made[key] = shipped(tmp_path_factory.mktemp("export") / "parts.backend", **changes)
        return made[key]

    return make


def builder(name: str, of: Shipped, settings: Settings) -> Callable[[], PartStrategy]:
    return lambda: strategies.find(name).build(of, settings)


def device(name: str, of: Shipped, count: int, seed: int = 0, **more: str) -> Device:
    return Device(name, of, *pictures(count, seed), **more)


def two(of: Shipped, mode: str = "raw-label", counts: tuple[int, int] = (24, 15)) -> dict[str, Device]:
    return {
        name: device(name, of, count, seed, mode=mode)
        for seed, (name, count) in enumerate(zip(("jetson", "pi"), counts, strict=True))
    }


def unsplit(of: Shipped, of_device: Device, settings: Settings, renew: bool = False) -> Whole:
    """Plain training of the whole model on a device's batches."""
    whole = Whole(of, "clinic", settings.seed)
    optimiser = optimiser_of(of.plan.optimiser, [*whole.parameters()])
    for epoch in range(1, settings.epochs + 1):
        if renew:
            optimiser = optimiser_of(of.plan.optimiser, [*whole.parameters()])
        for place in range(-(-len(of_device.ids) // settings.batch)):
            chosen = of_device.batch(settings.seed, epoch, place, settings.batch)
            whole.descend(of_device.images[chosen], of_device.labels[chosen], optimiser, settings.learning_rate)
    return whole


def assert_close(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray], atol: float = 1e-5) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=atol, err_msg=name)


def assert_same(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name].tobytes() != wanted[name].tobytes()] == []


# -- split = unsplit


@pytest.mark.parametrize("rule", [OptimiserRule(), OptimiserRule(kind="adamw", weight_decay=0.05)])
@pytest.mark.parametrize("cut", ["1", "2"])
@pytest.mark.parametrize("name", ["sequential_split", "centralised"])
def test_one_device_alone_trains_as_the_whole_model_would(
    name: str, cut: str, rule: OptimiserRule, model: Model
) -> None:
    of = model(rule=rule)
    settings = replace(SETTINGS, cuts=cut, epochs=4, learning_rate=0.02 if rule.kind == "sgd" else 1e-3)
    alone = device("pi", of, 40)
    run = Drive(builder(name, of, settings), {"pi": alone})
    strategy = run.run()  # 20 steps
    assert_close(weights_of(strategy), unsplit(of, alone, settings).named())
    assert run.records[-1]["loss"] < run.records[0]["loss"]
    assert alone.asked.count("load_part") == 2  # at the beginning, and what came of it at the end


@pytest.mark.parametrize("cut", ["2", "4"])
def test_a_network_with_batch_statistics_trains_as_the_whole_would(cut: str, model: Model) -> None:
    of = model(model=RESNET, cuts=(2, 4))
    settings = replace(SETTINGS, cuts=cut, epochs=2)
    alone = device("pi", of, 24)
    found = weights_of(Drive(builder("centralised", of, settings), {"pi": alone}).run())
    wanted = {key: value for key, value in unsplit(of, alone, settings).named().items() if "num_batches" not in key}
    assert_close({key: found[key] for key in wanted}, wanted, 1e-4)


@pytest.mark.parametrize("mode", ["permuted-label", "logit-gradient"])
def test_the_loss_is_the_same_wherever_the_labels_are(mode: str, model: Model) -> None:
    of = model()
    at_server = Drive(builder("sequential_split", of, SETTINGS), two(of))
    elsewhere = Drive(builder("sequential_split", of, replace(SETTINGS, label_mode=mode)), two(of, mode))
    assert_close(weights_of(elsewhere.run()), weights_of(at_server.run()), 1e-6)
    for here, there in zip(at_server.records, elsewhere.records, strict=True):
        assert there["loss"] == pytest.approx(here["loss"], rel=1e-5)
        assert there["accuracy"] == here["accuracy"]


@pytest.mark.parametrize("name", ["centralised", *SPLIT])
def test_a_head_on_the_device_is_never_the_servers(name: str, model: Model) -> None:
    of = model()
    settings = replace(SETTINGS, label_mode="client-head", epochs=6)
    alone = device("pi", of, 24, mode="client-head")
    run = Drive(builder(name, of, settings), {"pi": alone})
    strategy = run.run()
    assert run.records[-1]["loss"] < run.records[0]["loss"]
    assert not any(tensor.startswith("head.") for tensor in strategy.state().tensors)
    values = alone.part(alone.images[:5]).detach().flatten(1).numpy()
    assert strategy.predict_part("pi", values).shape == (5, of.width)


def test_equal_devices_in_parallel_are_one_device(model: Model) -> None:
    of = model(rule=PLAIN)
    together = Drive(
        builder("parallel_split", of, SETTINGS), {name: device(name, of, 24, twin="x") for name in ("a", "b", "c")}
    )
    alone = Drive(builder("parallel_split", of, SETTINGS), {"a": device("a", of, 24, twin="x")})
    assert_close(weights_of(together.run()), weights_of(alone.run()))
    assert_close(weights_of(alone.strategy), unsplit(of, alone.devices["a"], SETTINGS).named())
    assert together.records[-1]["samples"] == 72


def test_split_fed_averages_what_each_device_alone_would_have(model: Model) -> None:
    of = model()
    settings = replace(SETTINGS, epochs=1)
    run = Drive(builder("split_fed", of, settings), two(of))
    found = weights_of(run.run())
    alone = [unsplit(of, each, settings).named() for each in run.devices.values()]
    assert_close(found, average(alone[0], alone, [24, 15]))


@pytest.mark.parametrize("epochs", [1, 3])
def test_split_fed_is_federated_averaging_with_split_clients(epochs: int, model: Model) -> None:
    of = model(whole=True)
    settings = replace(SETTINGS, epochs=epochs)
    split, whole = (Drive(builder(name, of, settings), two(of)) for name in ("split_fed", "fed_avg"))
    assert_close(weights_of(split.run()), weights_of(whole.run()))
    for one, other in zip(split.records, whole.records, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert (one["accuracy"], one["samples"]) == (other["accuracy"], other["samples"])


def test_federated_averaging_of_one_device_is_plain_training(model: Model) -> None:
    of = model(whole=True)
    alone = device("pi", of, 24)
    run = Drive(builder("fed_avg", of, SETTINGS), {"pi": alone})
    assert_close(weights_of(run.run()), unsplit(of, alone, SETTINGS, renew=True).named())
    values = np.ones((2, 3), np.float32)
    assert (run.strategy.predict_part("pi", values) == values).all()  # the device's own logits


def test_local_epochs_are_counted_in_epochs(model: Model) -> None:
    of = model(whole=True)
    run = Drive(builder("fed_avg", of, replace(SETTINGS, epochs=5, local_epochs=2)), two(of))
    run.run()
    assert [record["epoch"] for record in run.records] == [2, 4, 5]
    assert [(ask.parameters["epoch"], ask.parameters["epochs"]) for ask in run.asks if ask.kind == "local_round"] == [
        (1, 2),
        (3, 2),
        (5, 1),
    ]


# -- cuts


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("cuts", ["1,pi=2", "2,pi=1"])
def test_different_cuts_train_every_layer_of_one_whole_model(name: str, cuts: str, model: Model) -> None:
    of = model()
    run = Drive(builder(name, of, replace(SETTINGS, cuts=cuts, epochs=3)), two(of))
    found = weights_of(run.run())
    before = {f"backend.{key}": value.numpy() for key, value in of.module.state_dict().items()}
    assert {key for key in found if key.startswith("backend.")} == before.keys()
    assert [key for key in before if (found[key] == before[key]).all()] == []
    assert run.records[-1]["loss"] < run.records[0]["loss"]
    cut = {asked: own["cut"] for ask in run.asks if ask.kind == "load_part" for asked, own in ask.own.items()}
    assert cut == ({"jetson": 1, "pi": 2} if cuts == "1,pi=2" else {"jetson": 2, "pi": 1})


def test_sequential_hands_the_part_on_layer_by_layer(model: Model) -> None:
    """The deeper device gets the layer that the server trained; the shallower one leaves it to the server."""
    of = model()
    run = Drive(builder("sequential_split", of, replace(SETTINGS, cuts="1,pi=2", epochs=1)), two(of))
    strategy = run.run()
    loads = [ask for ask in run.asks if ask.kind == "load_part"]
    assert loads[0].tensors["jetson"] == {}  # the package's own
    handed = loads[1].tensors["pi"]
    original = of.module.state_dict()["blocks.1.mlp.fc1.weight"].numpy()
    assert not np.array_equal(handed["blocks.1.mlp.fc1.weight"], original)
    for name in ("jetson", "pi"):  # all end with the finished model's part, each of its own depth
        last = run.devices[name]._model.state_dict()
        names = run.devices[name]._names
        assert all(np.array_equal(weights_of(strategy)[f"backend.{key}"], last[key]) for key in names)


def test_layers_that_were_on_a_device_start_without_momentum(model: Model) -> None:
    of = model()
    run = Drive(builder("sequential_split", of, replace(SETTINGS, cuts="1,pi=2", epochs=1)), two(of))
    moments = {name for name in run.run().state().tensors if name.startswith("optimiser.")}
    assert not any(name.startswith(("optimiser.backend.blocks.0", "optimiser.backend.blocks.1")) for name in moments)
    assert any(name.startswith("optimiser.backend.blocks.2") for name in moments)


def test_a_cut_that_the_package_lacks_is_refused(model: Model) -> None:
    of = model()
    with pytest.raises(ConfigError, match="cuts of the package"):
        Drive(builder("sequential_split", of, replace(SETTINGS, cuts="3")), two(of)).run()


# -- stops


def whenever(seed: int) -> Callable[[int], bool]:
    rng = np.random.default_rng(seed)
    return lambda progress: bool(rng.random() < 0.6)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("mode", ["raw-label", "client-head"])
@pytest.mark.parametrize("name", SPLIT)
def test_the_result_does_not_depend_on_when_it_settles_and_starts_anew(
    name: str, mode: str, seed: int, model: Model
) -> None:
    """Killed after any settled moment: weights, moments and records are the same, bit for bit."""
    of = model(gradient="int8")
    settings = replace(SETTINGS, label_mode=mode, cuts="1,pi=2", schedule="cosine", warmup=1, epochs=3)
    whole, broken = (Drive(builder(name, of, settings), two(of, mode)) for _ in range(2))
    broken.due = whenever(seed)
    wanted, found = whole.run().state(), broken.run().state()
    assert broken.reloads > 2
    assert_same(*({key: value.numpy() for key, value in state.tensors.items()} for state in (found, wanted)))
    assert [{**record, "bytes_up": 0, "bytes_down": 0} for record in broken.records] == [
        {**record, "bytes_up": 0, "bytes_down": 0} for record in whole.records
    ]
    for one, other in zip(whole.devices.values(), broken.devices.values(), strict=True):
        assert_same(*({k: v.detach().numpy() for k, v in each._model.state_dict().items()} for each in (one, other)))


def test_after_every_step_a_settle(model: Model) -> None:
    of = model()
    run = Drive(builder("centralised", of, SETTINGS), {"pi": device("pi", of, 24)}, due=lambda progress: True)
    run.run()
    assert run.reloads == 6
    assert run.devices["pi"].asked.count("settle") == 6


def test_federated_averaging_goes_on_from_a_state(model: Model) -> None:
    of = model(whole=True)
    site = Drive(builder("fed_avg", of, SETTINGS), two(of))
    whole = weights_of(site.run())
    first = Drive(builder("fed_avg", of, replace(SETTINGS, epochs=1)), two(of))
    state = first.run().state()
    second = Drive(builder("fed_avg", of, SETTINGS), two(of))
    fresh = second.build()
    fresh.load(second.site, state)
    second.build = lambda: fresh
    assert_same(weights_of(second.run()), whole)
    assert [record["epoch"] for record in second.records] == [2]


@pytest.mark.parametrize("name", ["centralised", *SPLIT])
def test_a_state_predicts_as_the_strategy_did(name: str, model: Model) -> None:
    of = model()
    run = Drive(builder(name, of, SETTINGS), {"pi": device("pi", of, 12)})
    strategy = run.run()
    values = run.devices["pi"].part(run.devices["pi"].images).detach().flatten(1).numpy()
    scores = strategy.predict_part("pi", values)
    assert (scores.shape, scores.dtype) == ((12, 3), np.float32)
    again = run.build()
    again.load(run.site, strategy.state())
    assert again.predict_part("pi", values).tobytes() == scores.tobytes()
    assert again.predict_part("pi", values[:1]).shape == (1, 3)
    with pytest.raises(TrainingError, match=r"pi: activations\.values: expected"):
        again.predict_part("pi", values[:, 1:])


# -- what the numbers are


def test_an_epochs_record_counts_the_tensors_on_the_wire(model: Model) -> None:
    of = model()
    run = Drive(builder("parallel_split", of, SETTINGS), two(of))
    run.run()
    n = of.plan.cuts[0].output_size
    part = sum(of.module.state_dict()[name].numpy().nbytes for name in of.plan.cuts[0].trainable)
    first, second = run.records
    assert first["rows"] == first["samples"] == 39
    assert first["bytes_up"] == 39 * (4 * n + 2) + 2 * part
    assert first["bytes_down"] == 39 * 4 * n  # the package has the first parts
    assert second["bytes_down"] == 39 * 4 * n + 2 * part
    assert (first["lr"], first["void_steps"], first["quarantined"]) == (0.02, 0, None)


def test_the_rate_follows_the_schedule_on_both_sides(model: Model) -> None:
    of = model()
    settings = replace(SETTINGS, schedule="cosine", warmup=1, epochs=3)
    run = Drive(builder("centralised", of, settings), {"pi": device("pi", of, 16)})
    run.run()
    moved = [ask.own["pi"]["rate"] for ask in run.asks if ask.kind in ("forward", "settle") and ask.own["pi"]["batch"]]
    assert moved == pytest.approx(
        [0.01, 0.02, 0.02, 0.01 * (1 + np.cos(np.pi / 4)), 0.01, 0.01 * (1 - np.cos(np.pi / 4))]
    )
    assert [record["lr"] for record in run.records] == pytest.approx([moved[1], moved[3], moved[5]])


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_a_coarser_gradient_still_trains(precision: str, model: Model) -> None:
    of = model(gradient=precision)
    exact = Drive(builder("sequential_split", model(), replace(SETTINGS, epochs=4)), {"pi": device("pi", model(), 24)})
    coarse = Drive(builder("sequential_split", of, replace(SETTINGS, epochs=4)), {"pi": device("pi", of, 24)})
    exact.run(), coarse.run()
    assert coarse.records[-1]["loss"] == pytest.approx(exact.records[-1]["loss"], rel=0.05)
    assert coarse.records[-1]["bytes_down"] < 0.6 * exact.records[-1]["bytes_down"]
    assert ("residue/pi" in coarse.strategy.state().tensors) == (precision == "int8")


def test_the_shipped_model_is_left_as_it_was(model: Model) -> None:
    of = model()
    before = {name: tensor.clone() for name, tensor in of.module.state_dict().items()}
    Drive(builder("split_fed", of, SETTINGS), two(of)).run()
    assert all(torch.equal(before[name], tensor) for name, tensor in of.module.state_dict().items())


# -- what may go wrong


@pytest.mark.parametrize("name", SPLIT)
def test_a_device_without_images_is_passed_over(name: str, model: Model) -> None:
    of = model()
    run = Drive(builder(name, of, SETTINGS), two(of) | {"nano": device("nano", of, 0)})
    strategy = run.run()
    assert run.devices["nano"].asked == ["load_part", "load_part"]  # it can predict with what the others trained
    assert run.records[-1]["samples"] == 39
    without = Drive(builder(name, of, SETTINGS), two(of))
    assert_same(weights_of(strategy), weights_of(without.run()))


def test_federated_averaging_passes_over_a_device_without_images(model: Model) -> None:
    of = model(whole=True)
    run = Drive(builder("fed_avg", of, SETTINGS), two(of) | {"nano": device("nano", of, 0)})
    run.run()
    assert run.devices["nano"].asked == ["local_round", "load_part"]
    assert run.records[-1]["samples"] == 39


@pytest.mark.parametrize("name", ["centralised", *SPLIT, "fed_avg"])
def test_a_site_without_images_is_an_error(name: str, model: Model) -> None:
    of = model(whole=True)
    with pytest.raises(TrainingError, match="no sample"):
        Drive(builder(name, of, SETTINGS), {"pi": device("pi", of, 0)}).run()


@pytest.mark.parametrize("name", SPLIT)
def test_se_03_a_batch_of_one_and_an_odd_last_one_train(name: str, model: Model) -> None:
    of = model()
    run = Drive(
        builder(name, of, SETTINGS), {"a": device("a", of, 1), "b": device("b", of, 9), "c": device("c", of, 17, 2)}
    )
    run.run()
    assert [record["rows"] for record in run.records] == [27, 27]


def changed(kind: str, **fields: object) -> Callable[[Ask, str, Reply], Reply]:
    """The device `pi` answers otherwise, its first batches apart."""
    seen = []

    def change(ask: Ask, device: str, reply: Reply) -> Reply:
        if ask.kind != kind or device != "pi":
            return reply
        seen.append(ask)
        return reply if len(seen) == 1 else replace(reply, **{k: v(reply) for k, v in fields.items()})

    return change


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"values": lambda reply: reply.values[:, 1:]}, r"pi: activations\.values"),
        ({"values": lambda r: r.values[1:], "labels": lambda r: r.labels[1:]}, r"pi: activations\.values"),
        ({"labels": lambda reply: reply.labels + 3}, r"pi: activations\.labels: expected classes below 3"),
        ({"labels": lambda reply: None}, r"pi: activations\.labels: expected labels in raw-label mode"),
        ({"total": lambda reply: 99}, r"pi: activations\.total: expected 15"),
    ],
)
def test_activations_that_do_not_fit_name_device_and_field(
    fields: dict[str, Callable[[Activations], object]], said: str, name: str, model: Model
) -> None:
    of = model()
    run = Drive(builder(name, of, SETTINGS), two(of), change=changed("forward", **fields))
    with pytest.raises(TrainingError, match=said) as raised:
        run.run()
    assert raised.value.cure


def test_labels_that_were_not_to_come_are_refused(model: Model) -> None:
    of = model()
    devices = two(of)  # of raw-label mode
    run = Drive(builder("parallel_split", of, replace(SETTINGS, label_mode="logit-gradient")), devices)
    with pytest.raises(TrainingError, match=r"activations\.labels: expected none in logit-gradient mode"):
        run.run()


def test_an_answer_of_another_kind_names_the_device(model: Model) -> None:
    of = model()

    def change(ask: Ask, device: str, reply: Reply) -> Reply:
        return Gradient(ask.name, 1.0, 0, 1, np.zeros((1, 3), np.float32)) if ask.kind == "upload_part" else reply

    with pytest.raises(TrainingError, match="jetson: expected Update, found Gradient"):
        Drive(builder("sequential_split", of, SETTINGS), two(of), change=change).run()


def test_se_04_gradients_of_another_class_count_are_left_out_and_move_nothing(model: Model) -> None:
    of = model()
    settings = replace(SETTINGS, label_mode="logit-gradient", epochs=1)
    wrong = changed("batch_loss", gradient=lambda reply: np.ones((len(reply.gradient), 5), np.float32))
    run = Drive(builder("parallel_split", of, settings), two(of, "logit-gradient", (24, 24)), change=wrong)
    run.run()
    assert run.records[0]["unusable_replies"] == 2
    assert run.records[0]["rows"] == 24 + 8
    assert run.records[0]["void_steps"] == 0
    left_out = [ask.own["pi"]["rate"] for ask in run.asks if ask.kind in ("forward", "settle") and "pi" in ask.own]
    assert left_out == [0.02, 0.02, 0.0, 0.0]


def test_se_01_void_steps_leave_the_weights_and_end_training_in_time(model: Model) -> None:
    of = model()
    settings = replace(SETTINGS, label_mode="logit-gradient", epochs=1)

    def useless(ask: Ask, device: str, reply: Reply) -> Reply:
        if ask.kind != "batch_loss":
            return reply
        return Gradient(ask.name, 1.0, 0, 1, np.zeros((1, 99), np.float32))

    few = Drive(builder("sequential_split", of, settings), two(of, "logit-gradient"), change=useless)
    found = weights_of(few.run())
    assert_same(found, Whole(of, "clinic").named())
    assert (few.records[0]["loss"], few.records[0]["accuracy"], few.records[0]["void_steps"]) == (None, None, 5)
    many = Drive(builder("sequential_split", of, replace(settings, batch=2)), two(of, "logit-gradient", (50, 15)))
    many.change = useless
    with pytest.raises(TrainingError, match="20 steps of an epoch had no usable gradient"):
        many.run()


@pytest.mark.parametrize("name", ["centralised", *SPLIT])
def test_a_loss_that_is_not_finite_names_the_learning_rate(name: str, model: Model) -> None:
    of = model()
    run = Drive(builder(name, of, SETTINGS), {"pi": device("pi", of, 24)})
    run.change = lambda ask, device, reply: (
        replace(reply, values=reply.values * np.float32(1e30))
        if isinstance(reply, Activations) and run.records
        else reply
    )
    with pytest.raises(TrainingError, match="training broke in epoch 2: the loss is nan") as raised:
        run.run()
    assert "--learning-rate" in raised.value.cure


@pytest.mark.parametrize("name", ["centralised", *SPLIT, "fed_avg"])
def test_an_exploding_loss_names_the_learning_rate(name: str, model: Model) -> None:
    of = model(whole=True)
    mode = "raw-label" if name == "fed_avg" else "logit-gradient"
    run = Drive(builder(name, of, replace(SETTINGS, label_mode=mode)), {"pi": device("pi", of, 24, mode=mode)})
    run.change = lambda ask, device, reply: (
        replace(reply, mean_loss=1e6) if isinstance(reply, Gradient | Update) and run.records else reply
    )
    with pytest.raises(TrainingError, match=r"epoch 2: the loss is 1e\+06, more than 10000 times") as raised:
        run.run()
    assert "--learning-rate" in raised.value.cure


def spoilt(update: Update) -> Update:
    """A message cannot be built with such values; memory can be damaged later."""
    tensors = {name: value.copy() for name, value in update.tensors.items()}
    made = replace(update, tensors=tensors)
    next(iter(tensors.values()))[...] = np.nan
    return made


@pytest.mark.parametrize("name", [*SPLIT, "fed_avg"])
def test_a_part_that_is_not_finite_is_left_out_and_noted(name: str, model: Model) -> None:
    of = model(whole=True)
    run = Drive(builder(name, of, SETTINGS), two(of))
    run.change = lambda ask, device, reply: (
        spoilt(reply) if isinstance(reply, Update) and device == "pi" and not run.records else reply
    )
    found = weights_of(run.run())
    assert [record["quarantined"] is None for record in run.records] == [False, True]
    assert str(run.records[0]["quarantined"]).startswith("pi: not finite: ")
    assert all(np.isfinite(value).all() for value in found.values())


@pytest.mark.parametrize("name", [*SPLIT, "fed_avg"])
def test_se_01_rounds_without_any_usable_part_end_training(name: str, model: Model) -> None:
    of = model(whole=True)
    run = Drive(builder(name, of, replace(SETTINGS, epochs=9)), two(of))
    run.change = lambda ask, device, reply: spoilt(reply) if isinstance(reply, Update) else reply
    with pytest.raises(TrainingError, match="3 rounds in a row had no usable part") as raised:
        run.run()
    assert len(run.records) == 2
    assert "--learning-rate" in raised.value.cure


@pytest.mark.parametrize("name", [*SPLIT, "fed_avg"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: {"foreign.weight": np.ones(2, np.float32), **tensors}, "unknown foreign.weight"),
        (lambda tensors: {k: v for k, v in tensors.items() if k != "cls_token"}, "without cls_token"),
        (
            lambda tensors: tensors | {"cls_token": np.ones((1, 2), np.float32)},
            r"cls_token float32 \(1, 2\) instead of",
        ),
    ],
)
def test_se_04_a_part_of_another_model_is_left_out_with_its_names_and_the_run_goes_on(
    change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]], said: str, name: str, model: Model
) -> None:
    of = model(whole=True)
    run = Drive(builder(name, of, SETTINGS), two(of))
    run.change = lambda ask, device, reply: (
        replace(reply, tensors=change(reply.tensors)) if isinstance(reply, Update) and device == "jetson" else reply
    )
    run.run()
    assert all(re.search(f"^jetson: .*{said}", str(record["quarantined"])) for record in run.records)


def test_se_02_a_quorum_goes_on_without_a_late_device(model: Model) -> None:
    """Its answer to the round that is closed is dropped by the conductor; the next round asks it anew."""
    of = model(whole=True)
    run = Drive(builder("fed_avg", of, replace(SETTINGS, quorum=1)), two(of))
    run.change = lambda ask, device, reply: None if device == "pi" and not run.records else reply
    found = weights_of(run.run())
    assert [ask.quorum for ask in run.asks] == [1, 1, 1]  # two rounds, and handing out what came of them
    assert run.asks[0].name != run.asks[1].name
    assert [record["samples"] for record in run.records] == [24, 39]
    first = Drive(builder("fed_avg", of, replace(SETTINGS, epochs=1)), {"jetson": two(of)["jetson"]})
    after_first = weights_of(first.run())
    part = run.asks[1].tensors["pi"]
    assert all(np.array_equal(part[key], after_first[f"backend.{key}"]) for key in part if not key.startswith("head."))
    assert not np.array_equal(found["head.weight"], after_first["head.weight"])


def test_a_silent_device_is_named_where_all_are_needed(model: Model) -> None:
    of = model(whole=True)
    run = Drive(builder("fed_avg", of, SETTINGS), two(of))
    run.change = lambda ask, device, reply: None if device == "pi" else reply
    with pytest.raises(TrainingError, match="pi: expected Update, found NoneType"):
        run.run()


def test_a_quorum_of_more_devices_than_there_are_is_all(model: Model) -> None:
    of = model(whole=True)
    run = Drive(builder("fed_avg", of, replace(SETTINGS, quorum=9)), two(of))
    run.run()
    assert {ask.quorum for ask in run.asks} == {2}


def test_centralised_takes_one_device(model: Model) -> None:
    of = model()
    with pytest.raises(TrainingError, match="2 devices: jetson, pi; centralised takes one"):
        Drive(builder("centralised", of, SETTINGS), two(of)).run()


def test_federated_averaging_needs_the_packages_classes(model: Model) -> None:
    of = model(whole=True)
    strategy = builder("fed_avg", of, SETTINGS)()
    with pytest.raises(TrainingError, match="has 7 classes, the package's model 3"):
        next(strategy.run(strategies.Site("clinic", ("pi",), 7)))


@pytest.mark.parametrize("name", sorted(name for name, holds in HOLDS.items() if holds != "frontend"))
def test_every_strategy_of_the_folder_says_its_label_modes(name: str) -> None:
    modes = strategies.find(name).LABEL_MODES
    assert modes and set(modes) <= set(MODES)


def test_devices_in_another_order_give_the_same_weights(model: Model) -> None:
    of = model()
    for name in SPLIT:
        one = Drive(builder(name, of, SETTINGS), two(of))
        other = Drive(builder(name, of, SETTINGS), dict(reversed(two(of).items())))
        assert_same(weights_of(one.run()), weights_of(other.run()))
