"""Laws of the learning rate: it rises in the warm-up, falls after it, and is never 0 or above its highest."""

from __future__ import annotations

import pytest

from server_runtime.schedule import SCHEDULES, Schedule


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize(("warmup", "epochs"), [(0, 1), (0, 7), (2, 7), (7, 7)])
def test_it_rises_then_falls_and_no_step_is_without_a_rate(kind: str, warmup: int, epochs: int) -> None:
    steps = 5
    rates = [Schedule(kind, 0.1, warmup, epochs).at(n / steps, 1 / steps) for n in range(epochs * steps)]
    assert min(rates) > 0
    assert max(rates) == pytest.approx(0.1)
    rising, falling = rates[: warmup * steps], rates[warmup * steps :]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    if kind == "constant":
        assert set(falling) <= {0.1}


def test_a_whole_epochs_rate_warms_up_by_epochs() -> None:
    schedule = Schedule("constant", 0.1, 2, 5)
    assert [schedule.at(epoch, 1) for epoch in range(4)] == pytest.approx([0.05, 0.1, 0.1, 0.1])
