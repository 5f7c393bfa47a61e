from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save, save_file

from contract.errors import DeviceError, EngineError, PackageError, RemoteProtocolError, TrainingError
from contract.training import OptimiserRule, TrainingCut
from edge_runtime.trainer import Trainer, TrainerSettings, open_trainer
from tests.edge_runtime.onnx_bytes import node, number, tensor, text, value_info

SIZE, DIM = 2, 4  # images (B, 3, 2, 2), z (B, 4)
INPUTS = 3 * SIZE * SIZE
SGD = OptimiserRule("sgd", momentum=0.9, weight_decay=0.01)
ADAMW = OptimiserRule("adamw", weight_decay=0.01)
FLAT = node("Flatten", ["x"], "flat")
AXES = {"rows": np.array([0], np.int64), "columns": np.array([1], np.int64), "tenth": np.array(0.1, np.float32)}
SHAPES: dict[str, tuple[int | str, ...]] = {
    "x": ("batch", 3, SIZE, SIZE),
    "z": ("batch", DIM),
    "grad_z": ("batch", DIM),
    "saved:0": ("batch", DIM),
    "targets": ("batch", DIM),
    "loss": (),
    "w": (INPUTS, DIM),
    "b": (DIM,),
    "scale": (DIM,),
    "mean": (DIM,),
}


def reduced(operator: str, inputs: list[str], output: str) -> bytes:
    """A reduction that drops the axes it sums over."""
    keepdims = text(1, "keepdims") + number(3, 0) + number(20, 2)
    return node(operator, inputs, output) + text(5, keepdims)


def model(nodes: list[bytes], inputs: list[str], outputs: list[str], shapes: dict[str, Any] = SHAPES) -> bytes:
    def declared(name: str) -> bytes:
        return value_info(name, shapes[name.removeprefix("grad:").removeprefix("new:")])

    graph = b"".join(text(1, each) for each in nodes) + text(2, "part")
    graph += b"".join(text(5, tensor(name, array)) for name, array in AXES.items())
    graph += b"".join(text(11, declared(name)) for name in inputs)
    graph += b"".join(text(12, declared(name)) for name in outputs)
    return number(1, 10) + text(7, graph) + text(8, text(1, "") + number(2, 20))


# z = scale (x w)^2 + b, with x w saved, and a running mean of x w that evaluation subtracts.
SQUARE = {
    "forward": model(
        [
            FLAT,
            node("MatMul", ["flat", "w"], "saved:0"),
            node("Mul", ["saved:0", "saved:0"], "square"),
            node("Mul", ["square", "scale"], "scaled"),
            node("Add", ["scaled", "b"], "z"),
            reduced("ReduceMean", ["saved:0", "rows"], "now"),
            node("Sub", ["now", "mean"], "ahead"),
            node("Mul", ["ahead", "tenth"], "part"),
            node("Add", ["mean", "part"], "new:mean"),
        ],
        ["x", "w", "b", "scale", "mean"],
        ["z", "saved:0", "new:mean"],
    ),
    "backward": model(
        [
            FLAT,
            node("Add", ["saved:0", "saved:0"], "twice"),
            node("Mul", ["twice", "scale"], "slope"),
            node("Mul", ["slope", "grad_z"], "inner"),
            node("Transpose", ["flat"], "turned"),
            node("MatMul", ["turned", "inner"], "grad:w"),
            reduced("ReduceSum", ["grad_z", "rows"], "grad:b"),
        ],
        ["x", "saved:0", "scale", "grad_z"],
        ["grad:w", "grad:b"],
    ),
    "evaluate": model(
        [FLAT, node("MatMul", ["flat", "w"], "inner"), node("Sub", ["inner", "mean"], "z")], ["x", "w", "mean"], ["z"]
    ),
}
CUT = TrainingCut(
    1, 3, "square", "forward.onnx", "backward.onnx", "evaluate.onnx", (DIM,), (DIM,), None, None,
    ("w", "b"), ("scale",), ("mean",), saved=1, macs=INPUTS * DIM, loss="none",
)  # fmt: skip

