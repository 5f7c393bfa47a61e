"""Split training in one process: the torch trainer beside the device's own, and the command that compares."""

from __future__ import annotations

import gc
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contract.errors import DataError, RemoteProtocolError, TrainingError, UsageError
from contract.training import OptimiserRule
from edge_runtime.trainer import Trainer, open_trainer
from server_runtime import backend_folder, split_model
from tools import reproduce_split
from tools.reproduce_split import STRATEGIES, cells_of, parse
from tools.reproduce_split_rows import SplitCell, SplitFound, SplitLaboratory, SplitRates
from tools.reproduce_split_table import compare, summarise
from tools.reproduce_split_world import (
    ALL,
    SplitWorld,
    deal,
    export_part_package,
    full_split_world,
    pack,
    quick_split_world,
)
from tools.torch_trainer import TorchTrainer, open_torch_trainer

CUT = 3
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> SplitWorld:
    """Its packages are exported when they are first needed."""
    return quick_split_world(tmp_path_factory.mktemp("split"), str(CUT))


@pytest.fixture(scope="module")
def found(world: SplitWorld) -> Callable[[str, str], SplitFound]:
    """A strategy's figures on an engine, computed once."""
    rates, known = SplitRates(2, 16, 0.05), dict[tuple[str, str], SplitFound]()
    laboratories = {engine: SplitLaboratory(world, engine, rates, 2) for engine in ("torch", "onnxruntime")}

    def run(strategy: str, engine: str) -> SplitFound:
        if (strategy, engine) not in known:
            known[strategy, engine] = laboratories[engine].row(SplitCell("resnet18", strategy, 0))
        return known[strategy, engine]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_both_engines_tell_the_same_story(found: Callable[[str, str], SplitFound], strategy: str) -> None:
    ours, real = (found(strategy, engine) for engine in ("torch", "onnxruntime"))
    assert [each.epoch for each in ours.curve] == [each.epoch for each in real.curve] == [1, 2]
    for one, other in zip(ours.curve, real.curve, strict=True):
        assert one.loss == pytest.approx(other.loss, abs=1e-3)
        assert (one.bytes_up, one.bytes_down, one.learning_rate) == (
            other.bytes_up,
            other.bytes_down,
            other.learning_rate,
        )
        assert abs(one.test_accuracy - other.test_accuracy) <= 0.01  # roundings tip a few of hundreds of images
    assert ours.images == 150 and ours.devices == (1 if strategy == "centralised" else 3)
    assert ours.curve[1].loss != ours.curve[0].loss  # twenty steps move it; that it learns is shown elsewhere


@pytest.mark.slow
def test_the_whole_model_is_what_the_last_device_predicts_with(found: Callable[[str, str], SplitFound]) -> None:
    """Sequential training leaves its last device with W's own part: two paths to one figure."""
    for strategy in ("sequential_split", "centralised"):
        one = found(strategy, "torch")
        assert one.device_accuracy == pytest.approx(one.curve[-1].test_accuracy, abs=1e-9)


# -- the trainer

Pair = tuple[Trainer, TorchTrainer]


@pytest.fixture
def pair(world: SplitWorld) -> Callable[..., Pair]:
    def make(strategy: str, rule: OptimiserRule, device: torch.device = CPU) -> Pair:
        front = export_part_package(world, "resnet18", strategy)
        folder = backend_folder.read(front.with_name(f"{front.name}.backend"))
        shipped = split_model.load(folder, CPU)  # type: ignore[arg-type]
        (cut,) = shipped.plan.cuts
        ours = open_torch_trainer(front, cut, rule, shipped.module, shipped.plan.class_count, device)
        return open_trainer(front, cut, rule), ours

    return make


