"""P3SL on the server against its invariants (algorithms.md 3.4), with devices of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("timm")

from contract.errors import TrainingError  # noqa: E402
from server_runtime.aggregation import average  # noqa: E402
from server_runtime.evaluation import Evaluation  # noqa: E402
from server_runtime.split_model import Shipped  # noqa: E402
from server_runtime.strategies import Ask, Reply, Settings, p3sl  # noqa: E402
from tests.leakage_table import sigma_table  # noqa: E402
from tests.server_runtime.test_split_strategies import assert_close, assert_same, unsplit, whenever  # noqa: E402
from tests.server_runtime.tiny_training import RESNET, Device, Drive, pictures, shipped, weights_of  # noqa: E402

SETTINGS = Settings("raw-label", 0.0, 3, 0, 0.0, 0, batch=8, learning_rate=0.02, aggregate_every=1, sleep_least_s=0.0)
QUIET = replace(SETTINGS, sigma="0")
Model = Callable[..., Shipped]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Shipped models, each made once, with a leakage table."""
    made: dict[str, Shipped] = {}

    def make(**changes: object) -> Shipped:
        key = repr(changes)
        if key not in made:
            of = shipped(tmp_path_factory.mktemp("export") / "parts.backend", **changes)
            made[key] = replace(of, leakage=sigma_table([cut.index for cut in of.plan.cuts]))
        return made[key]

    return make


def device(name: str, of: Shipped, count: int, seed: int = 0, split: int | None = None) -> Device:
    made = Device(name, of, *pictures(count, seed))
    if split is not None:
        made.choose = lambda number: split
    return made


def drive(
    of: Shipped,
    settings: Settings,
    devices: list[Device],
    change: Callable[[Ask, str, Reply], Reply | None] | None = None,
) -> Drive:
    named = {each.name: each for each in devices}
    return Drive(lambda: p3sl.build(of, settings), named, **({} if change is None else {"change": change}))


def three(of: Shipped) -> list[Device]:
    return [device("a", of, 24, 0, 1), device("b", of, 15, 1, 2), device("c", of, 9, 2, 1)]


def names_of(of: Shipped, split: int) -> set[str]:
    cut = of.plan.cut(split)
    assert cut is not None
    return {f"backend.{name}" for name in (*cut.trainable, *cut.buffers)}


def test_invariant_1_parts_of_one_depth_give_their_plain_mean(model: Model) -> None:
    of = model()
    run = drive(of, replace(QUIET, epochs=1), [device("a", of, 24, 0, 2), device("b", of, 15, 1, 2)])
    found = weights_of(run.run())
    parts = [{f"backend.{name}": value for name, value in each.held().items()} for each in run.devices.values()]
    assert_same({name: found[name] for name in names_of(of, 2)}, average(parts[0], parts, [1, 1]))


def test_invariant_1_layers_that_a_device_lacks_count_as_the_servers(model: Model) -> None:
    """Layer 2 of the mean is half the deep device's and half the server's, which the shallow device's turn trained."""
    of = model()
    before: dict[str, np.ndarray] = {}

    class Watched(p3sl.P3SL):
        def _aggregate(self, rounds):
            before.update(rounds.w.floats())
            return super()._aggregate(rounds)

    run = drive(of, replace(QUIET, epochs=1), [device("a", of, 24, 0, 1), device("b", of, 15, 1, 2)])
    run.build = lambda: Watched(of, replace(QUIET, epochs=1))
    found = weights_of(run.run())
    parts = [{f"backend.{name}": value for name, value in each.held().items()} for each in run.devices.values()]
    assert_same({name: found[name] for name in names_of(of, 2)}, average(before, parts, [1, 1]))
    deeper = {name: value for name, value in before.items() if name not in names_of(of, 2)}
    assert_same({name: found[name] for name in deeper}, deeper)  # beyond s_max nothing changes


