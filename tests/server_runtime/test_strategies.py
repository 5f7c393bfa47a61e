"""The strategies on a tiny random backend: what they learn, what they must not depend on, and going on after a stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("timm")

from contract import tokens  # noqa: E402
from contract.asks import ASK_KINDS  # noqa: E402
from contract.errors import ConfigError, TrainingError  # noqa: E402
from contract.messages import Gradient  # noqa: E402
from contract.training import HOLDS  # noqa: E402
from server_runtime import backend, backend_folder, strategies  # noqa: E402
from server_runtime.backend import Backend  # noqa: E402
from server_runtime.store import Upload  # noqa: E402
from server_runtime.strategies import Ask, Progress, Record, Reply, Settings, Site, State, Strategy  # noqa: E402
from tests.server_runtime import tiny  # noqa: E402

FRONTEND = [name for name in strategies.names() if HOLDS[name] == "frontend"]  # the others: test_split_strategies
SETTINGS = Settings("permuted-label", tiny.KAPPA, 4, 4, 0.25, 7, backend_lr=1e-3, head_lr=1e-2)


def shipped_backend(root: Path, settings: Settings) -> Strategy:
    """Split adaptation over the backend folder at `root`, in this process."""
    loaded = backend.load(backend_folder.read(root), settings.kappa, backend.choose_device(1))
    return build("split_adaptation", loaded, settings)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Backend:
    root = tiny.write_backend_folder(tmp_path_factory.mktemp("export") / "front.backend")
    return backend.load(backend_folder.read(root), tiny.KAPPA, backend.choose_device(1))


Answer = Callable[[Ask, str, Upload], Reply]


def answer_as_device(ask: Ask, device: str, upload: Upload, labels: np.ndarray | None = None) -> Reply:
    """What a device of logit-gradient mode answers: softmax minus one-hot over its own rows, by sample id."""
    if ask.kind == "collect_features":
        return upload
    values, ids = ask.tensors[device]["logits"], ask.tensors[device]["sample_ids"]
    known = {sample_id.tobytes(): int(label) for sample_id, label in zip(upload.sample_ids, labels, strict=True)}
    wanted = np.array([known[sample_id.tobytes()] for sample_id in ids])
    shifted = np.exp(values.astype(np.float64) - values.max(axis=1, keepdims=True))
    chance = shifted / shifted.sum(axis=1, keepdims=True)
    loss = float(-np.log(chance[np.arange(len(wanted)), wanted]).mean())
    correct = int((chance.argmax(axis=1) == wanted).sum())
    chance[np.arange(len(wanted)), wanted] -= 1
    return Gradient(ask.name, loss, correct, len(wanted), (chance / len(wanted)).astype(np.float32))


def drive(
    strategy: Strategy,
    uploads: Mapping[str, Upload],
    answer: Answer = lambda ask, device, upload: upload,
    until: Callable[[Record], bool] = lambda record: False,
) -> list[Record]:
    """Run a strategy to its end, or to the record where `until` holds; devices answer at once."""
    site = Site("clinic", tuple(sorted(uploads)), tiny.CLASSES)
    conduct, replies, records = strategy.run(site), None, []
    while True:
        try:
            step = next(conduct) if replies is None else conduct.send(replies)
        except StopIteration:
            return records
        replies = {}
        if isinstance(step, Ask):
            numbers = () if step.step is None else ("step", "after", "base")  # the conductor's to give
            assert {*step.parameters, *numbers} == set(ASK_KINDS[step.kind].parameters)
            replies = {device: answer(step, device, uploads[device]) for device in step.tensors}
        elif isinstance(step, Record):
            records.append(step)
            if until(step):
                return records
        else:
            assert isinstance(step, Progress)


def build(name: str, shipped: Backend, settings: Settings = SETTINGS) -> Strategy:
    return strategies.find(name).build(shipped, settings)


def weights_of(strategy: Strategy) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in strategy.state().tensors.items()}


@pytest.mark.parametrize("name", FRONTEND)
def test_every_strategy(name: str, shipped: Backend) -> None:
    """The folder is the registry: each entry builds, trains, tells its end and predicts."""
    module = strategies.find(name)
    assert "permuted-label" in module.LABEL_MODES
    strategy = build(name, shipped)
    upload = tiny.upload("pi", 12)
    last = drive(strategy, {"pi": upload})[-1]
    assert last.values["samples"] == 12
    scores = strategy.predict(upload.codes)
    assert scores.shape == (12, tiny.CLASSES)
    assert scores.dtype == np.float32
    again = build(name, shipped)
    again.load(Site("clinic", ("pi",), tiny.CLASSES), strategy.state())
    assert again.predict(upload.codes).tobytes() == scores.tobytes()


def test_an_unknown_strategy_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="split_adaptation"):
        strategies.find("split_adaption")


def test_loss_falls_on_a_tiny_overfit_task_and_the_shipped_backend_is_unchanged(shipped: Backend) -> None:
    before = {name: tensor.clone() for name, tensor in shipped.module.state_dict().items()}
    strategy = build("split_adaptation", shipped, replace(SETTINGS, epochs=40))
    records = drive(strategy, {"pi": tiny.upload("pi", 8)})
    assert records[-1].values["loss"] < 0.2 * records[0].values["loss"]
    assert records[-1].values["accuracy"] == 1.0
    assert records[-1].values["rows"] == 16  # each image un-augmented and under one run
    assert all(torch.equal(before[name], tensor) for name, tensor in shipped.module.state_dict().items())


def test_the_head_learns_something_before_the_backend_moves(shipped: Backend) -> None:
    """A head of zeros sends nothing back: the first step is its own."""
    strategy = build("split_adaptation", shipped, replace(SETTINGS, epochs=1))
    assert drive(strategy, {"pi": tiny.upload("pi", 8)})[-1].values["rows"] == 16  # one batch, one step
    tensors = strategy.state().tensors
    assert tensors["head.weight"].abs().max() > 0
    for name, tensor in shipped.module.state_dict().items():
        assert torch.equal(tensors[f"backend.{name}"], tensor), name


def test_linear_probe_beats_chance_on_images_it_never_saw(shipped: Backend) -> None:
    strategy = build("linear_probe", shipped, replace(SETTINGS, epochs=60))
    record = drive(strategy, {"pi": tiny.upload("pi", 30)})[-1]
    fresh = tiny.upload("pi", 60, seed=5)
    right = (strategy.predict(fresh.codes).argmax(axis=1) == fresh.labels).mean()
    assert right > 0.6
    assert 0 <= record.values["held_out_accuracy"] <= 1
    assert not any(name.startswith("backend.") for name in strategy.state().tensors)


def test_linear_probe_with_one_shot_each_has_nothing_to_hold_out(shipped: Backend) -> None:
    record = drive(build("linear_probe", shipped), {"pi": tiny.upload("pi", 3)})[-1]
    assert record.values["held_out_accuracy"] is None


@pytest.mark.parametrize(("count", "batch"), [(17, 8), (1, 8)])
def test_se_03_every_sample_counts_also_in_a_short_batch(
    count: int, batch: int, shipped: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = strategies.find("split_adaptation")
    monkeypatch.setattr(module, "BATCH", batch)
    plain = replace(SETTINGS, augmentations=0, epochs=2)
    records = drive(build("split_adaptation", shipped, plain), {"pi": tiny.upload("pi", count)})
    assert [record.values["rows"] for record in records] == [count, count]
    assert [record.values["samples"] for record in records] == [count, count]


@pytest.mark.parametrize("name", FRONTEND)
def test_arrival_order_does_not_matter(name: str, shipped: Backend) -> None:
    """Devices in another order, and a device's samples in another order, give the same weights bit for bit."""
    uploads = {"pi": tiny.upload("pi", 9), "jetson": tiny.upload("jetson", 7, seed=1)}
    shuffled = dict(reversed([(device, _shuffled(upload)) for device, upload in uploads.items()]))
    first, second = build(name, shipped), build(name, shipped)
    drive(first, uploads)
    drive(second, shuffled)
    assert weights_of(first) == weights_of(second)


