from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.epoch_order import batch_edges, batches, epoch_order

IDS = [bytes([number]) * 16 for number in range(40)]
COUNTS, SIZES = st.integers(0, 300), st.integers(1, 70)


@given(count=COUNTS, size=SIZES)
def test_batches_cover_each_place_once_in_order(count: int, size: int) -> None:
    edges = batch_edges(count, size)
    assert [place for first, last in edges for place in range(first, last)] == list(range(count))
    assert all(first < last for first, last in edges)


@given(count=COUNTS, size=SIZES)
def test_all_batches_but_the_last_are_of_the_size_and_none_that_ends_an_epoch_is_of_one(count: int, size: int) -> None:
    sizes = [last - first for first, last in batch_edges(count, size)]
    assert sizes[:-1] == [size] * (len(sizes) - 1)
    if count == 1:
        assert sizes == [1]
    elif count:
        assert 2 <= sizes[-1] <= size + 1


@pytest.mark.parametrize(
    ("count", "size", "sizes"),
    [
        (0, 4, []),
        (1, 4, [1]),
        (1, 1, [1]),
        (2, 1, [2]),
        (3, 1, [1, 2]),
        (4, 4, [4]),
        (5, 4, [5]),
        (6, 4, [4, 2]),
        (9, 4, [4, 5]),
        (10, 100, [10]),
    ],
)
def test_se_03_a_last_batch_of_one_goes_with_the_one_before(count: int, size: int, sizes: list[int]) -> None:
    assert [last - first for first, last in batch_edges(count, size)] == sizes
    assert [len(batch) for batch in batches(range(count), size)] == sizes


@given(st.integers(0, 2**63 - 1), st.integers(0, 1000), st.integers(0, 40))
def test_an_epoch_sees_every_sample_once(seed: int, epoch: int, count: int) -> None:
    assert sorted(epoch_order(IDS[:count], seed, epoch)) == list(range(count))


@given(st.randoms(use_true_random=False))
def test_the_order_is_of_the_ids_and_not_of_how_they_are_listed(rng: random.Random) -> None:
    shuffled = IDS.copy()
    rng.shuffle(shuffled)
    seen = [shuffled[place] for place in epoch_order(shuffled, 7, 3)]
    assert seen == [IDS[place] for place in epoch_order(IDS, 7, 3)]


def test_seeds_and_epochs_give_orders_of_their_own() -> None:
    orders = {tuple(epoch_order(IDS, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_the_order_of_this_version_is_that_of_every_version() -> None:
    # Devices of one run may be of different versions of this program.
    assert epoch_order(IDS[:8], 42, 1) == [0, 3, 6, 4, 7, 2, 1, 5]
