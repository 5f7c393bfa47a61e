"""A day's bytes: never more, over kills and errors of the clock; never withheld for longer than a day of running."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.allowance import CONNECTION_BYTES, DAY_S, RESERVES, Allowance, Record, open_allowance

FLOOR = datetime(2026, 11, 1, tzinfo=timezone.utc)
NOON = datetime(2026, 11, 29, 12, tzinfo=timezone.utc)
LIMIT = 1_000_000


class World:
    """A device with a clock, which may be wrong, and a disk."""

    def __init__(self, clock: datetime = NOON) -> None:
        self.clock, self.running_s, self.disk, self.writes = clock, 1000.0, None, 0
        self.start()

    def start(self) -> None:
        """Also after a kill: what was not written is gone."""
        self.allowance = Allowance(
            LIMIT, self.disk, self._save, lambda: self.clock, lambda: self.running_s, FLOOR
        )  # fmt: skip

    def _save(self, record: Record) -> None:
        self.disk, self.writes = record, self.writes + 1  # type: ignore[assignment]

    def run(self, seconds: float) -> None:
        self.clock, self.running_s = self.clock + timedelta(seconds=seconds), self.running_s + seconds
        self.allowance.look()

    def send(self, count: int) -> bool:
        """Whether it was allowed."""
        if not self.allowance.allows(count):
            return False
        self.allowance.count(count)
        return True


def test_a_spent_day_ends_at_midnight_utc() -> None:
    world = World()
    while world.send(100_000):
        pass
    assert 0.9 * LIMIT < world.allowance.spent_bytes <= LIMIT
    world.allowance.exhaust()
    assert world.allowance.is_spent and world.allowance.wait_s() == 12 * 3600
    assert "until 00:00 UTC, for 12 h 0 min" in world.allowance.in_words()[0]
    world.run(12 * 3600 - 1)
    assert world.allowance.is_spent
    world.run(1)
    assert not world.allowance.is_spent and world.allowance.spent_bytes == 0


def test_without_a_clock_a_day_is_one_of_running_over_restarts() -> None:
    world = World(datetime(1970, 1, 1, tzinfo=timezone.utc))
    world.run(7200)
    assert world.send(1000)  # the day begins with its first byte
    world.allowance.exhaust()
    for _ in range(4):  # 5 h of running, then hours without power, of which nothing is known
        world.run(5 * 3600)
        world.allowance.close()
        world.clock = datetime(1970, 1, 1, tzinfo=timezone.utc)
        world.running_s = 5.0
        world.start()
    assert world.allowance.is_spent and world.allowance.wait_s() == pytest.approx(4 * 3600)
    assert "for 4 h 0 min of running" in world.allowance.in_words()[0]
    world.run(4 * 3600)
    assert not world.allowance.is_spent


def test_a_clock_that_is_set_meanwhile_gives_no_second_budget_before_midnight() -> None:
    world = World(datetime(1970, 1, 1, tzinfo=timezone.utc))
    assert world.send(500_000)
    world.clock = NOON
    world.run(60)
    assert world.allowance.spent_bytes > 500_000
    world.run(12 * 3600)
    assert world.allowance.spent_bytes == 0


def test_a_kill_loses_at_most_the_reserve_and_gives_nothing_back() -> None:
    world = World()
    assert world.send(300_000)
    spent = world.allowance.spent_bytes
    world.start()
    assert spent <= world.allowance.spent_bytes <= spent + LIMIT // RESERVES + 1
    before = world.allowance.spent_bytes
    world.allowance.close()
    world.start()
    assert world.allowance.spent_bytes == before  # a clean end loses nothing


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(1, 300_000)),
        st.tuples(st.just("run"), st.floats(0.0, 40_000.0)),
        st.tuples(st.just("kill"), st.just(0)),
        st.tuples(st.just("end"), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=40, deadline=None)
@given(ACTS)
def test_no_day_has_more_than_its_budget_whatever_happens(acts: list[tuple[str, float]]) -> None:
    world = World()
    by_day: dict[str, int] = {}
    for act, value in acts:
        if act == "send" and world.send(int(value)):
            day = f"{world.clock:%Y-%m-%d}"
            by_day[day] = by_day.get(day, 0) + int(value)
        elif act == "run":
            world.run(value)
        elif act in ("kill", "end"):
            if act == "end":
                world.allowance.close()
            world.start()
    assert all(count <= LIMIT for count in by_day.values())
    hours = sum(value for act, value in acts if act == "run") / 3600
    ends = sum(act in ("kill", "end") for act, _ in acts)
    assert world.writes <= (len(by_day) + 1) * (RESERVES + 3) + 4 * hours + 2 * ends + 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 30_000.0), st.integers(-400, 400)), max_size=20))
def test_no_error_of_the_clock_withholds_bytes_for_longer_than_a_day_of_running(
    turns: list[tuple[float, int]],
) -> None:
    world = World()
    for seconds, days in turns:
        world.send(400_000)
        world.run(seconds)
        world.clock += timedelta(days=days)
    world.send(1)
    world.allowance.exhaust()
    assert world.allowance.wait_s() <= DAY_S
    world.run(DAY_S + 1.0)  # of floats
    assert not world.allowance.is_spent and world.send(CONNECTION_BYTES)


def test_the_record_is_kept_in_the_state_directory(tmp_path: Path) -> None:
    said: list[str] = []
    assert open_allowance(tmp_path, None, FLOOR, said.append) is None
    first = open_allowance(tmp_path, 1.0, FLOOR, said.append)
    assert first is not None
    first.count(100_000)
    again = open_allowance(tmp_path, 1.0, FLOOR, said.append)
    assert again is not None and again.spent_bytes >= 105_000
    (tmp_path / "traffic.json").write_bytes(b"{")
    torn = open_allowance(tmp_path, 1.0, FLOOR, said.append)
    assert torn is not None and torn.spent_bytes == 0 and "unreadable" in said[0]


def test_a_day_that_ends_between_two_looks_does_not_cost_the_next_one() -> None:
    """What is refused at 0:00 for the day before must not exhaust the day that begins."""
    world = World()
    assert world.send(900_000)
    world.clock, world.running_s = world.clock + timedelta(hours=12), world.running_s + 12 * 3600  # nobody looked
    assert world.allowance.allows(500_000)
    world = World()
    assert world.send(900_000) and not world.allowance.allows(500_000)
    world.clock, world.running_s = world.clock + timedelta(hours=12), world.running_s + 12 * 3600
    world.allowance.exhaust()  # after the goodbye, which took until midnight
    assert world.allowance.spent_bytes == 0 and world.send(500_000)


def test_what_fits_into_no_day_is_told_with_what_would() -> None:
    now = datetime(2026, 5, 1, 12, tzinfo=timezone.utc)
    allowance = Allowance(1_000_000, None, lambda record: None, lambda: now, lambda: 0.0, now)
    most = 1_000_000 * 20 // 21 - (12 << 10)  # a twentieth more for lower layers, 12 KiB for connection and greetings
    assert "of this day are spent" in allowance.in_words(most)[0]
    cause, cure = allowance.in_words(most + 2)
    assert "the 1 MB of a day never let a message of 0.94 MB through" in cause and "--max-mb-per-day 1.1 " in cure
    assert "of this day are spent" in allowance.in_words()[0]
