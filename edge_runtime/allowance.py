"""A budget of bytes per day: what the socket sent and received, kept over restarts, and until when a spent one lasts.

It decides and does no I/O: clocks, the record of last time, and what saves one are handed in (`open_allowance`, below,
does that for a state directory).

A day is one of UTC where this device's clock is set. Where it is not, or was set wrong and back again, it is 24 hours
of running, counted over restarts: the time without power counts for nothing, as nobody knows it. So no error of the
clock withholds bytes for longer than 24 hours of running. A message that is more than what is left ends the day.

The record is written ahead: it says more than was spent, by a reserve of 1/50 of the budget, and is written again when
that is used up, at a clean end, and every 15 minutes for the hours. A card takes some 150 small writes a day by it; a
device that is killed at any moment loses at most the reserve, and never sends more than its budget.

What is counted are the bytes of WebSocket messages, a twentieth more for what TLS, TCP and IP add, and 8 KiB for each
connection, for its handshakes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from contract.canonical import decode, encode, from_json, to_json
from edge_runtime.standing import in_hours
from edge_runtime.state import read_or_set_aside, write_durably

DAY_S = 86_400.0
SAVE_S = 900.0
RESERVES = 50  # of a budget
CONNECTION_BYTES = 8 << 10
GREETING_BYTES = 4 << 10  # both sides' greetings and what is asked, before the first message: rather too many
OVERHEAD_SHARE = 20  # one byte more for so many
FILE, FILE_BYTES = "traffic.json", 4096


class BudgetSpent(Exception):
    """What was to be sent is more than is left of today's budget."""


@dataclass(frozen=True)
class Record:
    """A day so far: its date, null where the clock was not set; bytes; seconds of running since its first byte."""

    day: str | None
    spent_bytes: int
    running_s: float


class Allowance:
    """The budget of one device."""

    def __init__(
        self,
        limit_bytes: int,
        record: Record | None,
        save: Callable[[Record], None],
        utc: Callable[[], datetime],
        monotonic: Callable[[], float],
        clock_floor: datetime,
    ) -> None:
        """`clock_floor` is a time that has passed for certain: a clock before it is not set."""
        self.limit_bytes = limit_bytes
        self._save, self._utc, self._monotonic, self._floor = save, utc, monotonic, clock_floor
        self._reserve = max(1, limit_bytes // RESERVES)
        known = record or Record(None, 0, 0.0)
        self._day, self._spent, self._before_s = known.day, known.spent_bytes, known.running_s
        self._began_s = self._saved_s = monotonic()
        self._recorded = known.spent_bytes
        self.look()

    @property
    def spent_bytes(self) -> int:
        """Today."""
        return self._spent

    @property
    def is_spent(self) -> bool:
        """Whether not even a connection is left for today."""
        return not self.allows(CONNECTION_BYTES)

    def allows(self, count: int) -> bool:
        """Whether a message of so many bytes may still be sent."""
        self.look()
        return self._spent + _cost(count) <= self.limit_bytes

    def allows_ever(self, largest_bytes: int) -> bool:
        """Whether a whole day lets a message of so many bytes through, which begins anew on each connection."""
        return _least_bytes(largest_bytes) <= self.limit_bytes

    def count(self, count: int) -> None:
        """A message of so many bytes went or came."""
        self.look()
        if self._spent == 0:  # a day begins with its first byte
            self._day, self._before_s, self._began_s = self._today(), 0.0, self._monotonic()
        self._spent += _cost(count)
        if self._spent > self._recorded:
            self._write(self._spent + self._reserve)

    def look(self) -> None:
        """Let time pass: a day ends, the hours are kept."""
        if self._spent == 0:
            return
        today = self._today()
        if (today is not None and self._day is not None and today > self._day) or self._running_s() >= DAY_S:
            self._spent = 0
            self._write(0)
        elif self._day is None:
            self._day = today  # the clock was set meanwhile: what was spent stays spent until midnight
        if self._monotonic() - self._saved_s >= SAVE_S:
            self._write(self._recorded)

    def exhaust(self) -> None:
        """Something did not fit into what is left: the day is over for this device."""
        self.look()
        if self._spent == 0:
            return  # that day ended meanwhile
        self._spent = max(self._spent, self.limit_bytes)
        self._write(self._spent)

    def close(self) -> None:
        """A clean end: the record says what was spent, without the reserve."""
        self._write(self._spent)

    def wait_s(self) -> float:
        """Until a new day begins."""
        left_s = max(0.0, DAY_S - self._running_s())
        now, today = self._utc(), self._today()
        if today is None or today != self._day:
            return left_s
        midnight = datetime(now.year, now.month, now.day, tzinfo=timezone.utc) + timedelta(days=1)
        return min(left_s, (midnight - now).total_seconds())

    def in_words(self, largest_bytes: int = 0) -> tuple[str, str]:
        """Why there is no connection, and what to do; `largest_bytes` is the largest message that is to get through."""
        wait_s = self.wait_s()
        by_clock = self._today() is not None and self._today() == self._day
        until = f"until 00:00 UTC, for {in_hours(wait_s)}" if by_clock else f"for {in_hours(wait_s)} of running"
        if largest_bytes and not self.allows_ever(largest_bytes):
            return (
                f"the {self.limit_bytes / 1e6:g} MB of a day never let a message of {largest_bytes / 1e6:.2f} MB "
                f"through: disconnected {until}",
                f"give --max-mb-per-day {least_mb(largest_bytes):g} at the least, better several times it",
            )
        return (
            f"the {self.limit_bytes / 1e6:g} MB of this day are spent: disconnected {until}",
            "it comes back by itself; --max-mb-per-day allows more"
            + ("" if by_clock else "; this device's clock is not set, so days are counted by running"),
        )

    def _today(self) -> str | None:
        now = self._utc()
        return None if now < self._floor else f"{now:%Y-%m-%d}"

    def _running_s(self) -> float:
        return self._before_s + self._monotonic() - self._began_s if self._spent else 0.0

    def _write(self, spent_bytes: int) -> None:
        self._recorded, self._saved_s = spent_bytes, self._monotonic()
        self._save(Record(self._day, spent_bytes, self._running_s()))


def open_allowance(
    root: Path, max_mb_per_day: float | None, clock_floor: datetime, say: Callable[[str], None]
) -> Allowance | None:
    """The budget of a state directory; None where there is none.

    Raises: DeviceError when the disk refuses.
    """
    if max_mb_per_day is None:
        return None
    path = root / FILE
    return Allowance(
        int(max_mb_per_day * 1e6),
        read_or_set_aside(path, lambda data: decode(Record, from_json(data, FILE_BYTES)), say),
        lambda record: write_durably(path, to_json(encode(record))),
        lambda: datetime.now(timezone.utc),
        time.monotonic,
        clock_floor,
    )


def least_mb(largest_bytes: int) -> float:
    """The least budget of a day, to a tenth of a MB, that lets a message of so many bytes through."""
    return math.ceil(_least_bytes(largest_bytes) / 1e5) / 10


def _least_bytes(largest_bytes: int) -> int:
    return _cost(CONNECTION_BYTES + GREETING_BYTES + largest_bytes)


def _cost(count: int) -> int:
    return count + math.ceil(count / OVERHEAD_SHARE)