def test_invariant_1_one_device_gives_its_own_layers_and_counters_stay_what_they_are(model: Model) -> None:
    of = model(model=RESNET, cuts=(2, 4))
    run = drive(of, replace(QUIET, epochs=1), [device("a", of, 4, 0, 2)])
    found = weights_of(run.run())
    held = {f"backend.{name}": value for name, value in run.devices["a"].held().items()}
    assert_same({name: found[name] for name in held}, held)
    counters = [name for name in found if name.endswith("num_batches_tracked")]
    assert counters and {found[name].dtype for name in counters} == {np.dtype(np.int64)}


def test_invariant_1_images_weigh_where_that_was_asked_for(model: Model) -> None:
    of = model()
    settings = replace(QUIET, epochs=1, average_by="images")
    run = drive(of, settings, [device("a", of, 24, 0, 1), device("b", of, 15, 1, 1)])
    found = weights_of(run.run())
    parts = [{f"backend.{name}": value for name, value in each.held().items()} for each in run.devices.values()]
    assert_same({name: found[name] for name in names_of(of, 1)}, average(parts[0], parts, [24, 15]))


def test_invariant_2_aggregation_leaves_devices_parts_alone(model: Model) -> None:
    """From one turn to the next a part stays bit for bit what it was, though W was averaged in between."""
    of = model()
    held: dict[str, dict[str, np.ndarray]] = {}
    checked = []

    def watch(ask: Ask, name: str, reply: Reply) -> Reply:
        if ask.kind == "upload_part":
            held[name] = run.devices[name].held()
        if ask.kind == "take_turn" and name in held:
            assert ask.tensors[name] == {}
            assert_same(run.devices[name].held(), held[name])
            checked.append(name)
        return reply

    run = drive(of, QUIET, three(of), watch)
    run.run()
    assert sorted(checked) == ["a", "a", "b", "b", "c", "c"]
    for name, last in held.items():
        assert_same(run.devices[name].held(), last)  # the end hands nothing out


@pytest.mark.parametrize(
    ("family", "split"),
    [("vit", 1), ("vit", 2), *(pytest.param("resnet", split, marks=pytest.mark.slow) for split in (2, 4))],
)
def test_invariant_6_without_noise_split_training_is_the_whole_models(family: str, split: int, model: Model) -> None:
    of = model() if family == "vit" else model(model=RESNET, cuts=(2, 4))
    settings = replace(QUIET, epochs=2, aggregate_every=5)
    alone = device("pi", of, 24 if family == "vit" else 8, 0, split)
    run = drive(of, settings, [alone])
    found = weights_of(run.run())
    wanted = {name: value for name, value in unsplit(of, alone, settings).named().items() if "num_batches" not in name}
    assert_close({name: found[name] for name in wanted}, wanted, 1e-5 if family == "vit" else 1e-4)


def test_invariant_7_the_gradient_is_that_of_the_noisy_values_and_as_large(model: Model) -> None:
    of = model()
    run = drive(of, replace(SETTINGS, epochs=1, sigma="2.5"), [device("pi", of, 16)])
    run.run()
    noisy = [ask for ask in run.asks if ask.kind == "noisy_forward"]
    assert {ask.own["pi"]["sigma"] for ask in noisy} == {2.5}
    n = of.plan.cuts[0].output_size
    assert noisy[1].tensors["pi"]["gradient"].shape == (8, n)
    quiet = drive(of, replace(QUIET, epochs=1), [device("pi", of, 16)])
    quiet.run()
    assert run.records[0]["loss"] != quiet.records[0]["loss"]  # the server saw noise


def test_invariant_9_one_device_trains_at_a_time(model: Model) -> None:
    of = model()
    run = drive(of, SETTINGS, three(of))
    run.run()
    training = ""
    for ask in run.asks:
        (name,) = ask.tensors
        if ask.kind == "take_turn":
            assert training == ""
            training = name
        elif ask.kind in ("noisy_forward", "settle"):
            assert training == name
            training = "" if ask.kind == "settle" else name
    assert training == ""


# -- what the published rule costs, and what is offered instead