def batch_of(trainer: Trainer | TorchTrainer, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    images = rng.standard_normal((8, 3, 32, 32), dtype=np.float32)
    gradient = rng.standard_normal((8, *trainer.cut.output_shape), dtype=np.float32)
    return {"x": images, "grad_z": gradient, "targets": np.eye(5, dtype=np.float32)[rng.integers(0, 5, 8)]}


def train(trainer: Trainer | TorchTrainer, steps: range) -> None:
    for seed in steps:
        batch, own = batch_of(trainer, seed), trainer.cut.loss != "none"
        trainer.forward(batch["x"], batch["targets"] if own else None)
        trainer.backward(None if own else batch["grad_z"])
        trainer.step(1e-3)


@pytest.mark.parametrize("strategy", ["sequential_split", pytest.param("fed_avg", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", [OptimiserRule(), OptimiserRule(momentum=0.0), OptimiserRule("adamw", 0.0, 0.01)])
def test_steps_are_the_devices_own(pair: Callable[..., Pair], strategy: str, rule: OptimiserRule) -> None:
    real, ours = pair(strategy, rule)
    for trainer in (real, ours):
        train(trainer, range(2))
    expected, state = real.state(), ours.state()
    assert list(state) == list(expected)
    for name, value in expected.items():
        if rule.kind == "adamw" and name.startswith("tensor:"):  # a gradient of nearly 0 has a sign of its own
            assert np.abs(state[name] - value).max() <= 2.5e-3, name
        else:
            assert np.abs(state[name] - value).max() <= 2e-3 * max(np.abs(value).max(), 1e-3), name
    images = batch_of(real, 9)["x"]
    np.testing.assert_allclose(ours.evaluate(images), real.evaluate(images), atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["sequential_split", "fed_avg"])
def test_captured_steps_are_the_parts_own(pair: Callable[..., Pair], strategy: str) -> None:
    device = torch.device("cuda")
    (_, captured), (_, plain) = (pair(strategy, OptimiserRule(), device) for _ in range(2))
    plain._captured = None
    for trainer in (captured, plain):
        train(trainer, range(8))
    assert captured._captured is not None and captured._captured._graphed
    expected, state = plain.state(), captured.state()
    for name, value in expected.items():
        assert np.abs(state[name] - value).max() <= 1e-3 * max(np.abs(value).max(), 1e-3), name


@pytest.mark.gpu
def test_a_study_s_next_row_captures_after_the_last_row_s_parts_are_gone(pair: Callable[..., Pair]) -> None:
    for _ in range(2):
        _, ours = pair("fed_avg", OptimiserRule(), torch.device("cuda"))
        train(ours, range(4))
        assert ours._captured is not None and ours._captured._graphed
        del ours
        gc.collect()
        torch.cuda.empty_cache()


@pytest.mark.parametrize("rule", [OptimiserRule(), OptimiserRule("adamw", 0.0, 0.01)])
def test_a_state_goes_on_as_if_nothing_had_happened(pair: Callable[..., Pair], rule: OptimiserRule) -> None:
    _, ours = pair("sequential_split", rule)
    _, other = pair("sequential_split", rule)
    train(ours, range(2))
    other.load_state(ours.state())
    for trainer in (ours, other):
        train(trainer, range(2, 4))
    for name, value in ours.state().items():
        assert (other.state()[name] == value).all(), name


def test_what_is_dropped_or_refused_changes_nothing(pair: Callable[..., Pair]) -> None:
    _, ours = pair("sequential_split", OptimiserRule())
    train(ours, range(1))
    before, batch = ours.state(), batch_of(ours, 1)
    ours.forward(batch["x"])
    ours.discard()
    with pytest.raises(ValueError, match="without a forward"):
        ours.backward(batch["grad_z"])
    ours.forward(batch["x"])
    ours.backward(batch["grad_z"] * np.float32(np.nan))
    with pytest.raises(TrainingError, match="not finite"):
        ours.step(0.1)
    with pytest.raises(RemoteProtocolError, match="cut 3"):
        ours.load_parameters({"conv1.weight": np.zeros(3, np.float32)})
    for name, value in ours.state().items():
        assert (before[name] == value).all(), name


# -- images and the command


def test_every_image_is_dealt_once_and_evenly() -> None:
    names = [f"x/train/{label}/{number}.jpg" for label in range(10) for number in range(50)]
    devices = [f"device-{number}" for number in range(7)]
    dealt = deal(names, devices, 1)
    assert sorted(name for own in dealt.values() for name in own) == sorted(names)
    sizes = [len(own) for own in dealt.values()]
    assert max(sizes) - min(sizes) == 1
    assert dealt != deal(names, devices, 2) and dealt == deal(names[::-1], devices, 1)


def test_an_archive_of_what_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.reproduce_split_world.FULL_SHOTS", 3)
    (tmp_path / "data").mkdir()
    with zipfile.ZipFile(tmp_path / "data" / "cifar10.zip", "w") as archive:
        for part in ("train", "test"):
            for label in range(10):
                for number in range(5):
                    archive.writestr(f"cifar10/{part}/c{label}/{number}.jpg", f"{part}{label}{number}")
    world = full_split_world(tmp_path / "world", tmp_path, "6", 20)
    assert (len(world.names("train")), len(world.names("test")), len(world.classes)) == (30, 20, 10)
    again = full_split_world(tmp_path / "world", tmp_path / "nowhere", "6", 20)  # it needs the archive no more
    assert len(list(again.train_folder(ALL, 0).rglob("*.jpg"))) == 30
    with pytest.raises(DataError, match="holds 20 test images, asked for are 10"):
        full_split_world(tmp_path / "world", tmp_path, "6", 10)
    with pytest.raises(DataError, match=r"data/cifar10\.zip"):
        full_split_world(tmp_path / "other", tmp_path / "nowhere", "6", 20)
    with pytest.raises(DataError, match="expected 6"):
        pack(tmp_path / "data" / "cifar10.zip", tmp_path / "too-many.zip", 60)


def test_the_full_study_has_thirty_cells_and_one_can_be_chosen() -> None:
    assert len(set(cells_of(parse([])))) == 30
    assert cells_of(parse(["--only", "vgg16_bn/split_fed/2"])) == [SplitCell("vgg16_bn", "split_fed", 2)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--models", "resnet19"], "no model 'resnet19'"),
        (["--strategies", "split_feed"], "did you mean"),
        (["--only", "resnet18/split_fed"], "MODEL/STRATEGY/SEED"),
        (["--seeds", "1,x"], "--seeds"),
        (["--seeds", "-1"], "--seeds"),
        (["--epochs", "0"], "--epochs"),
        (["--learning-rate", "nan"], "--learning-rate"),
        (["--test-images", "15"], "multiple of 10"),
        (["--quick", "--test-images", "10"], "--test-images belongs"),
        (["--quick", "--models", "vgg16_bn"], "no model"),
        (["--table", "--prepare"], "not allowed"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(words: list[str], said: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(words)
    assert said in f"{error.value.cause} {error.value.cure}"


def row(strategy: str, seed: int, *tested: float) -> dict[str, Any]:
    curve = [
        {"epoch": place, "loss": 2.0 - place, "test_accuracy": each, "bytes_up": 10, "bytes_down": 20, "seconds": 1.0}
        for place, each in enumerate(tested, start=1)
    ]
    return {"model": "m", "strategy": strategy, "seed": seed, "curve": curve, "device_accuracy": None}


def test_cells_and_pairs_are_by_the_last_epoch_and_by_seed() -> None:
    rows = [row("a", 0, 0.3, 0.4), row("a", 1, 0.7, 0.6), row("b", 1, 0.5, 0.5), row("b", 0, 0.4, 0.5)]
    first, second = summarise(rows)
    assert (first["strategy"], first["seeds"], first["device"]) == ("a", [0, 1], None)
    assert first["last"] == {"mean": pytest.approx(0.5), "std": pytest.approx(0.1414, abs=1e-4)}
    assert first["best"]["mean"] == pytest.approx(0.55) and second["last"]["std"] == 0.0
    assert (first["bytes_up"], first["bytes_down"], first["epoch_s"]) == (10, 20, 1.0)
    rows[0]["curve"][-1]["test_accuracy"] = 0.2
    (pair,) = compare(rows)
    assert (pair["better"], pair["worse"], pair["ahead"], pair["seeds"]) == ("b", "a", 1, 2)
    assert pair["lead"]["mean"] == pytest.approx(0.1)


def test_the_command_keeps_its_rows(
    world: SplitWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--quick", "--engine", "torch", "--world", str(world.root), "-o", str(tmp_path), "--epochs", "1"]
    chosen = [*words, "--only", "resnet18/centralised/0", "--format", "json"]
    assert reproduce_split.main(chosen) == 0
    first = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(SplitLaboratory, "row", lambda self, cell: pytest.fail("computed twice"))
    assert reproduce_split.main(chosen) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert reproduce_split.main([*words, "--table"]) == 0
    assert "resnet18, centralised" in capsys.readouterr().out
    (line,) = (tmp_path / "split.jsonl").read_text().splitlines()
    assert json.loads(line) == first["rows"][0]
    assert (tmp_path / "split.html").read_text().startswith("<!doctype html>")
    with pytest.raises(UsageError, match="no finished row"):
        reproduce_split.main([*words, "--epochs", "3", "--table"])
