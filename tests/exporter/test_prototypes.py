"""Parts with g and a projection head: algorithms.md 5.4, invariants 1, 4 and 5, and the graphs against autograd."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from contract import training
from contract.errors import ExportError, UsageError
from contract.training import PROJECTION, OptimiserRule, PrototypeRule
from edge_runtime.trainer import Trainer
from exporter import prototypes
from exporter.cli import FIELDS, make_plan
from exporter.training_check import TrainingRule, check_training_graphs
from exporter.training_graph import TrainingGraphs, make_training_graphs
from exporter.training_package import set_modes

SHAPE, WIDTH = (3, 8, 8), 6
RULE = PrototypeRule(dimension=4, distance="cosine", normalise=True, scale=7.0)
PLAIN = dataclasses.replace(RULE, normalise=False, scale=1.0)


def small_part(rule: PrototypeRule | None) -> nn.Module:
    """Two convolutions with batch statistics, the same weights every time; its tensors' names are the same with and
    without a projection head."""
    torch.manual_seed(3)
    part = nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, 1, 1, bias=False), nn.BatchNorm2d(WIDTH), nn.SiLU(), nn.Conv2d(WIDTH, WIDTH, 3, 2, 1)
    )
    if rule is not None:
        prototypes.attach(part, rule, WIDTH)
    names = [name for name, _ in part.named_parameters()]
    set_modes(part, names)
    return part


def graphs_of(rule: PrototypeRule | None) -> tuple[nn.Module, TrainingGraphs]:
    part = small_part(rule)
    names = [name for name, _ in part.named_parameters()]
    return part, make_training_graphs(part, SHAPE, trainable=names, prototypes=rule)


@pytest.fixture(scope="module")
def made() -> dict[str, tuple[nn.Module, TrainingGraphs]]:
    rules = {"bare": None, "plain": PLAIN, "g": RULE, "l2": dataclasses.replace(RULE, distance="l2")}
    return {name: graphs_of(rule) for name, rule in rules.items()}


def trainer(folder: Path, part: nn.Module, graphs: TrainingGraphs) -> Trainer:
    folder.mkdir(exist_ok=True)
    for role in ("forward", "backward", "evaluate"):
        (folder / f"{role}.onnx").write_bytes(getattr(graphs, role))
    cut = training.TrainingCut(
        1, 2, "last", "forward.onnx", "backward.onnx", "evaluate.onnx", graphs.output_shape, graphs.evaluated_shape,
        None, None, graphs.trainable, graphs.frozen, graphs.buffers, graphs.saved, graphs.macs, "none",
    )  # fmt: skip
    tensors = {name: value.detach().numpy() for name, value in part.state_dict().items()}
    return Trainer(folder, cut, OptimiserRule(), tensors)


def batch_of(seed: int, count: int = 5) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    anchors = rng.normal(size=(count, 4)).astype(np.float32)
    return {
        "x": rng.normal(size=(count, *SHAPE)).astype(np.float32),
        "grad_z": rng.normal(size=(count, WIDTH, 4, 4)).astype(np.float32),
        "anchors": anchors / np.linalg.norm(anchors, axis=1, keepdims=True),
        "pull": rng.uniform(0, 1, count).astype(np.float32),
    }


# -- g


@pytest.mark.parametrize("scale", [1.0, 41.9])
def test_invariant_1_every_image_leaves_with_one_length_whatever_it_had(scale: float) -> None:
    h = torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 3, 6).view(6, 1, 1, 1)
    found = prototypes.normalise(h, scale)
    assert found.flatten(1).norm(dim=1).numpy() == pytest.approx(scale, rel=1e-5)
    torch.testing.assert_close(prototypes.normalise(37.0 * h, scale), found)
    assert not prototypes.normalise(torch.zeros(2, 3), scale).any()


def test_the_scale_is_the_mean_length_of_the_pretrained_part_and_nothing_is_moved() -> None:
    part = small_part(None)
    before = {name: value.clone() for name, value in part.state_dict().items()}
    images = torch.from_numpy(batch_of(0)["x"])
    found = prototypes.with_scale(PLAIN, part, images)
    assert found.scale == pytest.approx(part.eval()(images).detach().flatten(1).norm(dim=1).mean().item())
    assert all((value == before[name]).all() for name, value in part.state_dict().items())


# -- the graphs


@pytest.mark.parametrize("name", ["plain", "g", "l2"])
def test_graphs_are_those_of_autograd(name: str, made: dict[str, tuple[nn.Module, TrainingGraphs]]) -> None:
    part, graphs = made[name]
    figures = check_training_graphs(part, graphs, SHAPE, rule=TrainingRule(batch=8))
    assert figures.gradient_error < 1e-5 and graphs.prototypes is not None
    assert set(PROJECTION) <= set(graphs.trainable)


def test_what_leaves_the_graph_has_the_signed_length(
    tmp_path: Path, made: dict[str, tuple[nn.Module, TrainingGraphs]]
) -> None:
    device = trainer(tmp_path, *made["g"])
    batch = batch_of(1)
    out = device.forward(batch["x"], anchors=batch["anchors"])
    assert np.linalg.norm(out.z.reshape(5, -1), axis=1) == pytest.approx(RULE.scale, rel=1e-5)
    assert np.linalg.norm(device.evaluate(batch["x"]).reshape(5, -1), axis=1) == pytest.approx(RULE.scale, rel=1e-5)
    assert out.embedding is not None and out.distance is not None
    np.testing.assert_allclose(np.linalg.norm(out.embedding, axis=1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(out.distance, 1 - (out.embedding * batch["anchors"]).sum(axis=1), atol=1e-6)


def test_invariant_4_no_gradient_reaches_a_prototype(
    tmp_path: Path, made: dict[str, tuple[nn.Module, TrainingGraphs]]
) -> None:
    for name in ("g", "l2"):
        part, graphs = made[name]
        device, batch = trainer(tmp_path / name, part, graphs), batch_of(2)
        before = batch["anchors"].tobytes()
        device.forward(batch["x"], anchors=batch["anchors"])
        gradients = device.backward(batch["grad_z"], batch["pull"])
        device.step(0.1)
        assert set(gradients) == set(graphs.trainable)  # of the part's tensors, and of nothing else
        assert batch["anchors"].tobytes() == before


def test_the_pull_brings_embeddings_nearer(tmp_path: Path, made: dict[str, tuple[nn.Module, TrainingGraphs]]) -> None:
    device, batch = trainer(tmp_path, *made["g"]), batch_of(3)
    distances = []
    for _ in range(8):
        out = device.forward(batch["x"], anchors=batch["anchors"])
        assert out.distance is not None
        distances.append(float(out.distance.mean()))
        device.backward(0 * batch["grad_z"], np.full(5, 0.2, np.float32))
        device.step(0.05)
    assert distances[-1] < distances[0] - 0.2


def test_invariant_5_without_a_pull_the_part_moves_as_one_without_a_head_bit_for_bit(
    tmp_path: Path, made: dict[str, tuple[nn.Module, TrainingGraphs]]
) -> None:
    bare, plain = (trainer(tmp_path / name, *made[name]) for name in ("bare", "plain"))
    for seed in range(4):
        batch = batch_of(seed)
        one = bare.forward(batch["x"])
        other = plain.forward(batch["x"], anchors=np.zeros((5, 4), np.float32))
        assert one.z.tobytes() == other.z.tobytes()
        bare.backward(batch["grad_z"])
        plain.backward(batch["grad_z"], np.zeros(5, np.float32))
        bare.step(0.1)
        plain.step(0.1)
    expected, found = bare.parameters(), plain.parameters()
    assert all(found[name].tobytes() == value.tobytes() for name, value in expected.items())


# -- what is refused


def plan(**changed: object) -> object:
    values = {field.name: field.default for field in FIELDS}
    values |= {"model": "resnet18", "output": Path("x"), "for": "prototypes", **changed}

    class Resolved:
        def __init__(self) -> None:
            self.values = values
            self.origin = {name: "--" + name if name in changed else "default" for name in values}

    return make_plan(Resolved(), False)  # type: ignore[arg-type]


def test_choices_of_prototypes_come_from_the_command_line() -> None:
    chosen = plan(distance="l2", projection=16, no_normalise=True, count_step=5).training.prototypes  # type: ignore[attr-defined]
    assert chosen == PrototypeRule(16, "l2", False, 1.0, 5)
    assert plan(**{"for": "split_fed"}).training.prototypes is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "changed", [{"for": "split_fed", "distance": "l2"}, {"count_step": -1}, {"keep_patches": 0.5}, {"projection": -4}]
)
def test_choices_that_do_not_fit_are_refused(changed: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        plan(**changed)


def test_a_head_needs_places_to_average() -> None:
    assert prototypes.width_of((6, 4, 4)) == 6 and prototypes.width_of((17, 24)) == 24
    with pytest.raises(ExportError, match="map or tokens"):
        prototypes.width_of((24,))


def test_equal_seeds_give_every_device_the_same_head() -> None:
    digests = {hashlib.sha256(small_part(RULE).projection_weight.detach().numpy()).hexdigest() for _ in range(2)}
    assert len(digests) == 1