def test_a_copy_of_the_average_leaves_the_servers_own_layers_to_train_on(model: Model) -> None:
    """Eq. 1 is what is judged and published; the layers that shallow devices train with stay bit for bit."""
    of = judged(model())
    settings = replace(QUIET, epochs=2, aggregate_every=1, average_into="copy")
    before: list[dict[str, np.ndarray]] = []

    class Watched(p3sl.P3SL):
        def _aggregate(self, rounds):
            before.append(rounds.w.floats())
            values = super()._aggregate(rounds)
            assert_same(rounds.w.floats(), before[-1])
            return values

    run = drive(of, settings, [device("a", of, 24, 0, 1), device("b", of, 15, 1, 2)])
    run.build = lambda: Watched(of, settings)
    strategy = run.run()
    parts = [{f"backend.{name}": value for name, value in each.held().items()} for each in run.devices.values()]
    found, mean = weights_of(strategy), average(before[-1], parts, [1, 1])
    assert_same({name: found[name] for name in names_of(of, 2)}, mean)
    assert any((before[-1][name] != mean[name]).any() for name in mean)
    chain = strategy._rounds.w.accuracy(of.evaluation, parts[0])
    assert run.records[-1]["chain/a"] == chain


def test_one_that_comes_late_begins_with_the_average_where_the_server_keeps_its_own(model: Model) -> None:
    of = model()
    settings = replace(QUIET, average_into="copy")
    run = drive(of, settings, three(of), away("b", ("choose_split",), lambda ask: ask.parameters["round"] == 1))
    published: list[dict[str, np.ndarray]] = []

    def watch(ask: Ask, name: str, reply: Reply) -> Reply | None:
        if ask.kind == "take_turn" and name == "b" and ask.tensors["b"]:
            held = weights_of(run.strategy)
            published.append({key: held[f"backend.{key}"] for key in ask.tensors["b"]})
            assert_same(dict(ask.tensors["b"]), published[0])
        return away("b", ("choose_split",), lambda each: each.parameters["round"] == 1)(ask, name, reply)

    run.change = watch
    run.run()
    assert len(published) == 1


def test_norms_take_their_statistics_from_the_operators_images(model: Model) -> None:
    of = judged(model(model=RESNET, cuts=(2, 4)))
    one, other = (drive(of, replace(QUIET, epochs=1, norms=norms), [device("a", of, 8, 0, 2), device("b", of, 8, 1, 4)])
                  for norms in ("averaged", "public"))  # fmt: skip
    published, retaken = weights_of(one.run()), weights_of(other.run())
    moved = {name for name in published if (published[name] != retaken[name]).any()}
    assert moved and all(name.endswith(("running_mean", "running_var")) for name in moved)
    first = min((name for name in moved if name.endswith("running_mean")), key=list(published).index)
    seen = []
    module = other.strategy._rounds.w._module
    norm = module.get_submodule(first.removeprefix("backend.").rpartition(".")[0])
    with torch.no_grad():
        handle = norm.register_forward_pre_hook(lambda each, given: seen.append(given[0]))
        module.eval()(torch.from_numpy(of.evaluation.images))
        handle.remove()
    np.testing.assert_allclose(retaken[first], seen[0].mean(dim=(0, 2, 3)).numpy(), rtol=1e-4, atol=1e-5)


# -- the tables that devices choose by


def test_a_device_is_offered_the_noise_of_each_split_and_what_leaks_at_it(model: Model) -> None:
    of = model()
    run = drive(of, replace(SETTINGS, epochs=1), [device("pi", of, 8)])
    run.run()
    ((numbers, offer),) = run.devices["pi"].offers
    assert numbers == {"rule": "p3sl", "round": 1}
    assert offer["splits"].tolist() == [1, 2]
    assert offer["sigma"].tolist() == pytest.approx([1.5, 1.0])  # sigma_table: FSIM 0.5 - 0.1 sigma - 0.05 (s - 1)
    (sigma,) = {ask.own["pi"]["sigma"] for ask in run.asks if ask.kind == "noisy_forward"}
    assert sigma == pytest.approx(1.5)
    record = run.records[0]
    assert (record["split/pi"], record["sigma/pi"]) == (1, pytest.approx(1.5))
    assert record["fsim_clean/pi"] == pytest.approx(0.5) and record["fsim_total"] == pytest.approx(0.35)


