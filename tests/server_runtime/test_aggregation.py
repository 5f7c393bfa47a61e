"""Invariants of averaging parts (algorithms.md 3.4, items 1 and 2)."""

from __future__ import annotations

import numpy as np
import pytest

from server_runtime.aggregation import RULES, average

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


@pytest.mark.parametrize("rule", ["trimmed", "median"])
def test_one_device_that_lies_moves_a_mean_and_no_robust_one(rule: str) -> None:
    honest = [{"a": np.full((3, 2), value, np.float32)} for value in (1.0, 1.1, 0.9, 1.0)]
    lie = {"a": np.full((3, 2), 1e6, np.float32)}
    parts, weights = [*honest, lie], [5, 5, 5, 5, 10**9]  # it lies about its images as well
    assert average(W, parts, weights)["a"].max() > 1e5
    found = average(W, parts, weights, rule)["a"]
    assert found.dtype == np.float32
    assert np.abs(found - 1.0).max() <= 0.1


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_keeps_equal_parts_and_takes_what_is_lacking_from_the_server(rule: str) -> None:
    one = part("a", 1)
    assert average(W, [one] * 3, [1, 2, 3], rule)["a"].tobytes() == one["a"].tobytes()
    two = average(W, [one, part("ab", 1)], [1, 1], rule)
    np.testing.assert_allclose(two["b"], (W["b"] + part("ab", 1)["b"]) / 2, rtol=1e-6)