# loss = mean over the rows of targets . (x w + b), in the graph; w is frozen.
LOSS = {
    "forward": model(
        [
            FLAT,
            node("MatMul", ["flat", "w"], "inner"),
            node("Add", ["inner", "b"], "z"),
            node("Mul", ["z", "targets"], "each"),
            reduced("ReduceSum", ["each", "columns"], "row"),
            reduced("ReduceMean", ["row", "rows"], "loss"),
        ],
        ["x", "targets", "w", "b"],
        ["z", "loss"],
    ),
    "backward": model([reduced("ReduceMean", ["targets", "rows"], "grad:b")], ["targets"], ["grad:b"]),
    "evaluate": SQUARE["evaluate"],
}
LOSS_CUT = replace(CUT, trainable=("b",), frozen=("w",), saved=0, loss="cross-entropy")


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(0, 0.5, SHAPES[name]).astype(np.float32) for name in ("w", "b", "scale", "mean")}


def images(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 3, SIZE, SIZE)).astype(np.float32)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Trainer]:
    def made(
        graphs: dict[str, bytes] = SQUARE, cut: TrainingCut = CUT, rule: OptimiserRule = SGD, **settings: int
    ) -> Trainer:
        for role, data in graphs.items():
            (tmp_path / f"{role}.onnx").write_bytes(data)
        save_file(tensors(), str(tmp_path / "parameters.safetensors"))
        return open_trainer(tmp_path, cut, rule, TrainerSettings(**settings))

    return made


def train(trainer: Trainer, seeds: range, count: int = 5) -> None:
    for seed in seeds:
        forward = trainer.forward(images(count, seed))
        trainer.backward(0.1 * forward.z)
        trainer.step(0.01)


def held(trainer: Trainer) -> bytes:
    return save({name: np.array(array) for name, array in trainer.state().items()})


@pytest.mark.parametrize("count", [1, 5, 3])
def test_forward_and_gradients_are_those_of_the_formula(make: Callable[..., Trainer], count: int) -> None:
    trainer, given, x = make(), tensors(), images(count)
    flat = x.reshape(count, -1).astype(np.float64)
    inner = flat @ given["w"]
    assert trainer.forward(x).z == pytest.approx(given["scale"] * inner**2 + given["b"], abs=1e-4)
    grad_z = np.random.default_rng(2).normal(size=(count, DIM)).astype(np.float32)
    found = trainer.backward(grad_z)
    assert found["b"] == pytest.approx(grad_z.sum(axis=0), abs=1e-5)
    assert found["w"] == pytest.approx(flat.T @ (2 * inner * given["scale"] * grad_z), abs=1e-3)
    norm = np.sqrt(sum(np.square(each, dtype=np.float64).sum() for each in found.values()))
    assert trainer.step(0.01).gradient_norm == pytest.approx(norm, rel=1e-5)


def test_a_step_moves_what_the_next_forward_uses(make: Callable[..., Trainer]) -> None:
    trainer, x = make(rule=OptimiserRule("sgd", 0.0, 0.0)), images(4)
    before = trainer.forward(x).z
    trainer.backward(np.ones((4, DIM), np.float32))
    trainer.step(0.5)
    assert trainer.parameters()["b"] == pytest.approx(tensors()["b"] - 0.5 * 4)
    given = trainer.parameters()
    after = trainer.forward(x).z
    assert (after != before).all()
    inner = x.reshape(4, -1) @ given["w"]
    assert after == pytest.approx(tensors()["scale"] * inner**2 + given["b"], rel=1e-3, abs=1e-3)


def test_statistics_are_committed_with_the_step_and_only_then(make: Callable[..., Trainer]) -> None:
    trainer, x = make(), images(6)
    first = tensors()["mean"]
    trainer.forward(x)
    assert (trainer.parameters()["mean"] == first).all()
    trainer.forward(x)
    trainer.backward(np.zeros((6, DIM), np.float32))
    assert (trainer.parameters()["mean"] == first).all()
    trainer.step(0.0)
    now = (x.reshape(6, -1) @ tensors()["w"]).mean(axis=0)
    assert trainer.parameters()["mean"] == pytest.approx(0.9 * first + 0.1 * now, abs=1e-5)


def test_evaluation_in_small_batches_is_that_of_one(make: Callable[..., Trainer]) -> None:
    x, given = images(7), tensors()
    z = make(evaluate_batch=3).evaluate(x)
    assert z == pytest.approx(x.reshape(7, -1) @ given["w"] - given["mean"], abs=1e-5)
    assert z.shape == (7, DIM) and make(evaluate_batch=3).evaluate(x[:0]).shape == (0, DIM)


