"""Who is left out of an average, and the words for it."""

from __future__ import annotations

import re

import numpy as np
import pytest

from contract.codec import decode, encode
from contract.messages import Update
from server_runtime.gates import fault_of, move_of, outliers

WHOLE = {"w": np.ones((3, 2), np.float32), "b": np.zeros(2, np.float32)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"w": np.full((3, 2), np.nan, np.float32)}, "not finite: w"),
        ({"w": np.full((3, 2), -np.inf, np.float32), "b": np.full(2, np.inf, np.float32)}, "not finite: b, w"),
        ({"w": np.ones((2, 3), np.float32)}, r"with w float32 \(2, 3\) instead of float32 \(3, 2\)"),
        ({"w": np.ones((3, 2), np.float64)}, r"with w float64 \(3, 2\) instead of float32"),
        ({"x": np.ones(1, np.float32)}, "with the unknown x"),
        ({"w": None}, "without w"),
    ],
)
def test_a_fault_is_named(change: dict[str, np.ndarray | None], said: str) -> None:
    part = {name: value for name, value in (WHOLE | change).items() if value is not None}  # type: ignore[operator]
    found = fault_of(part, WHOLE)
    assert found is not None
    assert re.match(said, found)


def test_a_whole_part_has_none() -> None:
    assert fault_of(WHOLE, WHOLE) is None
    assert move_of(WHOLE, WHOLE) == 0.0
    assert move_of({"b": np.array([3, 4], np.float32)}, WHOLE) == 5.0


def test_a_part_that_went_astray_is_told_from_the_others() -> None:
    moves = {"a": 1.0, "b": 1.2, "c": 0.8, "d": 50.0}
    assert outliers(moves, 10.0) == {"d": "moved 45.5 times as far as the median device, more than 10"}
    assert outliers(moves, 0.0) == {}
    assert outliers(moves, 100.0) == {}


def test_few_devices_or_none_that_moved_cannot_be_judged() -> None:
    assert outliers({"a": 1.0, "b": 99.0}, 10.0) == {}
    assert outliers({"a": 0.0, "b": 0.0, "c": 9.0}, 10.0) == {}
    assert outliers({}, 10.0) == {}


def test_an_update_that_is_not_finite_travels_so_that_it_can_be_named() -> None:
    """Were it refused at the wire, its device would be cut off and a site that needs all would wait for ever."""
    sent = Update("a-1", 4, 4, 0.5, 1, {"w": np.array([np.nan], np.float32)})
    assert np.isnan(decode(encode(sent, seq=1, ack=0)).message.tensors["w"]).all()  # type: ignore[union-attr]