def test_a_device_that_accepts_no_split_ends_the_run_as_infeasible(model: Model) -> None:
    of = model()
    with pytest.raises(TrainingError, match="infeasible: pi accepts none"):
        drive(of, SETTINGS, [device("pi", of, 8, 0, 0)]).run()


def test_a_split_that_was_not_offered_is_refused(model: Model) -> None:
    of = model()
    with pytest.raises(TrainingError, match="pi: split 7 was not offered"):
        drive(of, SETTINGS, [device("pi", of, 8, 0, 7)]).run()


def test_a_device_that_goes_deeper_gets_the_new_layers_only_and_one_that_goes_back_none(model: Model) -> None:
    of = model()
    changing = device("a", of, 16)
    changing.choose = lambda number: {1: 1, 2: 2, 3: 1}[number]
    before: dict[int, dict[str, np.ndarray]] = {}
    current: dict[str, np.ndarray] = {}

    def watch(ask: Ask, name: str, reply: Reply) -> Reply:
        if ask.kind == "take_turn" and name == "a":
            before[len(before)] = changing.held()
            current.update(run.strategy._rounds.w.floats())
            new = {key.removeprefix("backend.") for key in names_of(of, 2) - names_of(of, 1)}
            assert set(ask.tensors["a"]) == (new if ask.own["a"]["cut"] == 2 else set())
            assert_same(ask.tensors["a"], {key: current[f"backend.{key}"] for key in ask.tensors["a"]})
        return reply

    run = drive(of, QUIET, [changing, device("b", of, 16, 1)], watch)
    run.run()
    assert [record["split/a"] for record in run.records] == [1, 2, 1]
    shallow, deep = before[0], before[1]
    assert set(shallow) < set(deep)
    assert len(before) == 3


# -- the accuracy floor


def judged(of: Shipped, labels: np.ndarray | None = None) -> Shipped:
    images, true = pictures(30, 7)
    return replace(of, evaluation=Evaluation(images.numpy(), (true if labels is None else labels).astype(np.int64), 3))


def test_the_model_and_every_devices_own_chain_are_judged_without_noise(model: Model) -> None:
    of = judged(model())
    run = drive(of, replace(SETTINGS, epochs=4, aggregate_every=2), three(of))
    strategy = run.run()
    assert ["test_accuracy" in record for record in run.records] == [False, True, False, True]
    last = run.records[-1]
    w = strategy._rounds.w
    assert last["test_accuracy"] == w.accuracy(of.evaluation)
    for name, each in run.devices.items():
        part = {f"backend.{key}": value for key, value in each.held().items()}
        assert last[f"chain/{name}"] == w.accuracy(of.evaluation, part)
        z = each.part.eval()(torch.from_numpy(of.evaluation.images)).detach().flatten(1).numpy()
        right = (strategy.predict_part(name, z).argmax(axis=1) == of.evaluation.labels).mean()
        assert last[f"chain/{name}"] == pytest.approx(right)
    assert w.accuracy(of.evaluation) == last["test_accuracy"]  # judging changed nothing


def test_noise_is_lowered_once_the_accuracy_stays_below_the_floor_and_training_ends_when_none_is_left(
    model: Model,
) -> None:
    """Labels that nobody can know: A stays at chance, far below A_min, so each factor is the least, 0.1."""
    of = judged(model(), np.random.default_rng(0).integers(0, 3, 30))
    settings = replace(SETTINGS, epochs=40, learning_rate=1e-6, reference_accuracy=1.0)
    run = drive(of, settings, [device("pi", of, 8)])
    with pytest.raises(TrainingError, match="infeasible: the accuracy has stopped rising"):
        run.run()
    lowered = [record["sigma/pi"] for record in run.records if record.get("noise_lowered")]
    assert lowered == pytest.approx([1.5, 0.15, 0.015])
    assert all(record["floor_reached"] is False and record["accuracy_floor"] == 0.95 for record in run.records)
    assert run.devices["pi"].offers[-1][1]["sigma"].tolist() == [0.0, 0.0]