def test_a_loss_in_the_graph_needs_targets_and_no_gradient(make: Callable[..., Trainer]) -> None:
    trainer = make(LOSS, LOSS_CUT)
    targets = np.eye(DIM, dtype=np.float32)[[0, 2, 2]]
    forward = trainer.forward(images(3), targets)
    assert forward.loss == pytest.approx((forward.z * targets).sum(axis=1).mean(), rel=1e-5)
    with pytest.raises(ValueError, match="not used"):
        trainer.backward(targets)
    assert trainer.backward()["b"] == pytest.approx(targets.mean(axis=0))
    trainer.step(0.1)
    with pytest.raises(ValueError, match="targets"):
        trainer.forward(images(3))


@pytest.mark.parametrize("rule", [SGD, ADAMW, OptimiserRule("sgd", 0.0, 0.01)])
def test_training_goes_on_from_a_saved_state_bit_for_bit(make: Callable[..., Trainer], rule: OptimiserRule) -> None:
    straight, before, after = make(rule=rule), make(rule=rule), make(rule=rule)
    train(straight, range(6))
    train(before, range(3))
    saved = held(before)
    train(before, range(9, 12))  # what a killed process did in vain
    after.forward(images(2))
    after.load_state(load(saved))
    assert held(after) == saved
    train(after, range(3, 6))
    assert held(after) == held(straight)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_a_gradient_that_is_not_finite_changes_nothing(make: Callable[..., Trainer], bad: float) -> None:
    trainer = make(rule=ADAMW)
    train(trainer, range(2))
    saved = held(trainer)
    trainer.forward(images(4))
    grad_z = np.ones((4, DIM), np.float32)
    grad_z[1, 1] = bad
    trainer.backward(grad_z)
    with pytest.raises(TrainingError, match="gradient of w is not finite") as caught:
        trainer.step(0.1)
    assert "learning rate" in caught.value.cure
    assert held(trainer) == saved
    with pytest.raises(ValueError, match="without gradients"):
        trainer.step(0.1)
    train(trainer, range(2, 3))


def test_a_loss_that_is_not_finite_is_refused(make: Callable[..., Trainer]) -> None:
    trainer = make(LOSS, LOSS_CUT)
    with pytest.raises(TrainingError, match="loss of a batch"):
        trainer.forward(images(2), np.full((2, DIM), np.inf, np.float32))
    with pytest.raises(ValueError, match="without a forward"):
        trainer.backward()


def test_a_statistic_that_is_not_finite_is_refused(make: Callable[..., Trainer]) -> None:
    trainer = make()
    with pytest.raises(TrainingError, match="new mean of a batch of 1") as caught:
        trainer.forward(np.full((1, 3, SIZE, SIZE), np.inf, np.float32))
    assert "two or more" in caught.value.cure
    assert (trainer.parameters()["mean"] == tensors()["mean"]).all()


def test_a_discarded_batch_leaves_no_trace(make: Callable[..., Trainer]) -> None:
    trainer = make()
    saved = held(trainer)
    trainer.backward(trainer.forward(images(3)).z)
    trainer.discard()
    assert held(trainer) == saved
    with pytest.raises(ValueError):
        trainer.step(0.1)


def test_parameters_of_another_device_start_the_optimiser_anew(make: Callable[..., Trainer]) -> None:
    one, other = make(rule=ADAMW), make(rule=ADAMW)
    train(one, range(3))
    average = {name: 0.5 * array for name, array in one.parameters().items()}
    assert average.keys() == {"w", "b", "mean"}
    for trainer in (one, other):
        trainer.load_parameters(average)
    assert held(one) == held(other)
    train(one, range(3, 5))
    train(other, range(3, 5))
    assert held(one) == held(other)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"w": None}, "found 2 .*w"),
        ({"extra": np.zeros(1, np.float32)}, "found 4 .*extra"),
        ({"b": np.zeros(DIM + 1, np.float32)}, "tensor b: expected float32"),
        ({"b": np.zeros(DIM, np.float64)}, "tensor b: expected float32"),
        ({"mean": np.full(DIM, np.nan, np.float32)}, "tensor mean: expected finite"),
    ],
)
def test_wrong_parameters_change_nothing(
    make: Callable[..., Trainer], change: dict[str, np.ndarray | None], cause: str
) -> None:
    trainer = make()
    train(trainer, range(1))
    saved = held(trainer)
    given = {name: array + 1 for name, array in trainer.parameters().items()} | change
    with pytest.raises(RemoteProtocolError, match=cause):
        trainer.load_parameters({name: array for name, array in given.items() if array is not None})
    assert held(trainer) == saved


