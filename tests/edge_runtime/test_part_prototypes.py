"""A device's side of prototypes: what it counts, what it tells, and what pulls it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from contract.errors import RemoteProtocolError
from contract.messages import Ask
from contract.training import PrototypeRule
from edge_runtime.part_prototypes import PartPrototypes

CLASSES = 5
RULE = PrototypeRule(dimension=3, distance="cosine")
TELL = Ask("a-2", "give_prototypes", {"after": 1}, 60.0)


def unit(count: int, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).normal(size=(count, 3)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def pulled(strength: float, values: np.ndarray, *classes: int) -> Ask:
    numbers = {"step": 2, "after": 1, "base": 0, "strength": strength}
    return Ask("a-1", "set_prototypes", numbers, 60.0, {"classes": np.array(classes, np.uint16), "values": values})


def test_running_means_over_batches_are_those_of_all_images() -> None:
    rows, labels = unit(23), np.random.default_rng(1).integers(0, CLASSES, 23)
    device = PartPrototypes(CLASSES, RULE)
    for start in range(0, 23, 7):
        device.add(rows[start : start + 7], labels[start : start + 7])
    told = device.tell(TELL)
    assert told.classes == tuple(sorted(set(labels.tolist()))) and told.values is not None
    for place, label in enumerate(told.classes):
        assert told.counts[place] == (labels == label).sum()
        np.testing.assert_allclose(told.values[place], rows[labels == label].mean(axis=0), atol=1e-6)
    device.begin()
    assert device.tell(TELL).values is None


@pytest.mark.parametrize("present", [(), (3,), (0, 4)])
def test_invariant_9_classes_that_are_not_there_are_not_told(present: tuple[int, ...]) -> None:
    device = PartPrototypes(CLASSES, RULE)
    for label in present:
        device.add(unit(2), np.array([label, label]))
    told = device.tell(TELL)
    assert told.classes == present and told.counts == (2,) * len(present)
    assert len(told.classes) <= CLASSES  # invariant 6


def test_rounded_counts_hide_the_exact_ones_and_lose_no_class() -> None:
    device = PartPrototypes(CLASSES, dataclasses.replace(RULE, count_step=10))
    device.add(unit(13), np.array([0] + [2] * 12))
    assert device.tell(TELL).counts == (10, 20)


def test_the_pull_is_lambda_over_the_batch_and_nothing_without_a_prototype() -> None:
    device, labels = PartPrototypes(CLASSES, RULE), np.array([1, 2, 3, 1])
    assert not device.pull(labels).any()
    device.set(pulled(0.5, 2 * unit(2), 1, 3))
    assert device.pull(labels).tolist() == [0.125, 0.0, 0.125, 0.125]
    anchors = device.anchors(labels)
    np.testing.assert_allclose(np.linalg.norm(anchors, axis=1), [1, 0, 1, 1], atol=1e-6)  # for the cosine
    assert (anchors[0] == anchors[3]).all()
    plain = PartPrototypes(CLASSES, dataclasses.replace(RULE, distance="l2"))
    plain.set(pulled(0.5, 2 * unit(2), 1, 3))
    assert (plain.anchors(np.array([3])) == 2 * unit(2)[1]).all()
    device.set(pulled(0.25, unit(1), 2))  # the newest broadcast alone counts
    assert device.pull(labels).tolist() == [0.0, 0.0625, 0.0, 0.0]


@pytest.mark.parametrize(
    "ask",
    [
        pulled(1.0, unit(1), CLASSES),
        pulled(1.0, unit(2), 2, 1),
        pulled(1.0, np.zeros((1, 4), np.float32), 1),
        pulled(-1.0, unit(1), 1),
    ],
)
def test_prototypes_that_do_not_fit_are_refused(ask: Ask) -> None:
    device = PartPrototypes(CLASSES, RULE)
    with pytest.raises(RemoteProtocolError):
        device.set(ask)
    assert not device.pull(np.arange(CLASSES)).any()


def test_a_state_goes_on_as_if_nothing_had_happened() -> None:
    one, other = PartPrototypes(CLASSES, RULE), PartPrototypes(CLASSES, RULE)
    one.set(pulled(0.5, unit(2), 0, 1))
    one.add(unit(4), np.array([0, 1, 1, 3]))
    other.load_state({**one.state(), "weight": np.zeros(3)})
    for device in (one, other):
        device.add(unit(4, 1), np.array([0, 1, 1, 3]))
    told, again = one.tell(TELL), other.tell(TELL)
    assert (told.classes, told.counts) == (again.classes, again.counts)
    assert told.values is not None and again.values is not None and (told.values == again.values).all()
    labels = np.arange(CLASSES)
    assert (one.pull(labels) == other.pull(labels)).all() and (one.anchors(labels) == other.anchors(labels)).all()
