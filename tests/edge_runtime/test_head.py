from __future__ import annotations

import numpy as np
import pytest

from edge_runtime.head import (
    HeadCheckpoint,
    checkpoint_from_bytes,
    checkpoint_to_bytes,
    head_step,
    new_head,
    softmax,
    softmax_gradient,
)

RNG = np.random.default_rng(0)


def test_the_gradient_is_that_of_the_mean_loss() -> None:
    logits = RNG.normal(size=(6, 4)).astype(np.float32)
    labels = np.array([0, 1, 2, 3, 0, 1])
    loss = softmax_gradient(logits, labels)
    step = 1e-3
    for place in [(0, 0), (3, 3), (5, 2)]:
        moved = logits.copy()
        moved[place] += step
        slope = (softmax_gradient(moved, labels).mean_loss - loss.mean_loss) / step
        assert slope == pytest.approx(loss.gradient[place], abs=2e-3)
    assert loss.gradient.sum(axis=1) == pytest.approx(np.zeros(6), abs=1e-7)


def test_huge_logits_stay_finite() -> None:
    logits = np.array([[1e30, -1e30], [0.0, 3e38]], np.float32)
    loss = softmax_gradient(logits, np.array([1, 1]))
    assert np.isfinite(loss.gradient).all() and np.isfinite(loss.mean_loss)
    assert np.isfinite(softmax(logits)).all()


def test_a_batch_of_one_trains_normally() -> None:
    loss = softmax_gradient(np.zeros((1, 3), np.float32), np.array([2]))
    assert loss.count == 1 and loss.mean_loss == pytest.approx(np.log(3))


def test_the_head_learns_and_its_first_adam_step_is_the_learning_rate() -> None:
    features = RNG.normal(size=(64, 8)).astype(np.float32)
    labels = (features[:, 0] > 0).astype(np.int64)
    head = new_head(2, 8, np.random.default_rng(1))
    moved, first = head_step(head, features, labels, 0.01)
    assert np.abs(moved.weight - head.weight).max() == pytest.approx(0.01, rel=1e-3)
    for _ in range(200):
        moved, loss = head_step(moved, features, labels, 0.05)
    assert loss.mean_loss < 0.2 * first.mean_loss and loss.correct >= 60


def test_gradients_of_features_are_taken_at_the_head_before_the_step() -> None:
    features = RNG.normal(size=(5, 3)).astype(np.float32)
    labels = np.array([0, 1, 1, 0, 1])
    head = new_head(2, 3, np.random.default_rng(2))
    _, loss = head_step(head, features, labels, 1.0)
    assert loss.gradient == pytest.approx(softmax_gradient(head.logits(features), labels).gradient @ head.weight)


def test_a_checkpoint_comes_back_bit_for_bit() -> None:
    head, loss = head_step(
        new_head(3, 4, np.random.default_rng(3)), np.ones((2, 4), np.float32), np.array([0, 2]), 1e-3
    )
    checkpoint = HeadCheckpoint(head, "run-1", 1, 0, "run-1.step-1", loss)
    again = checkpoint_from_bytes(checkpoint_to_bytes(checkpoint))
    assert checkpoint_to_bytes(again) == checkpoint_to_bytes(checkpoint)
    assert (again.run, again.ask, again.head.step) == ("run-1", "run-1.step-1", 1)
    assert (again.head.weight == head.weight).all() and (again.answer.gradient == loss.gradient).all()


@pytest.mark.parametrize("data", [b"", b"noise" * 9, bytes(100)])
def test_a_spoiled_checkpoint_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a head"):
        checkpoint_from_bytes(data)


def test_adam_equals_torch() -> None:
    torch = pytest.importorskip("torch")
    head = new_head(3, 4, np.random.default_rng(4))
    layer = torch.nn.Linear(4, 3)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(head.weight))
        layer.bias.copy_(torch.from_numpy(head.bias))
    adam = torch.optim.Adam(layer.parameters(), lr=0.01)
    rng = np.random.default_rng(5)
    for _ in range(20):
        features = rng.normal(size=(7, 4)).astype(np.float32)
        labels = rng.integers(0, 3, 7)
        head, loss = head_step(head, features, labels, 0.01)
        x = torch.from_numpy(features).requires_grad_()
        adam.zero_grad()
        theirs = torch.nn.functional.cross_entropy(layer(x), torch.from_numpy(labels))
        theirs.backward()
        adam.step()
        assert loss.mean_loss == pytest.approx(theirs.item(), rel=1e-5)
        assert loss.gradient == pytest.approx(x.grad.numpy(), abs=1e-6)
    assert head.weight == pytest.approx(layer.weight.detach().numpy(), abs=1e-5)
