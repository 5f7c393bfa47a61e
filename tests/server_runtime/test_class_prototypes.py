"""Class prototypes on the server: algorithms.md 5.4, invariants 2, 3 and 9."""

from __future__ import annotations

import math

import numpy as np
import pytest

from contract.errors import TrainingError
from contract.messages import Prototypes
from server_runtime.class_prototypes import (
    ClassMeans,
    ClassPrototypes,
    from_tensors,
    means_of,
    shift,
    strength,
    to_tensors,
)

CLASSES, WIDTH = 4, 6


def embeddings(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors (n, d) and class numbers (n,), the last class never among them."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count, WIDTH))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True), rng.integers(0, CLASSES - 1, count)


def means(rows: np.ndarray, labels: np.ndarray) -> ClassMeans:
    own = np.unique(labels)
    values = np.stack([rows[labels == each].mean(axis=0) for each in own])
    return ClassMeans(own, np.array([(labels == each).sum() for each in own]), values)


def three() -> tuple[list[ClassMeans], np.ndarray, np.ndarray]:
    """Devices of different sizes, and all their rows and labels together."""
    drawn = [embeddings(count, seed) for seed, count in enumerate((31, 7, 2))]
    rows, labels = (np.concatenate(each) for each in zip(*drawn, strict=True))
    return [means(*each) for each in drawn], rows, labels


def test_invariant_2_a_prototype_is_the_mean_over_all_devices_images() -> None:
    devices, rows, labels = three()
    found = ClassPrototypes.none(CLASSES, WIDTH).renewed(devices, 0.5)
    for label in range(CLASSES - 1):
        np.testing.assert_allclose(found.values[label], rows[labels == label].mean(axis=0), atol=1e-12)
    assert found.known.tolist() == [True, True, True, False]


def test_invariant_2_a_class_that_nobody_has_seen_keeps_its_prototype() -> None:
    devices, _, _ = three()
    before = ClassPrototypes.none(CLASSES, WIDTH).renewed(devices, 0.5)
    one = means(np.eye(WIDTH)[:2], np.array([0, 0]))
    after = before.renewed([one], 0.5)
    assert (after.values[1:] == before.values[1:]).all() and (after.known == before.known).all()
    assert (after.values[0] != before.values[0]).any()
    assert (before.renewed([], 0.5).values == before.values).all()


@pytest.mark.parametrize("beta", [0.0, 0.25, 1.0])
def test_invariant_2_renewal_stays_between_old_and_new(beta: float) -> None:
    devices, _, _ = three()
    old = ClassPrototypes.none(CLASSES, WIDTH).renewed([means(np.eye(WIDTH)[:3], np.arange(3))], 0.5)
    pooled = ClassPrototypes.none(CLASSES, WIDTH).renewed(devices, 0.5)
    found = old.renewed(devices, beta)
    np.testing.assert_allclose(found.values, (1 - beta) * old.values + beta * pooled.values, atol=1e-15)
    low, high = np.minimum(old.values, pooled.values), np.maximum(old.values, pooled.values)
    assert (found.values >= low - 1e-15).all() and (found.values <= high + 1e-15).all()
    if beta in (0.0, 1.0):
        assert (found.values == (pooled if beta else old).values).all()


@pytest.mark.parametrize("kind", ["cosine", "l2"])
def test_invariant_3_the_pull_falls_with_the_distance_and_is_whole_only_without_one(kind: str) -> None:
    axes = np.eye(WIDTH)
    common = ClassPrototypes.none(CLASSES, WIDTH).renewed([means(axes[:1], np.array([0]))], 1.0)
    found = []
    for angle in (0.0, 0.1, 0.7, 1.5, 3.0):
        own = math.cos(angle) * axes[0] + math.sin(angle) * axes[1]
        found.append(shift(ClassMeans(np.array([0]), np.array([3]), own[None]), common, kind))
    assert found[0] == 0.0 and None not in found
    pulls = [strength(each, 1.5, 2.0) for each in found]
    assert pulls[0] == 1.5
    assert all(0 < low < high for low, high in zip(pulls[1:], pulls, strict=False))
    assert {strength(each, 1.5, 0.0) for each in found} == {1.5}  # a fixed lambda


def test_the_first_round_has_no_pull() -> None:
    (own, *_), _, _ = three()
    assert shift(own, ClassPrototypes.none(CLASSES, WIDTH), "cosine") is None
    assert strength(None, 1.0, 2.0) == 0.0


def test_invariant_9_the_distance_is_over_the_classes_that_a_device_has() -> None:
    devices, _, _ = three()
    common = ClassPrototypes.none(CLASSES, WIDTH).renewed(devices, 0.5)
    one = ClassMeans(np.array([1]), np.array([2]), 0.5 * common.values[1:2])
    assert shift(one, common, "cosine") == pytest.approx(0.0, abs=1e-12)
    new = ClassMeans(np.array([3]), np.array([2]), np.eye(WIDTH)[:1])  # its class has no prototype yet
    assert shift(new, common, "cosine") is None
    nothing = ClassMeans(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, WIDTH)))
    assert shift(nothing, common, "cosine") is None
    assert (common.renewed([nothing], 0.5).values == common.values).all()


@pytest.mark.parametrize(
    "reply",
    [
        Prototypes("a", (4,), (1,), np.zeros((1, WIDTH), np.float32)),
        Prototypes("a", (0,), (1,), np.zeros((1, WIDTH + 1), np.float32)),
        Prototypes("a", (0,), (1,), np.full((1, WIDTH), 9.0, np.float32)),
    ],
)
def test_what_is_no_mean_of_a_class_is_refused_with_the_devices_name(reply: Prototypes) -> None:
    with pytest.raises(TrainingError, match="pi-3"):
        means_of("pi-3", reply, CLASSES, WIDTH)


def test_a_device_without_images_has_no_means() -> None:
    found = means_of("pi-3", Prototypes("a", (), (), None), CLASSES, WIDTH)
    assert found.values.shape == (0, WIDTH)


def test_means_survive_a_checkpoint() -> None:
    devices, _, _ = three()
    held = {f"pi-{number}": each for number, each in enumerate(devices)}
    again = from_tensors(to_tensors(held))
    assert again.keys() == held.keys()
    for name, each in held.items():
        assert (again[name].values == each.values).all() and (again[name].counts == each.counts).all()
