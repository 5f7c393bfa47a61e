"""Which devices are near each other by their utilisation factors (algorithms.md 2.2, 2.4)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from contract.errors import ConfigError
from server_runtime.similarity import (
    close_of,
    distances,
    find_threshold,
    groups,
    neighbours,
    read_threshold,
    sigmoid,
)

CLOSE = 0.05
ALPHAS = arrays(np.float64, st.tuples(st.integers(1, 6), st.just(8)), elements=st.floats(0, 1))


@given(ALPHAS, st.floats(0, 3))
def test_distances_are_a_metric_and_selection_contains_oneself(alphas: np.ndarray, tau: float) -> None:
    d = distances(list(alphas))
    assert np.array_equal(d, d.T) and not d.diagonal().any()
    for j in range(len(d)):
        assert (d <= d[:, [j]] + d[[j], :] + 1e-12).all()
    assert neighbours(d, tau).diagonal().all()
    assert np.array_equal(neighbours(d, float("inf")), np.ones_like(d, dtype=bool))


def test_nobody_is_near_at_0_but_who_is_equal() -> None:
    d = distances([np.zeros(8), np.zeros(8), np.ones(8)])
    assert neighbours(d, 0.0).tolist() == [[True, True, False], [True, True, False], [False, False, True]]


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_the_groups_of_two_tasks_are_found_from_their_factors(scale: float) -> None:
    rng = np.random.default_rng(0)
    task = {0: rng.random(8), 1: rng.random(8)}
    of = [0, 1, 1, 0, 1, 0, 0]
    alphas = [0.5 + scale * (task[each] + 0.05 * rng.standard_normal(8)) / 3 for each in of]
    d = distances(alphas)
    found = neighbours(d, find_threshold(d, CLOSE))
    assert found.tolist() == [[a == b for b in of] for a in of]
    assert groups(found) == [0, 1, 1, 0, 1, 0, 0]


@pytest.mark.parametrize("far", [3.0, 10.0, 100.0])
def test_two_near_tasks_stay_apart_when_a_third_drifts_away(far: float) -> None:
    rng, middle = np.random.default_rng(1), {0: np.zeros(8), 1: 5 * np.eye(8)[0], 2: 5 * far * np.eye(8)[1]}
    of = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    d = distances([1e-3 * (middle[each] + 0.2 * rng.standard_normal(8)) for each in of])
    assert groups(neighbours(d, find_threshold(d, CLOSE))) == of


def test_without_a_clear_gap_close_devices_stay_together_and_others_need_to_be_nearer_than_usual() -> None:
    close = distances([np.full(8, 0.5 + 0.001 * place) for place in range(8)])
    assert find_threshold(close, CLOSE) == float("inf")
    even = distances([np.full(1, 0.1 * place) for place in range(8)])
    pairs = even[np.triu_indices(8, 1)]
    assert find_threshold(even, CLOSE) == pytest.approx(pairs.mean() - pairs.std())


def test_one_device_and_equal_devices_have_a_threshold() -> None:
    assert find_threshold(np.zeros((1, 1)), CLOSE) == float("inf")
    assert find_threshold(np.zeros((3, 3)), CLOSE) == float("inf")
    assert find_threshold(distances([np.zeros(8), np.ones(8)]), CLOSE) == 0.0  # two apart
    assert find_threshold(distances([np.zeros(8), np.full(8, 0.01)]), CLOSE) == float("inf")  # two close


def test_close_is_a_small_change_of_logits_wherever_they_began() -> None:
    """Devices that were trained for three short rounds on three tasks differ by thousandths at a start of -3."""
    for start in (-3.0, 0.0, 3.0):
        begun = np.full(8, start, np.float32)
        task = {each: 0.06 * np.eye(8)[each] for each in range(3)}
        noise = np.random.default_rng(0).normal(scale=0.004, size=(9, 8))
        alphas = [sigmoid(begun + task[place % 3] + noise[place]) for place in range(9)]
        d, near = distances(alphas), close_of(begun)
        assert groups(neighbours(d, find_threshold(d, near))) == [0, 1, 2] * 3
        alike = distances([sigmoid(begun + each) for each in noise])
        assert find_threshold(alike, near) == float("inf")
    assert close_of(np.zeros(8)) == pytest.approx(0.0125)


def test_neighbourhood_is_not_transitive_but_groups_are() -> None:
    near = neighbours(distances([np.array([0.0]), np.array([0.4]), np.array([0.8])]), 0.5)
    assert near.tolist() == [[True, True, False], [True, True, True], [False, True, True]]
    assert groups(near) == [0, 0, 0]


def test_a_threshold_is_a_number_or_found() -> None:
    assert read_threshold("auto") is None and read_threshold("0.5") == 0.5 and read_threshold("inf") == float("inf")
    for text in ("-1", "nan", "near", ""):
        with pytest.raises(ConfigError, match="threshold must be auto"):
            read_threshold(text)


def test_sigmoid_is_between_0_and_1() -> None:
    assert sigmoid(np.array([-3.0], np.float32))[0] == pytest.approx(0.047426, abs=1e-6)
