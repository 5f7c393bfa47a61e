"""The only socket of the server: accepts devices, carries frames between them and the torch process, decides nothing.

One device's conversation is left to `connection`, training to the torch process, what the operator wants to `cli`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import ssl
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from websockets.asyncio.server import Server as SocketServer
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from contract import codec
from contract.errors import ConfigError, CutlayerError, TrainingError
from contract.messages import Activations, Features, Fetch, Heartbeat, Piece, Verdict
from contract.session import Received

from . import pipe
from .acceptance import Expected
from .admission import Admission, Terms
from .connection import REPLAYABLE, Connection
from .files import DISK_ERRORS, disk_refuses
from .fleet import Fleet
from .listening import bind_address, shrink_tls_buffers, tls_context
from .observatory import WRITE_S, shown, write_status
from .offers import Box
from .pipe import PipeFrame
from .plan import Listen
from .register import Register
from .roster import Roster
from .status import SiteStanding, Standing
from .store import Store
from .torch_child import TorchChild

T = TypeVar("T")


@dataclass(frozen=True)
class ServerLimits:
    """Waits in seconds, and what one server holds."""

    connections: int = 4096
    queued_frames: int = 4  # per connection, received and not looked at
    tick_s: float = 1.0
    farewell_s: float = 5.0  # for last acknowledgements when all is done
    line_s: float = 10.0  # between two status lines of a site


@dataclass(frozen=True)
class Job:
    """All that a server serves."""

    root: Path
    listen: Listen
    roster: Roster
    terms: Terms
    expected: Expected
    start: PipeFrame  # for the torch process
    threads: int
    exit_when_done: bool
    metrics: tuple[str, int] | None = None  # host and port of what `observatory` shows


@dataclass
class _SiteStatus:
    text: str = ""
    busy: bool = False
    step: int = 0
    since_s: float = 0.0
    said_s: float = float("-inf")
    turned_s: float = 0.0  # when it began to do, or to wait for, what it says


@dataclass
class Outcome:
    """How the sites ended."""

    ended: dict[str, Mapping[str, pipe.Value]] = field(default_factory=dict)
    failed: dict[str, TrainingError] = field(default_factory=dict)


class Server:
    """Sockets on one side, the torch process on the other."""

    def __init__(self, job: Job, store: Store, announce: Callable[[str], None], say: Callable[[str], None]) -> None:
        self._job = job
        self._store = store
        self._announce = announce  # the one line that scripts wait for
        self._say = say
        self._limits = ServerLimits()
        self._open: set[Connection] = set()
        self._devices: dict[str, Connection] = {}
        self._visits: dict[str, Connection] = {}  # those that came for a package
        self._status = {site: _SiteStatus() for site in job.roster.sites}
        self._requests: set[tuple[str, str, int]] = set()  # inference batches that are owed scores
        self._register = Register(job.roster, job.terms, job.root)
        self._fleet = Fleet(Box(job.roster.root), self.in_store, say)
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._stop = asyncio.Event()
        self._signalled = False
        self._started = asyncio.Event()  # the torch process may be told things
        self._ready = asyncio.Event()  # and has loaded its backend
        self._fault: BaseException | None = None
        self._child: TorchChild | None = None
        self.outcome = Outcome()

    # -- its life

    async def run(self) -> Outcome:
        """Serve until a signal, or until all is done where that was asked for.

        Raises:
            ConfigError: the port is taken or the certificate cannot be used.
            TrainingError: the torch process ended, or no site can go on.
        """
        context, binding = tls_context(self._job.listen)
        shrink_tls_buffers()
        self._load_requests()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        async with contextlib.AsyncExitStack() as stack:
            socket_server = await stack.enter_async_context(await self._listen(context, binding))
            self._child = await TorchChild.start(self._job.start, self._job.threads)
            self._started.set()
            if self._job.metrics is not None:
                port = await stack.enter_async_context(shown(*self._job.metrics, self._standing))
                self._say(f"status page and metrics on http://{self._job.metrics[0]}:{port}")
            for endless in (self._listen_to_child(), self._tick(), self._write_status()):
                task = asyncio.create_task(endless)
                task.add_done_callback(self._give_up_if_failed)
                stack.callback(task.cancel)
            stack.push_async_callback(self._child.stop)  # before its pipe is left unread
            await self._first_of(self._ready, self._stop)
            if self._ready.is_set():
                port = socket_server.sockets[0].getsockname()[1]
                host = f"[{self._job.listen.host}]" if ":" in self._job.listen.host else self._job.listen.host
                self._announce(f"listening on {self._job.listen.scheme}://{host}:{port}")
            await self._stop.wait()
            socket_server.close()
        await self.in_store(write_status, self._job.root, self._standing())  # with all that came since the last time
        self._disk.shutdown()
        if self._fault is not None:
            raise self._fault
        return self.outcome

    @staticmethod
    async def _first_of(*events: asyncio.Event) -> None:
        waits = [asyncio.create_task(event.wait()) for event in events]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _on_signal(self) -> None:
        if self._signalled:
            os._exit(1)  # the second signal: everything on disk is whole at any moment
        self._signalled = True
        if self._stop.is_set():
            return  # it ends by itself already, with the exit code of how it went
        self._say("stopping; what is stored stays, start server-run again to go on")
        self._stop.set()

    async def _listen(self, context: ssl.SSLContext | None, binding: bytes) -> SocketServer:
        # What strangers get wrong on an open port is no news to the operator.
        logging.getLogger("websockets.server").setLevel(logging.CRITICAL)

        async def converse(device: ServerConnection) -> None:
            await self._converse(device, binding)

        listen = self._job.listen
        try:
            return await serve(
                converse, bind_address(listen), listen.port, ssl=context, compression=None,
                max_size=codec.LIMITS.frame_bytes, max_queue=self._limits.queued_frames, ping_interval=None,
                close_timeout=2,
            )  # fmt: skip
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            raise ConfigError(
                f"cannot listen on {listen.host}:{listen.port}: {error.strerror}",
                "stop the program that uses the port, or choose another with --listen (port 0 takes a free one)"
                if in_use
                else "choose another address with --listen HOST:PORT",
            ) from error

    async def _converse(self, device: ServerConnection, binding: bytes) -> None:
        # Torch takes seconds to load; meanwhile devices come in and their uploads are stored and acknowledged.
        await self._first_of(self._started, self._stop)
        if self._stop.is_set():
            return
        if len(self._open) >= self._limits.connections:
            await device.close(1013, "too many connections, try again later")
            return
        admission = Admission(self._job.roster, self._job.terms, self._store, binding, os.urandom)
        connection = Connection(device, admission, self._job.expected, self._store, self)
        self._open.add(connection)
        try:
            await connection.run()
        except ConnectionClosed:
            pass
        except CutlayerError as error:  # one device's trouble is not the others'
            self._say(f"warning: a connection was given up: {error.cause}")
        except DISK_ERRORS as error:  # of the store; a socket's own are ConnectionClosed
            self._give_up(disk_refuses(self._job.root, error))
        except Exception as error:
            self._give_up(error)
        finally:
            self._open.discard(connection)
            self._register.went(connection)
            await self._leave(connection)

    # -- how it stands

    async def _write_status(self) -> None:
        while True:
            # Standing is taken here, written in the store's thread: the disk may be slow.
            await self.in_store(write_status, self._job.root, self._standing())
            await asyncio.sleep(WRITE_S)

    def _standing(self) -> Standing:
        newest = self._register.metrics(tuple(self._status))
        sites = tuple(self._site_standing(site, newest[site]) for site in self._status)
        counts = len(self._open), len(self._requests)
        return self._register.standing(sites, self._devices, *counts, self._fleet.rollout)

    def _site_standing(self, site: str, newest: Mapping[str, Any]) -> SiteStanding:
        status, failed = self._status[site], self.outcome.failed.get(site)
        state = "failed" if failed else "trained" if site in self.outcome.ended else "running"
        since_s = time.monotonic() - status.turned_s if status.text else None
        return SiteStanding(site, state, status.text, status.busy, since_s, failed.cause if failed else None, newest)

    def _give_up_if_failed(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        self._fault = self._fault or error
        self._stop.set()

    # -- Hub: what connections tell

    async def join(self, connection: Connection) -> None:
        """The device is in: its older connection is closed, and the torch process told."""
        joined = connection.joined
        assert joined is not None and self._child is not None
        name, site = joined.device.name, joined.device.site
        self._register.came(joined)
        if joined.purpose == "update":  # no part of the run: it may have a session there as well
            before, self._visits[name] = self._visits.get(name), connection
            if before is not None:
                await before.replace()
            await self._fleet.visit(connection)
            return
        older = self._devices.get(name)
        self._devices[name] = connection
        if older is not None:
            await older.replace()
        if joined.purpose == "infer":  # it sends again, under this session, whatever it has no scores for
            await self.in_store(self._store.forget_requests, name, joined.session)
            self._requests = {request for request in self._requests if request[0] != name}
        connection.set_status(self._heartbeat(site))
        await self._fleet.meet(connection)
        values: dict[str, pipe.Value] = {"purpose": joined.purpose, "class_count": joined.class_count}
        await self._child.send(PipeFrame(pipe.JOINED, site, name, values=values))

    async def _leave(self, connection: Connection) -> None:
        joined = connection.joined
        if joined is not None and self._visits.get(joined.device.name) is connection:
            del self._visits[joined.device.name]
        if joined is None or self._devices.get(joined.device.name) is not connection:
            return
        del self._devices[joined.device.name]
        if self._child is not None and not self._stop.is_set():
            await self._child.send(PipeFrame(pipe.LEFT, joined.device.site, joined.device.name))

    async def forward(self, connection: Connection, received: Received, complete: bool = False) -> None:
        """Hand what a device sent to the torch process; features go by reference, they are in the store."""
        joined = connection.joined
        assert joined is not None and self._child is not None
        name, site = joined.device.name, joined.device.site
        message = received.message
        if isinstance(message, Features):
            if message.split == "infer":
                if self._devices.get(name) is not connection:
                    return  # replaced while it waited for the disk: the newer session sends it again
                self._requests.add((name, message.ask, message.batch))
            await self._tell_stored(site, name, message.ask, message.batch, message.split, complete)
        elif isinstance(message, REPLAYABLE):
            if isinstance(message, Activations) and message.split == "infer":
                self._requests.add((name, message.ask, message.batch))
            await self._child.send(pipe.relay(site, name, received.frame))
        elif isinstance(message, Heartbeat):
            await self._child.send(PipeFrame(pipe.PROGRESS, site, name))

    async def _tell_stored(
        self, site: str, device: str, ask: str, batch: int, split: str, complete: bool = False
    ) -> None:
        assert self._child is not None
        values: dict[str, pipe.Value] = {"ask": ask, "batch": batch, "split": split, "complete": complete}
        await self._child.send(PipeFrame(pipe.STORED, site, device, values=values))

    async def piece(self, connection: Connection, fetch: Fetch) -> Piece:
        """Bytes of the package that is offered to a device. Raises: RefusedError."""
        return await self._fleet.piece(connection.name, fetch)

    async def judge(self, connection: Connection, verdict: Verdict) -> None:
        """Keep what a device says of the package."""
        await self._fleet.judge(connection.name, verdict, dict(self._devices))

    def scored(self, device: str, ask: str, batch: int) -> None:
        """Scores are on their way."""
        self._requests.discard((device, ask, batch))
        self._check_done()

    async def in_store(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run a call that waits for the disk in the store's own thread."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, call, *arguments)

    def _load_requests(self) -> None:
        for site in self._job.roster.sites:
            for record in self._store.records(site, "infer", unanswered=True):
                self._requests.add((record.device, record.ask, record.batch))

    # -- what the torch process tells

    async def _listen_to_child(self) -> None:
        assert self._child is not None
        async for frame in self._child.frames():
            self._follow(frame)
        self._stop.set()

    def _follow(self, frame: PipeFrame) -> None:
        if frame.kind == pipe.READY:
            self._ready.set()
        elif frame.kind == pipe.WARNING:
            self._say(f"warning: {frame.text}")
        elif frame.kind == pipe.MESSAGE:
            connection = self._devices.get(frame.device)
            if connection is not None:  # who is away is asked again when it comes back
                connection.post(frame.message)
        elif frame.kind == pipe.STATUS:
            self._set_status(frame)
        elif frame.kind == pipe.ENDED:
            self.outcome.ended[frame.site] = frame.values
            self._say(f"site {frame.site}: trained")
            self._check_done()
        elif frame.kind == pipe.FAILED:
            error = TrainingError(str(frame.values["cause"]), str(frame.values["cure"]))
            self.outcome.failed[frame.site] = error
            lost = self._job.roster.sites[frame.site]  # their predictions will never be answered
            self._requests = {request for request in self._requests if request[0] not in lost}
            self._say(f"site {frame.site}: training failed: {error.cause}\n  cure: {error.cure}")
            self._check_done()

    def _set_status(self, frame: PipeFrame) -> None:
        status, now_s = self._status[frame.site], time.monotonic()
        turned = status.text.split(" ")[0] != frame.text.split(" ")[0]  # from training to pausing, say
        status.text, status.busy, status.since_s = frame.text, bool(frame.values["busy"]), now_s
        status.step += 1
        if turned:
            status.turned_s = now_s
        if turned or now_s - status.said_s >= self._limits.line_s:
            status.said_s = now_s
            self._say(f"site {frame.site}: {frame.text}")
        self._beat(frame.site)

    def _heartbeat(self, site: str) -> Heartbeat:
        status = self._status[site]
        since_s = time.monotonic() - status.since_s if status.text else 0.0
        return Heartbeat(status.step, status.busy, status.text[:1000], since_s)

    def _beat(self, site: str) -> None:
        for connection in self._devices.values():
            if connection.joined is not None and connection.joined.device.site == site:
                connection.set_status(self._heartbeat(site))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._limits.tick_s)
            for site in self._status:
                self._beat(site)
            for connection in list(self._open):
                connection.tick()
            await self._dismiss_revoked()
            await self._fleet.look(dict(self._devices))

    async def _dismiss_revoked(self) -> None:
        """Who was revoked, or whose key is another now, does not stay until it happens to connect again."""
        if not self._register.roster_changed:
            return
        refused = await self.in_store(self._register.look_again, dict(self._devices), self._say)
        for name, error in refused.items():
            connection = self._devices.get(name)
            if connection is not None:
                self._say(f"device {name}: {error.cause}")
                with contextlib.suppress(ConnectionClosed):
                    await connection.dismiss(error)

    # -- the end

    def _check_done(self) -> None:
        over = len(self.outcome.ended) + len(self.outcome.failed) == len(self._job.roster.sites)
        lost = over and not self.outcome.ended
        if lost or (over and self._job.exit_when_done and not self._requests):
            if self.outcome.failed:
                self._fault = self._fault or next(iter(self.outcome.failed.values()))
            asyncio.get_running_loop().create_task(self._say_farewell())

    async def _say_farewell(self) -> None:
        """Leave the devices a moment to acknowledge what they got last."""
        deadline_s = time.monotonic() + self._limits.farewell_s
        while time.monotonic() < deadline_s and not all(c.idle for c in self._devices.values()):
            await asyncio.sleep(0.05)
        self._stop.set()
