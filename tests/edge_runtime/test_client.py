"""Coming back: what the client waits, counts and gives up on, over attempts that are written down here, not made."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosedError
from websockets.frames import Close

from contract.errors import RefusedError, RemoteProtocolError
from edge_runtime import client as client_module
from edge_runtime.client import CLOSED_AS_REPLACED, Client, wake
from edge_runtime.conduct import Conduct, Outcome
from edge_runtime.delivery import Delivery
from edge_runtime.dialling import Endpoint
from edge_runtime.reconnect import Backoff
from tests.edge_runtime.fake_package import write_device, write_images, write_package
from tests.edge_runtime.line import Line

ENDPOINT = Endpoint("ws://127.0.0.1:9", None, datetime(2020, 1, 1, tzinfo=timezone.utc))
REFUSED = ConnectionRefusedError(111, "Connection refused")
REPLACED = ConnectionClosedError(Close(CLOSED_AS_REPLACED, "replaced"), None)
LOST = ConnectionClosedError(None, None)
BROKEN = RemoteProtocolError("a frame was broken", "look at the server")


class Longest(random.Random):
    """Always draws the upper bound."""

    def uniform(self, a: float, b: float) -> float:
        return b


class Waits(Backoff):
    """Waits that are written down instead of waited."""

    def __init__(self) -> None:
        super().__init__(Longest())
        self.waits_s: list[float] = []

    def next_wait_s(self, lasted_s: float, progressed: bool, retry_after_s: float | None) -> float:
        self.waits_s.append(super().next_wait_s(lasted_s, progressed, retry_after_s))
        return 0.0


@dataclass
class Told:
    """What a client needs of a conduct."""

    outcome: Outcome | None = None
    acknowledged: int = 0
    progressed: bool = False

    def take_progress(self) -> bool:
        progressed, self.progressed = self.progressed, False
        return progressed


class Working:
    """A delivery that has not failed."""

    failure = None


@dataclass
class Clock:
    """Time as the client sees it."""

    now_s: float = 0.0

    def monotonic(self) -> float:
        return self.now_s


@dataclass
class Script:
    """Attempts that a client makes: what each does before it fails, and how."""

    clock: Clock
    conduct: Conduct | Told
    delivery: Delivery | Working = field(default_factory=Working)
    backoff: Waits = field(default_factory=Waits)

    def play(self, *attempts: tuple[Callable[[], object], Exception]) -> int:
        """Let the client make these attempts; how many it made, the last of which ends the run."""
        made = 0

        class Scripted(Client):
            async def _connect(self, context: object, stop: asyncio.Event) -> None:
                nonlocal made
                do, failure = attempts[made]
                made += 1
                do()
                if made == len(attempts):
                    stop.set()
                raise failure

        async def run() -> None:
            client = Scripted(ENDPOINT, self.conduct, self.delivery, self.backoff, lambda text: None)  # type: ignore[arg-type]
            await client.run(asyncio.Event(), once=False)

        try:
            asyncio.run(run())
        finally:
            self.made = made
        return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(client_module, "time", clock)
    return clock


def nothing() -> None:
    pass


def test_wi_03_waits_grow_after_a_connection_that_got_on(tmp_path: Path, clock: Clock) -> None:
    package = write_package(tmp_path / "front")
    images = write_images(tmp_path / "images", {"a": 3, "b": 3})
    line = Line(tmp_path, write_device(tmp_path, package, images), package)
    line.server.on_open = lambda server: server.ask_features()
    script = Script(clock, line.conduct, line.delivery)
    script.play((lambda: line.run(lambda: line.server.images == 6), LOST), *[(nothing, REFUSED)] * 30)
    line.close()
    waits_s = script.backoff.waits_s
    assert waits_s[:4] == [1.0, 2.0, 4.0, 4.0]
    assert max(waits_s) == 300.0


def test_a_name_that_two_programs_fight_for_is_given_up_although_each_gets_on(clock: Clock) -> None:
    told = Told()
    script = Script(clock, told)

    def get_on() -> None:
        told.progressed = True

    with pytest.raises(RefusedError, match="its sessions replaced ours 3 times"):
        script.play(*[(get_on, REPLACED)] * 5)
    assert script.made == 3


def test_a_worker_that_outlives_the_conversation_wakes_nobody() -> None:
    loop, event = asyncio.new_event_loop(), asyncio.Event()
    wake(loop, event)
    loop.run_until_complete(asyncio.wait_for(event.wait(), 5.0))
    loop.close()
    wake(loop, asyncio.Event())


def test_replacements_are_counted_in_a_row(clock: Clock) -> None:
    told = Told()

    def get_on() -> None:
        told.progressed = True

    def last() -> None:
        clock.now_s += 100.0

    replaced = [(nothing, REPLACED)] * 2
    for calm in ((get_on, LOST), (last, LOST), (last, REPLACED)):
        attempts = [*replaced, calm, (nothing, REPLACED), (nothing, REFUSED)]
        assert Script(clock, told).play(*attempts) == 5
    script = Script(clock, told)
    with pytest.raises(RefusedError, match="3 times"):
        script.play(*replaced, (nothing, REFUSED), (nothing, REPLACED), (nothing, REFUSED))
    assert script.made == 4  # an attempt that came to nothing is no calm


def test_a_new_session_that_got_something_acknowledged_begins_a_new_count_of_broken_conversations(
    clock: Clock,
) -> None:
    told = Told()

    def acknowledge(number: int) -> Callable[[], None]:
        return lambda: setattr(told, "acknowledged", number)

    new_session = acknowledge(1)  # its numbers begin at 1 again
    attempts = [(acknowledge(8), BROKEN), (nothing, BROKEN), (new_session, BROKEN), (nothing, BROKEN), (nothing, LOST)]
    assert Script(clock, told).play(*attempts) == 5
    script = Script(clock, told)
    with pytest.raises(RemoteProtocolError):
        script.play(*[(nothing, BROKEN)] * 5)
    assert script.made == 3
