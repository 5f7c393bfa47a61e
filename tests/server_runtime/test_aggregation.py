"""Invariants of averaging parts (algorithms.md 3.4, items 1 and 2)."""

from __future__ import annotations

import numpy as np
import pytest

from contract.errors import TrainingError
from server_runtime.aggregation import average, check_part, is_finite

W = {name: np.random.default_rng(seed).normal(size=(3, 2)).astype(np.float32) for seed, name in enumerate("abc")}


def part(names: str, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(3, 2)).astype(np.float32) for name in names}


def test_equal_cuts_give_the_plain_mean_and_leave_deeper_layers_alone() -> None:
    first, second = part("ab", 1), part("ab", 2)
    found = average(W, [first, second], [5, 5])
    assert found.keys() == {"a", "b"}
    for name in found:
        np.testing.assert_allclose(found[name], (first[name] + second[name]) / 2, rtol=1e-6)


def test_a_layer_that_a_part_lacks_counts_as_the_servers() -> None:
    shallow, deep = part("a", 1), part("ab", 2)
    found = average(W, [shallow, deep], [1, 3])
    np.testing.assert_allclose(found["b"], 0.25 * W["b"] + 0.75 * deep["b"], rtol=1e-6)


def test_one_part_alone_and_equal_parts_are_kept_bit_for_bit() -> None:
    one = part("ab", 1)
    before = {name: value.copy() for name, value in one.items()}
    for count in (1, 3, 7):
        found = average(W, [one] * count, [*range(1, count + 1)])
        assert all(found[name].tobytes() == before[name].tobytes() == one[name].tobytes() for name in one)


def test_nothing_to_average_changes_nothing() -> None:
    assert average(W, [], []) == {}


def test_a_part_is_held_against_the_model() -> None:
    check_part("pi", part("abc", 1), W)
    with pytest.raises(TrainingError, match="pi: .*without b, c"):
        check_part("pi", part("a", 1), W)
    assert is_finite(W)
    assert not is_finite({"a": np.array([np.inf], np.float32)})