def test_training_recovers_once_less_noise_is_assigned(model: Model) -> None:
    """Under sigma 20 nothing is learnt; Eq. 5 lowers it until the model reaches the floor, and then leaves it alone."""
    of = judged(model())
    settings = replace(SETTINGS, epochs=16, sigma="20", reference_accuracy=0.95, accuracy_loss=0.1)
    run = drive(of, settings, [device("a", of, 24, 0, 1), device("b", of, 24, 1, 2)])
    run.run()
    floor, sigma = 0.9 * 0.95, 20.0
    for record in run.records:
        assert record["accuracy_floor"] == pytest.approx(floor)
        assert record["sigma/a"] == record["sigma/b"] == pytest.approx(sigma)
        if record.get("noise_lowered"):
            assert record["test_accuracy"] < floor
            sigma *= max(0.1, 1.0 - 2.0 * (floor - record["test_accuracy"]))
    assert not run.records[0]["floor_reached"] and 0.0 < sigma < 20.0
    assert [record["floor_reached"] for record in run.records[-2:]] == [True, True]
    for each in run.devices.values():  # all of them chose anew, by the new table
        assert each.offers[-1][1]["sigma"].tolist() == pytest.approx([sigma, sigma])


def test_noise_that_is_lowered_below_a_devices_floor_ends_the_run_as_infeasible(model: Model) -> None:
    """The device's floor is its own: the server learns that no split will do, never why."""
    of = judged(model(), np.random.default_rng(0).integers(0, 3, 30))
    careful = device("pi", of, 8)
    careful.choose = lambda number: 1 if careful.offers[-1][1]["sigma"][0] >= 1.0 else 0
    settings = replace(SETTINGS, epochs=40, learning_rate=1e-6, reference_accuracy=1.0)
    run = drive(of, settings, [careful])
    with pytest.raises(TrainingError, match="infeasible: pi accepts none of the splits under the noise") as raised:
        run.run()
    assert "sigma_floor" in raised.value.cure
    assert [record["sigma/pi"] for record in run.records if record.get("noise_lowered")] == [pytest.approx(1.5)]


def test_an_accuracy_above_the_floor_leaves_the_noise_alone(model: Model) -> None:
    of = judged(model())
    run = drive(of, replace(SETTINGS, epochs=6, reference_accuracy=0.01), [device("pi", of, 24)])
    run.run()
    assert {record["sigma/pi"] for record in run.records} == {1.5}
    assert all(record["floor_reached"] for record in run.records)


# -- devices that go away


def away(name: str, kinds: tuple[str, ...], when: Callable[[Ask], bool]) -> Callable[[Ask, str, Reply], Reply | None]:
    """The device answers none of these questions."""
    return lambda ask, asked, reply: None if asked == name and ask.kind in kinds and when(ask) else reply


def test_a_device_that_dies_in_its_turn_is_passed_over_and_comes_back_as_it_was_settled(model: Model) -> None:
    of = model()

    def dies(ask: Ask) -> bool:
        return ask.parameters["epoch"] == 2 and ask.own["b"]["batch"] == 1

    run = drive(of, QUIET, three(of), away("b", ("noisy_forward", "forward"), dies))
    strategy = run.run()
    assert [record["passed_over"] for record in run.records] == [None, "b", None]
    assert [record["aggregated"] for record in run.records] == [3, 2, 3]
    assert [record["epoch"] for record in run.records] == [1, 2, 3]
    turns = [ask for ask in run.asks if ask.kind == "take_turn" and "b" in ask.tensors]
    assert len(turns) == 3 and all(ask.tensors["b"] == {} for ask in turns)  # nobody overwrites what it holds
    calm = drive(of, QUIET, three(of))
    calm.run()
    assert run.records[0]["loss"] == calm.records[0]["loss"]
    assert np.isfinite(run.records[2]["loss"]) and weights_of(strategy).keys() == weights_of(calm.strategy).keys()