def _shuffled(upload: Upload) -> Upload:
    order = np.random.default_rng(3).permutation(len(upload.sample_ids))
    place = np.argsort(order)  # where each old sample is now
    assert upload.sources is not None and upload.labels is not None
    return Upload(
        upload.device, upload.sample_ids[order], upload.codes[order],
        place[upload.sources[order]].astype(np.uint16), upload.labels[order],
    )  # fmt: skip


def test_resume_equals_uninterrupted_training(shipped: Backend) -> None:
    uploads = {"pi": tiny.upload("pi", 20)}
    whole = build("split_adaptation", shipped)
    drive(whole, uploads)
    first = build("split_adaptation", shipped)
    drive(first, uploads, until=lambda record: record.values["epoch"] == 2)
    second = build("split_adaptation", shipped)
    second.load(Site("clinic", ("pi",), tiny.CLASSES), first.state())
    records = drive(second, uploads)
    assert [record.values["epoch"] for record in records] == [3, 4]
    assert weights_of(second) == weights_of(whole)


def test_gradients_from_devices_train_as_labels_at_the_server_do(shipped: Backend) -> None:
    """Two devices' gradients of their own means, put together by rows, are the gradient of the batch's mean."""
    with_labels = {"pi": tiny.upload("pi", 9), "jetson": tiny.upload("jetson", 6, seed=1)}
    without = {device: replace(upload, labels=None) for device, upload in with_labels.items()}

    def answer(ask: Ask, device: str, upload: Upload) -> Reply:
        return answer_as_device(ask, device, upload, with_labels[device].labels)

    at_server = drive(build("split_adaptation", shipped), with_labels)
    at_devices = drive(
        build("split_adaptation", shipped, replace(SETTINGS, label_mode="logit-gradient")), without, answer
    )
    for ours, theirs in zip(at_server, at_devices, strict=True):
        assert ours.values["loss"] == pytest.approx(theirs.values["loss"], rel=1e-3)
        assert ours.values["accuracy"] == pytest.approx(theirs.values["accuracy"])