def test_the_state_of_another_optimiser_is_refused(make: Callable[..., Trainer]) -> None:
    trainer = make(rule=ADAMW)
    saved = held(trainer)
    with pytest.raises(DeviceError, match="saved training state"):
        trainer.load_state(make(rule=SGD).state())
    assert held(trainer) == saved


def test_views_cannot_be_written(make: Callable[..., Trainer]) -> None:
    with pytest.raises(ValueError, match="read-only"):
        make().parameters()["b"][0] = 1


def test_a_gradient_of_another_shape_is_the_servers_fault(make: Callable[..., Trainer]) -> None:
    trainer = make()
    trainer.forward(images(2))
    with pytest.raises(RemoteProtocolError, match=r"expected a gradient of \(4,\)"):
        trainer.backward(np.zeros((2, DIM + 1), np.float32))


OTHER_SHAPE = SHAPES | {"b": (1,)}
BROKEN = {
    "forward asks for another tensor": ("forward", replace(CUT, frozen=()), SQUARE["forward"], "asks for scale"),
    "forward lacks an activation": ("forward", replace(CUT, saved=2), SQUARE["forward"], "saved:1"),
    "forward lacks the loss": ("forward", replace(CUT, loss="cross-entropy"), SQUARE["forward"], "is loss"),
    "backward lacks a gradient": ("backward", replace(CUT, trainable=("w", "b", "scale"), frozen=()),
                                  SQUARE["backward"], "grad:scale"),
    "backward gives one too many": ("backward", replace(CUT, trainable=("w",), frozen=("scale", "b")),
                                    SQUARE["backward"], "grad:b"),
    "a tensor of another shape": ("forward", CUT, model(
        [FLAT, node("MatMul", ["flat", "w"], "saved:0"), node("Add", ["saved:0", "b"], "z")],
        ["x", "w", "b"], ["z", "saved:0"], OTHER_SHAPE), r"b should have the shape \(4,\)"),
    "z of another shape": ("forward", replace(CUT, output_shape=(5,)), SQUARE["forward"], r"z should have .*\(5,\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_graphs_that_do_not_fit_their_cut_are_named(make: Callable[..., Trainer], case: str) -> None:
    role, cut, graph, cause = BROKEN[case]
    trainer = make(SQUARE | {role: graph}, cut)
    with pytest.raises(PackageError, match=cause) as caught:
        trainer.forward(images(2), np.zeros((2, DIM), np.float32))
    assert "get the package again" in caught.value.cure


def test_a_missing_or_spoiled_file_is_said(make: Callable[..., Trainer], tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="forward.onnx"):
        make(SQUARE | {"forward": b"noise"}).forward(images(1))
    with pytest.raises(PackageError, match="cut 1"):
        make(cut=replace(CUT, trainable=("w", "b", "absent")))
    (tmp_path / "parameters.safetensors").write_bytes(b"noise")
    with pytest.raises(PackageError, match=r"parameters\.safetensors"):
        open_trainer(tmp_path, CUT, SGD)


def test_the_parameter_file_must_be_float32(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="w should be float32, found float64"):
        Trainer(tmp_path, CUT, SGD, tensors() | {"w": np.zeros((INPUTS, DIM))})
    with pytest.raises(PackageError, match="should hold mean"):
        Trainer(tmp_path, CUT, SGD, {name: array for name, array in tensors().items() if name != "mean"})


def test_images_that_the_graph_does_not_take_are_an_engine_error(make: Callable[..., Trainer]) -> None:
    with pytest.raises(EngineError, match=r"forward\.onnx"):
        make().forward(np.zeros((1, 3, SIZE + 1, SIZE), np.float32))


def test_two_threads_and_two_runs_give_the_same_bits(make: Callable[..., Trainer]) -> None:
    states = []
    for _ in range(2):
        trainer = make(threads=2)
        train(trainer, range(4), 64)
        states.append(held(trainer))
    assert states[0] == states[1]
