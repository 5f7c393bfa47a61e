"""The only socket: connect, feed what comes in to `conduct`, flush what it gives, come back after every failure.

It decides nothing: what to say is conduct's, how long to wait is reconnect's part. The library's own keep-alive is off:
liveness is the session's heartbeat, which goes on while the worker computes (WI-01).
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, WebSocketException

from contract.errors import (
    CutlayerError,
    ProtocolError,
    RefusedError,
    RemoteProtocolError,
    TrainingError,
    UnreachableError,
)
from edge_runtime.allowance import CONNECTION_BYTES, Allowance, BudgetSpent
from edge_runtime.conduct import FINAL_REASONS, UPDATE, Conduct, Outcome
from edge_runtime.delivery import Delivery
from edge_runtime.dialling import Endpoint, channel_binding, open_socket
from edge_runtime.line_marks import LineMarks, tell_arrival
from edge_runtime.reconnect import Backoff, Failure, explain
from edge_runtime.sleeping import Sleeper
from edge_runtime.standing import Link

BROKEN_PROTOCOL = "protocol"  # the server's code for a message that broke the rules
CLOSED_AS_REPLACED = 4000  # the server's close code for an older session of a device


@dataclass(frozen=True)
class ClientLimits:
    """Waits of the socket, in seconds, and how much it puts up with."""

    open_s: float = 20.0
    tick_s: float = 0.5
    goodbye_s: float = 3.0
    replaced: int = 3  # so often in a row may a newer session under this name take over
    lasting_s: float = 60.0  # a connection that stood so long before that begins a new row
    save_up_s: float = 30.0  # between two looks whether a new day has begun
    lost: int = 3  # connections in a row that brought nothing: the link is down, for a device that can do without
    broken: int = 3  # conversations in a row that broke the protocol without anything new acknowledged between them


@dataclass
class Traffic:
    """Bytes of all WebSocket messages, handshakes and repetitions included."""

    sent_bytes: int = 0
    received_bytes: int = 0
    connections: int = 0


class Client:
    """One run's connections, one after the other."""

    def __init__(
        self,
        endpoint: Endpoint,
        conduct: Conduct,
        delivery: Delivery,
        backoff: Backoff,
        say: Callable[[str], None],
        on_tick: Callable[[], None] = lambda: None,
        limits: ClientLimits | None = None,
        marks: LineMarks | None = None,
        on_rest: Callable[[bool], None] = lambda begins: None,
        sleeper: Sleeper | None = None,
        allowance: Allowance | None = None,
        can_do_without: bool = False,
    ) -> None:
        """`on_tick` is called a few times a second while connected: to read meters and draw bars; `on_rest` at the
        beginning and the end of a rest that the server gave this device, which `sleeper` spends. `allowance` None:
        bytes cost nothing. One that `can_do_without` a server gives up after a few failures."""
        self.traffic = Traffic()
        self.link = Link(False, time.monotonic())
        self._marks = marks
        self._endpoint, self._conduct, self._delivery = endpoint, conduct, delivery
        self._backoff, self._say, self._limits = backoff, say, limits or ClientLimits()
        self._on_tick, self._on_rest, self._can_do_without = on_tick, on_rest, can_do_without
        self._lost = 0
        self._sleeper = sleeper or Sleeper((), say)
        self._allowance = allowance
        self._rest_s: float | None = None
        self._wake = asyncio.Event()
        self._connected, self._leaving = False, False
        self._replaced = 0
        self._broken, self._broken_at = 0, 0  # conversations, and what was acknowledged by then
        self._status = ""

    async def run(self, stop: asyncio.Event, once: bool) -> Outcome:
        """Stay with the server until the run is over, or `stop` is set.

        Raises: UnreachableError with `once`, or for a device that can do without; RefusedError, AuthError,
        ProtocolError when coming back is of no use; TrainingError when the server gave up; what the worker raised.
        """
        loop = asyncio.get_running_loop()
        self._delivery.on_change = lambda: wake(loop, self._wake)
        context = self._endpoint.tls()
        while True:
            if self._allowance is not None and self._allowance.is_spent:
                await self._save_up(self._allowance, stop, once)
                if stop.is_set():
                    return Outcome("stopped", True)
            started_s = time.monotonic()
            try:
                await self._unless_stopped(self._connect(context, stop), stop)
                failure: Exception = PeerLost("the server closed it")
            except (RefusedError, RemoteProtocolError) as error:
                if once or not self._is_worth_another_try(error):
                    raise
                failure = error
            except BudgetSpent:
                assert self._allowance is not None
                self._allowance.exhaust()
                if self._conduct.outcome is not None:
                    return final(self._conduct.outcome)
                continue
            except (OSError, ssl.SSLError, WebSocketException, PeerLost) as error:
                failure = error
            lasted_s, progressed = time.monotonic() - started_s, self._conduct.take_progress()
            if self._conduct.outcome is not None:
                return final(self._conduct.outcome)
            if stop.is_set():
                return Outcome("stopped", True)
            if self._rest_s is not None:
                await self._rest(stop)
                continue
            self._note_replaced(failure, lasted_s, progressed)
            told = explain(failure, self._endpoint.server, datetime.now(timezone.utc), self._endpoint.clock_floor)
            lasted = progressed or lasted_s >= self._limits.lasting_s or isinstance(failure, RefusedError)
            self._lost = 0 if lasted else self._lost + 1
            if once or (self._can_do_without and self._lost >= self._limits.lost):
                raise UnreachableError(told.cause, told.cure) from failure
            retry_after_s = failure.retry_after_s if isinstance(failure, RefusedError) else None
            wait_s, now_s = self._backoff.next_wait_s(lasted_s, progressed, retry_after_s), time.monotonic()
            since_s = now_s if self.link.connected else self.link.since_s
            self.link = Link(False, since_s, told.cause, told.cure, now_s + wait_s)
            await self._wait(told, wait_s, stop)

    async def _wait(self, told: Failure, wait_s: float, stop: asyncio.Event) -> None:
        self._say(f"{told.cause}; trying again in {wait_s:.0f} s ({told.cure})")
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), wait_s)

    async def _save_up(self, allowance: Allowance, stop: asyncio.Event, once: bool) -> None:
        """Stay away until there is something to spend; the worker goes on meanwhile, into its spool.

        Raises: UnreachableError with `once`, and where this device can do without a server.
        """
        cause, cure = allowance.in_words(self._conduct.largest_bytes)
        if once or self._can_do_without:
            raise UnreachableError(cause, cure)
        self._say(f"{cause} ({cure})")
        now_s = time.monotonic()
        since_s = now_s if self.link.connected else self.link.since_s
        while allowance.is_spent and not stop.is_set():  # looked at often: the clock may be set meanwhile
            wait_s = allowance.wait_s()
            cause, cure = allowance.in_words(self._conduct.largest_bytes)  # the worker may have made a larger one
            self.link = Link(False, since_s, cause, cure, time.monotonic() + wait_s, budget_spent=True)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stop.wait(), min(self._limits.save_up_s, wait_s + 0.1))

    async def _rest(self, stop: asyncio.Event) -> None:
        """Stay away for as long as the server can do without this device."""
        rest_s, self._rest_s = self._rest_s or 0.0, None
        self._say(f"not needed for {rest_s:.0f} s: disconnected until then")
        self._on_rest(True)
        await self._sleeper.rest(rest_s, stop)
        self._on_rest(False)

    def _is_worth_another_try(self, error: RefusedError | RemoteProtocolError) -> bool:
        """Whether coming back may help: the server says so, or a message was broken, perhaps by accident."""
        if isinstance(error, RefusedError) and error.code != BROKEN_PROTOCOL:
            return error.retry_after_s is not None
        if self._delivery.failure is not None:  # what was asked cannot be done, however often it is asked
            return False
        if self._conduct.acknowledged != self._broken_at:  # less in a new session, which counts from its own beginning
            self._broken = 0
        self._broken, self._broken_at = self._broken + 1, self._conduct.acknowledged
        return self._broken < self._limits.broken

    def _note_replaced(self, failure: Exception, lasted_s: float, progressed: bool) -> None:
        """Raises: RefusedError when another program keeps joining under this device's name.

        Once proves nothing: a join of our own that was long under way may arrive after the one that followed it. Nor
        does progress just before: two programs that replace each other get on a little in between.
        """
        closed = failure.rcvd if isinstance(failure, ConnectionClosed) else None
        replaced = closed is not None and closed.code == CLOSED_AS_REPLACED
        if lasted_s >= self._limits.lasting_s or (progressed and not replaced):
            self._replaced = 0
        self._replaced += replaced
        if self._replaced >= self._limits.replaced:
            raise RefusedError(
                f"another program joins under this device's name: its sessions replaced ours {self._replaced} times",
                "stop one of the two, and give each machine a name and a key of its own (edge-run --name)",
                "replaced",
            ) from failure

    async def _unless_stopped(self, connection: Coroutine[Any, Any, None], stop: asyncio.Event) -> None:
        """Await a connection's whole life; when stopped, one that stands takes leave by itself, another is dropped."""
        task, stopping = asyncio.create_task(connection), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and self._connected:
                await asyncio.wait((task,), timeout=2 * self._limits.goodbye_s)
            if task.done():
                task.result()
        finally:
            for each in (task, stopping):
                each.cancel()
            await asyncio.gather(task, stopping, return_exceptions=True)

    async def _connect(self, context: ssl.SSLContext | None, stop: asyncio.Event) -> None:
        async with open_socket(self._endpoint.server, context, self._limits.open_s, self._marks) as socket:
            self._connected, self._leaving = True, False
            self.link = Link(True, time.monotonic())
            self.traffic.connections += 1
            if self._allowance is not None:
                self._allowance.count(CONNECTION_BYTES)
            self._conduct.connect(channel_binding(socket))
            tasks = [
                asyncio.create_task(work) for work in (self._read(socket), self._write(socket, stop), self._tick())
            ]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                errors = [error for task in tasks if task.done() and (error := task.exception())]
                if errors:  # a reason of ours says more than the socket's that it ended
                    raise next((error for error in errors if isinstance(error, CutlayerError)), errors[0])
            except CutlayerError as error:
                await self._say_goodbye(socket, error.code if isinstance(error, RefusedError) else "error")
                raise
            except BudgetSpent:
                if not self._conduct.is_amid_sending:  # else what follows would make no sense without what was left out
                    await self._say_goodbye(socket, "budget")
                raise
            finally:
                self._connected = False
                if self._marks is not None:
                    self._marks.connection_ended()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, socket: ClientConnection) -> None:
        async for frame in socket:
            if isinstance(frame, str):
                raise ProtocolError(
                    "the server sent text, expected binary frames", "check that --server is a Cutlayer server"
                )
            self.traffic.received_bytes += len(frame)
            if self._allowance is not None:
                self._allowance.count(len(frame))
                if not self._allowance.allows(1):
                    raise BudgetSpent
            orders = self._conduct.receive(frame, time.monotonic())
            for order in orders:
                assert self._conduct.welcome is not None
                self._delivery.take(order, self._conduct.welcome)
            if self._marks is not None and not orders and not self._conduct.is_amid_message:
                self._marks.went_on()
            if self._conduct.server_status not in ("", self._status):
                self._status = self._conduct.server_status
                self._say(f"server: {self._status}")
            if self._conduct.has_news:
                self._wake.set()

    async def _write(self, socket: ClientConnection, stop: asyncio.Event) -> None:
        """Flush whenever something changed, and at least every tick, until the run is over or stopped."""
        ticked_s, status = float("-inf"), self._delivery.status(time.monotonic())
        while True:
            self._wake.clear()
            if self._delivery.failure is not None:
                raise self._delivery.failure
            while not self._delivery.answered.empty():
                self._conduct.work_done(self._delivery.answered.get())
            now_s = time.monotonic()
            if now_s - ticked_s >= self._limits.tick_s:
                self._on_tick()
                ticked_s, status = now_s, self._delivery.status(now_s)
            try:
                self._conduct.tick(now_s, status)
            except ProtocolError as error:
                raise PeerLost(error.cause) from error
            await self._flush(socket)
            self._rest_s = self._conduct.take_rest()
            if self._rest_s is not None:
                await self._say_goodbye(socket, "sleeping")
                return
            if self._conduct.outcome is not None or stop.is_set():
                await self._say_goodbye(socket, "stopped" if stop.is_set() else "done")
                return
            await self._wake.wait()

    async def _tick(self) -> None:
        """Wake the writer now and then: one timer a tick, not one for each time that it sleeps."""
        while True:
            await asyncio.sleep(self._limits.tick_s)
            self._wake.set()

    async def _flush(self, socket: ClientConnection) -> None:
        while frames := self._conduct.frames_to_send():
            for frame in frames:
                if self._allowance is not None:
                    if not self._leaving and not self._allowance.allows(len(frame)):
                        raise BudgetSpent
                    self._allowance.count(len(frame))
                await socket.send(frame)
                self.traffic.sent_bytes += len(frame)
        if self._marks is not None and self._conduct.is_all_sent and self._marks.wants_arrival():
            await tell_arrival(socket, self._marks)

    async def _say_goodbye(self, socket: ClientConnection, reason: str) -> None:
        self._conduct.leave(reason)
        self._leaving = True
        with suppress(WebSocketException, OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._flush(socket), self._limits.goodbye_s)


class PeerLost(Exception):
    """The server went away, or said nothing for too long: connect again."""


def wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set the event from the worker's thread, which may still be at it when the conversation is over."""
    with suppress(RuntimeError):  # the loop is closed: nobody is left to be woken
        loop.call_soon_threadsafe(event.set)


def final(outcome: Outcome) -> Outcome:
    """Raises: TrainingError when the server let this device go without having finished."""
    if outcome.reason not in (*FINAL_REASONS, UPDATE):
        raise TrainingError(f"the server ended the run: {outcome.reason}", "look at the server's log and report")
    return outcome