def test_a_device_that_is_away_from_the_start_begins_with_the_models_present_layers(model: Model) -> None:
    of = model()
    run = drive(of, QUIET, three(of), away("b", ("choose_split",), lambda ask: ask.parameters["round"] == 1))
    run.run()
    assert [record["passed_over"] for record in run.records] == ["b", None, None]
    (first, _) = [ask for ask in run.asks if ask.kind == "take_turn" and "b" in ask.tensors]
    assert {f"backend.{name}" for name in first.tensors["b"]} == names_of(of, 2)


def test_an_epoch_in_which_everyone_is_away_is_no_epoch(model: Model) -> None:
    of = model()
    gone = [0]

    def change(ask: Ask, name: str, reply: Reply) -> Reply | None:
        if ask.kind == "choose_split" and ask.parameters["round"] == 2 and gone[0] < 3:
            gone[0] += 1
            return None
        return reply

    run = drive(of, QUIET, three(of), change)
    run.run()
    assert [record["epoch"] for record in run.records] == [1, 2, 3]
    assert all(record["passed_over"] is None for record in run.records)
    waited = [ask for ask in run.asks if ask.quorum == 1]
    assert len(waited) == 1 and set(waited[0].tensors) == {"a", "b", "c"}


def test_every_question_of_a_turn_may_go_unanswered(model: Model) -> None:
    of = model()
    run = drive(of, SETTINGS, three(of))
    run.run()
    assert {ask.quorum for ask in run.asks} == {0}


# -- sleep


class Hours:
    """A clock that goes on by an hour at each look."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 3600.0
        return self.now_s


def test_a_device_sleeps_until_shortly_before_its_next_turn(model: Model) -> None:
    of = model()
    settings = replace(SETTINGS, sleep_least_s=10.0)
    run = drive(of, settings, three(of))
    run.build = lambda: p3sl.P3SL(of, settings, Hours())
    run.run()
    rests_s = {name: each.rests_s for name, each in run.devices.items()}
    # The first knows of no one's turn, the last of all; in the last epoch nobody is needed again.
    assert rests_s == {"a": [5760.0], "b": [5760.0], "c": [5760.0, 5760.0]}


def test_a_short_rest_is_not_worth_a_sleep(model: Model) -> None:
    of = model()
    settings = replace(SETTINGS, sleep_least_s=7201.0)
    run = drive(of, settings, three(of))
    run.build = lambda: p3sl.P3SL(of, settings, Hours())
    run.run()
    assert not any(each.rests_s for each in run.devices.values())


# -- stops


@pytest.mark.parametrize(
    ("mode", "seed", "into"),
    [
        ("raw-label", 0, "server"),
        ("raw-label", 0, "copy"),
        *(pytest.param(*each, "server", marks=pytest.mark.slow) for each in (("raw-label", 1), ("client-head", 0))),
    ],
)
def test_the_result_does_not_depend_on_when_it_settles_and_starts_anew(
    mode: str, seed: int, into: str, model: Model
) -> None:
    of = model(gradient="int8")
    settings = replace(SETTINGS, label_mode=mode, aggregate_every=2, epochs=4, average_into=into)

    def devices() -> list[Device]:
        made = [Device(each.name, of, each.images, each.labels, mode) for each in three(of)]
        for each, split in zip(made, (lambda n: 1, lambda n: 1 + n % 2, lambda n: 2), strict=True):
            each.choose = split
        return made

    whole, broken = (drive(of, settings, devices()) for _ in range(2))
    broken.due = whenever(seed)
    wanted, found = whole.run().state(), broken.run().state()
    assert broken.reloads > 2
    assert_same(*({key: value.numpy() for key, value in state.tensors.items()} for state in (found, wanted)))
    assert broken.records == whole.records
    for one, other in zip(whole.devices.values(), broken.devices.values(), strict=True):
        assert_same(one.held(), other.held())
