"""The head that answers without a server: its law, its probabilities, and what it says of its own accuracy."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from contract.tokens import TokenLayout
from edge_runtime.head import softmax
from edge_runtime.ridge_head import PARTS, Ridge, fit, parts_of, pool


def clouds(
    count: int, distance: float, seed: int, classes: int = 4, width: int = 12
) -> tuple[NDArray[np.float16], NDArray[np.int64]]:
    """So many points of each class, `distance` beside noise of 1; channels differ in size."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(7).normal(scale=distance, size=(classes, width))
    labels = np.repeat(np.arange(classes), count)
    x = (centres[labels] + rng.normal(size=(len(labels), width))) * np.logspace(-1, 1, width) + 3.0
    return x.astype(np.float16), labels


@pytest.mark.parametrize("count", [2, 6], ids=["more values than images", "more images than values"])
def test_it_is_the_minimum_of_the_penalised_squares(count: int) -> None:
    """Against normal equations in the features' own space, the intercept without a penalty."""
    x, labels = clouds(count, 2.0, seed=1)
    wide, targets, penalty = x.astype(np.float64), np.eye(4)[labels], 0.37
    spread = wide.std(axis=0) * np.sqrt(wide.shape[1])
    with_one = np.hstack([wide / spread, np.ones((len(wide), 1))])
    penalties = np.diag([penalty] * wide.shape[1] + [0.0])
    reference = np.linalg.solve(with_one.T @ with_one + penalties, with_one.T @ targets)  # (p + 1, C)
    weight, bias = Ridge(wide, targets).linear(penalty)
    np.testing.assert_allclose(weight * spread, reference[:-1].T, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(bias, reference[-1], rtol=1e-8)


def test_separable_classes_are_told_apart_with_confidence() -> None:
    head = fit(*clouds(8, 6.0, seed=1), 4)
    x, labels = clouds(50, 6.0, seed=2)
    found = softmax(head.logits(x))
    assert (found.argmax(axis=1) == labels).all()
    assert head.held_out_accuracy == 1.0 and found.max(axis=1).mean() > 0.9


@pytest.mark.parametrize("distance", [0.3, 0.7])
def test_accuracy_and_probability_are_those_of_new_images(distance: float) -> None:
    """Where classes overlap, what was left out tells what will be; and a probability is what it says."""
    head = fit(*clouds(40, distance, seed=3), 4)
    x, labels = clouds(500, distance, seed=4)
    found = softmax(head.logits(x))
    share = float((found.argmax(axis=1) == labels).mean())
    assert 0.4 < share < 0.95
    assert head.held_out_accuracy == pytest.approx(share, abs=0.1)
    assert found.max(axis=1).mean() == pytest.approx(share, abs=0.1)


def test_the_same_images_give_the_same_head() -> None:
    first, second = (fit(*clouds(5, 1.0, seed=5), 4) for _ in range(2))
    assert first.weight.tobytes() == second.weight.tobytes() and first.bias.tobytes() == second.bias.tobytes()


def test_every_image_is_left_out_once_but_for_single_ones() -> None:
    labels = np.array([0] * 7 + [1] * 2 + [2])
    parts = parts_of(labels)
    assert parts[-1] == -1 and set(parts[7:9]) == {0, 1} and sorted(parts[:7]) == [0, 0, 1, 1, 2, 3, 4]
    assert parts.max() < PARTS


def test_what_cannot_be_left_out_is_not_judged() -> None:
    x, _ = clouds(1, 6.0, seed=1)
    head = fit(x, np.arange(4), 4)
    assert head.held_out_accuracy is None and head.held_out_images == 0
    assert (head.logits(x).argmax(axis=1) == np.arange(4)).all()


def test_degenerate_folders_give_finite_heads() -> None:
    x, labels = clouds(3, 1.0, seed=1)
    x[:, 0] = 5.0  # a channel that stands still
    for head in (fit(x, labels, 6), fit(x, np.zeros(12, np.int64), 1), fit(np.ones((4, 3), np.float16), labels[:4], 4)):
        assert np.isfinite(head.weight).all() and np.isfinite(head.bias).all()
        assert (head.logits(np.ones((1, head.weight.shape[1]), np.float16)) < np.inf).all()


def test_prefix_and_patches_are_averaged_apart() -> None:
    tokens = np.arange(2 * 5 * 3).reshape(2, 5, 3).astype(np.float16)
    both = pool(tokens, TokenLayout(1, (2, 2), 3))
    assert both.shape == (2, 6) and both.dtype == np.float16
    np.testing.assert_array_equal(both[:, :3], tokens[:, 0])
    np.testing.assert_array_equal(both[:, 3:], tokens[:, 1:].mean(axis=1))
    np.testing.assert_array_equal(pool(tokens, TokenLayout(0, (1, 5), 3)), tokens.mean(axis=1))
