"""EFTViT's balanced set (algorithms.md 4.4, invariant 3)."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from edge_runtime.median_sampling import balanced, target_count


def labels(*counts: int) -> np.ndarray:
    """So many images of class 0, 1, ..."""
    return np.repeat(np.arange(len(counts)), counts).astype(np.int64)


@pytest.mark.parametrize(
    ("counts", "threshold", "expected"),
    [
        ((7, 3, 5), 1.0, 5),  # odd number of classes
        ((8, 3, 4, 1), 1.0, 3),  # even: (3 + 4) / 2, rounded down
        ((9, 0, 4, 0), 1.0, 6),  # absent classes do not count
        ((1, 0, 0), 1.0, 1),
        ((1, 1, 2), 0.5, 1),  # never 0
        ((7, 3, 5), 1.5, 7),
        ((7, 3, 5), 2.0, 10),
        ((7, 3, 5), 0.0, 7),  # the largest
        ((), 1.0, 0),
    ],
)
def test_invariant_3_the_median_is_of_the_classes_that_are_present(
    counts: tuple[int, ...], threshold: float, expected: int
) -> None:
    assert target_count(labels(*counts), threshold) == expected


@pytest.mark.parametrize("counts", [(7, 3, 5), (8, 3, 4, 1), (9, 0, 4, 0), (1,), (0, 200, 2)])
def test_invariant_3_every_present_class_has_exactly_the_median_and_absent_ones_none(counts: tuple[int, ...]) -> None:
    given = labels(*counts)
    m = target_count(given, 1.0)
    chosen = balanced(given, m, lambda places: places)
    found = Counter(int(given[each.place]) for each in chosen)
    assert found == {number: m for number, count in enumerate(counts) if count}
    for each in set(found):  # an image comes again only when all of its class have come
        turns = Counter(one.place for one in chosen if given[one.place] == each)
        assert max(turns.values()) - min(turns.values()) <= 1
        assert len(turns) == min(m, counts[each])


def test_which_images_of_a_large_class_are_sent_is_the_callers_order() -> None:
    chosen = balanced(labels(5, 2), 2, lambda places: places[::-1])
    assert [each.place for each in chosen] == [4, 3, 6, 5]
    assert {each.turn for each in chosen} == {0}


def test_a_small_class_is_passed_through_again() -> None:
    assert [(each.place, each.turn) for each in balanced(labels(2), 5, lambda places: places)] == [
        (0, 0), (1, 0), (0, 1), (1, 1), (0, 2),
    ]  # fmt: skip
