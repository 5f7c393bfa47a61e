"""Levelled curves, the bound on an accuracy, and the thresholds that follow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server_runtime.leakage.curve import (
    Judged,
    find_threshold,
    fine_grid,
    interpolate,
    least_strength,
    non_increasing,
    upper_bound,
)

VALUES = st.lists(st.floats(-10, 10), min_size=1, max_size=12)


@given(VALUES)
def test_levelled_values_never_rise_and_keep_their_mean(values: list[float]) -> None:
    found = non_increasing(values)
    assert len(found) == len(values)
    assert all(later <= earlier + 1e-12 for earlier, later in zip(found, found[1:], strict=False))
    assert sum(found) == pytest.approx(sum(values), abs=1e-9)
    assert non_increasing(found) == pytest.approx(found)


def test_levelling_is_the_nearest_non_increasing_sequence() -> None:
    assert non_increasing([5.0, 3.0, 4.0, 1.0]) == [5.0, 3.5, 3.5, 1.0]
    assert non_increasing([1.0, 2.0, 3.0]) == [2.0, 2.0, 2.0]
    assert non_increasing([3.0, 2.0, 1.0]) == [3.0, 2.0, 1.0]


def test_the_fine_grid_is_a_twentieth_apart_and_has_every_measured_strength() -> None:
    grid = fine_grid([0.0, 0.25, 0.33, 2.5])
    assert len(grid) == 52 and grid[0] == 0.0 and grid[-1] == 2.5
    assert 0.33 in grid and grid[1] == 0.05
    assert fine_grid([0.7]) == [0.7]


def test_between_measured_strengths_lies_a_line() -> None:
    assert interpolate([0.0, 1.0, 3.0], [4.0, 2.0, 1.0], 0.25) == 3.5
    assert interpolate([0.0, 1.0, 3.0], [4.0, 2.0, 1.0], 2.0) == 1.5
    assert interpolate([0.0, 1.0], [4.0, 2.0], 9.0) == 2.0 and interpolate([1.0, 2.0], [4.0, 2.0], 0.0) == 4.0


@pytest.mark.parametrize(("right", "total"), [(0, 9), (3, 30), (100, 1000), (11, 11), (517, 1000)])
def test_the_bound_is_that_of_clopper_and_pearson(right: int, total: int) -> None:
    beta = pytest.importorskip("scipy.stats", reason="scipy comes with scikit-learn").beta
    wanted = 1.0 if right == total else float(beta.ppf(0.95, right + 1, total - right))
    assert upper_bound(right, total) == pytest.approx(wanted, abs=1e-9)


def test_a_bound_needs_an_image() -> None:
    with pytest.raises(ValueError, match="at least one image"):
        upper_bound(0, 0)


def test_the_threshold_is_the_largest_fsim_below_which_everything_is_chance() -> None:
    """Ten classes: chance and two points are 12 %; 100 of 1000 have a bound of 11.7 %, 110 one of 12.8 %."""
    points = [Judged(0.8, 900, 1000), Judged(0.5, 300, 1000), Judged(0.4, 100, 1000), Judged(0.3, 95, 1000)]
    assert find_threshold(points, 10)[0] == 0.4
    assert find_threshold([*points, Judged(0.35, 110, 1000)], 10)[0] == 0.3
    assert find_threshold([*points, Judged(0.2, 200, 1000)], 10)[0] is None


def test_an_unknown_threshold_says_why() -> None:
    found, reason = find_threshold([Judged(0.4, 1, 10)], 10)
    assert found is None and "10 images are too few" in reason
    found, reason = find_threshold([Judged(0.4, 900, 1000)], 10)
    assert found is None and "0.915 of the pictures and more, where 0.120 is allowed" in reason
    assert "too few" not in reason


def test_the_least_noise_is_minimal() -> None:
    grid = fine_grid([0.0, 2.0])
    fsim = [interpolate([0.0, 2.0], [0.6, 0.2], at) for at in grid]
    found = least_strength(grid, fsim, 0.36)
    assert found == 1.2
    place = grid.index(found)
    assert fsim[place] <= 0.36 + 1e-12 < fsim[place - 1]
    assert least_strength(grid, fsim, 0.1) is None