def test_client_head_keeps_no_head_and_predicts_features(shipped: Backend) -> None:
    from edge_runtime.head import head_step, new_head

    heads = {"pi": new_head(tiny.CLASSES, tiny.LAYOUT.dim, np.random.default_rng(0))}
    labelled = tiny.upload("pi", 9)
    known = {
        sample_id.tobytes(): int(label) for sample_id, label in zip(labelled.sample_ids, labelled.labels, strict=True)
    }

    def answer(ask: Ask, device: str, upload: Upload) -> Reply:
        if ask.kind == "collect_features":
            return upload
        asked = ask.tensors[device]
        labels = np.array([known[sample_id.tobytes()] for sample_id in asked["sample_ids"]])
        heads[device], loss = head_step(heads[device], asked["features"], labels, 1e-2)
        return Gradient(ask.name, loss.mean_loss, loss.correct, loss.count, loss.gradient)

    strategy = build("split_adaptation", shipped, replace(SETTINGS, label_mode="client-head", epochs=20))
    records = drive(strategy, {"pi": replace(labelled, labels=None)}, answer)
    assert records[-1].values["loss"] < records[0].values["loss"]
    assert strategy.predict(labelled.codes).shape == (9, tiny.LAYOUT.dim)
    assert not any(name.startswith("head.") for name in strategy.state().tensors)


def test_se_01_a_void_step_changes_nothing_and_its_means_are_absent(shipped: Backend) -> None:
    def useless(ask: Ask, device: str, upload: Upload) -> Reply:
        if ask.kind == "collect_features":
            return upload
        return Gradient(ask.name, 1.0, 0, 1, np.zeros((1, 99), np.float32))  # not the shape that was asked for

    settings = replace(SETTINGS, label_mode="logit-gradient", epochs=1)
    strategy, untouched = build("split_adaptation", shipped, settings), build("split_adaptation", shipped, settings)
    upload = replace(tiny.upload("pi", 6), labels=None)
    record = drive(strategy, {"pi": upload}, useless)[-1]
    assert (record.values["loss"], record.values["accuracy"]) == (None, None)
    assert record.values["void_steps"] == 1
    assert record.values["unusable_replies"] == 1
    conduct = untouched.run(Site("clinic", ("pi",), tiny.CLASSES))
    next(conduct)
    conduct.send({"pi": upload})  # prepared, not trained
    assert weights_of(strategy) == weights_of(untouched)


def test_a_loss_that_is_not_finite_names_the_epoch(shipped: Backend) -> None:
    settings = replace(SETTINGS, backend_lr=float("inf"))
    with pytest.raises(TrainingError, match="epoch 2"):
        drive(build("split_adaptation", shipped, settings), {"pi": tiny.upload("pi", 6)})


def test_a_site_without_samples_is_an_error(shipped: Backend) -> None:
    empty = tiny.upload("pi", 6)
    empty = Upload("pi", empty.sample_ids[:0], empty.codes[:0], empty.sources[:0], empty.labels[:0])
    for name in FRONTEND:
        with pytest.raises(TrainingError, match="no sample"):
            drive(build(name, shipped), {"pi": empty})


def test_tokens_are_dequantized_and_filtered_as_the_contract_says(shipped: Backend) -> None:
    codes = tiny.upload("pi", 4).codes
    front = shipped.front
    plain = tokens.dequantize(codes, front.steps, front.prefix)
    wanted = np.empty_like(plain)
    wanted[:, :1] = plain[:, :1] @ front.matrices[0].T + front.offsets[0]
    wanted[:, 1:] = plain[:, 1:] @ front.matrices[1].T + front.offsets[1]
    np.testing.assert_allclose(shipped.tokens(codes).numpy(), wanted, rtol=1e-5, atol=1e-5)
    # The filter pulls noisy tokens towards the mean (here 0), it never stretches them.
    assert np.linalg.norm(wanted) < np.linalg.norm(plain)


def test_state_holds_tensors_only(shipped: Backend, tmp_path: Path) -> None:
    from server_runtime.run_directory import RunDirectory

    strategy = build("split_adaptation", shipped)
    drive(strategy, {"pi": tiny.upload("pi", 6)})
    directory = RunDirectory(tmp_path)
    directory.keep("clinic", strategy.state(), ended=True)
    found = directory.resume("clinic")
    assert found is not None
    state, ended = found
    assert ended
    assert isinstance(state, State)
    assert {name: tensor.numpy().tobytes() for name, tensor in state.tensors.items()} == weights_of(strategy)
    assert dict(state.values) == dict(strategy.state().values)
