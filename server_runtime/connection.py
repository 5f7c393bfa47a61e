"""One device's connection: feeds the contract's session with frames, flushes what it gives, forwards what it means.

Who may join is decided in `admission`, whether features make sense in `acceptance`, everything else by the strategies.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from contract import codec
from contract.codec import Payload
from contract.errors import ProtocolError, RefusedError, RemoteProtocolError
from contract.messages import (
    Activations,
    Bye,
    Checkpoints,
    Choice,
    Enrol,
    Features,
    Fetch,
    Gradient,
    Heartbeat,
    Hello,
    Message,
    PatchFeatures,
    Piece,
    Proof,
    Prototypes,
    Refuse,
    Scores,
    Settled,
    Update,
    Verdict,
    Vouch,
)
from contract.session import Acknowledged, Event, Received, Role, Session, SessionLimits, State

from .acceptance import Expected, check_activations, check_features, is_stale
from .admission import Admission, Joined
from .store import Store

T = TypeVar("T")
# A device makes them again by ask id.
REPLAYABLE = (Gradient, Checkpoints, Settled, Choice, Activations, Update, PatchFeatures, Prototypes)
_POLICY, _REPLACED = 1008, 4000  # close codes: RFC 6455 7.4.1, and one of ours


@dataclass(frozen=True)
class ConnectionLimits:
    """How long a device may take, in seconds, until it is let in, and to close after a goodbye; and how long receipts
    of replayable messages are gathered before they are written."""

    handshake_s: float = 15.0
    leaving_s: float = 5.0
    receipts_s: float = 0.05


class Socket(Protocol):
    """A WebSocket, as far as a connection uses it."""

    @property
    def transport(self) -> asyncio.Transport: ...

    def __aiter__(self) -> AsyncIterator[str | bytes]: ...

    async def send(self, message: bytes) -> None: ...

    async def close(self, code: int, reason: str) -> None: ...


class Hub(Protocol):
    """The server, as a connection sees it."""

    async def join(self, connection: Connection) -> None:
        """The device is in; an older connection of it is to be closed."""
        ...

    async def forward(self, connection: Connection, received: Received, complete: bool = False) -> None:
        """A message was received for good; `complete`: all features of its ask are stored."""
        ...

    def scored(self, device: str, ask: str, batch: int) -> None:
        """Scores were written out to the device."""
        ...

    async def piece(self, connection: Connection, fetch: Fetch) -> Piece:
        """Bytes of a package that is offered to this device. Raises: RefusedError."""
        ...

    async def judge(self, connection: Connection, verdict: Verdict) -> None:
        """A device's verdict on a package, to be kept."""
        ...

    async def in_store(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run a call that waits for the disk, apart from the sockets and one at a time."""
        ...


class Connection:
    """One device, from its first frame to its last."""

    def __init__(self, socket: Socket, admission: Admission, expected: Expected, store: Store, hub: Hub) -> None:
        self._socket = socket
        self._admission = admission
        self._expected = expected
        self._store = store
        self._hub = hub
        self._session = Session(Role.SERVER, SessionLimits())
        self._outbox: deque[tuple[Payload, Scores | None]] = deque()  # waits for credit
        self._scores: dict[int, Scores] = {}  # by number: written out, not acknowledged yet
        self._wake = asyncio.Event()
        self._applied = 0  # number of the last replayable message that was forwarded
        self._receipts = asyncio.Event()
        self._receipts_timer: asyncio.TimerHandle | None = None
        self._writing = asyncio.Lock()  # frames of one message must not be mixed with others
        self._step = -1
        self._fault: BaseException | None = None  # the first that ended this connection
        self._limits = ConnectionLimits()
        self._since_s = time.monotonic()  # when it was opened, or began to leave
        self.opened_s = self.heard_s = self._since_s
        self.received_bytes, self.sent_bytes = 0, 0
        self.heartbeat: Heartbeat | None = None  # the newest that its device sent

    # -- what the server does with it

    @property
    def joined(self) -> Joined | None:
        """Who it is, once it was let in."""
        return self._admission.joined

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way to the device."""
        return not self._outbox and not self._scores and self._session.state is not State.LEAVING

    def post(self, frame: bytes | memoryview) -> None:
        """Send a message of the torch process as soon as there is credit."""
        payload = codec.reopen(frame)
        scores = codec.decode(frame, codec.LIMITS.object_bytes).message if payload.kind == Scores.TYPE else None
        self._outbox.append((payload, scores if isinstance(scores, Scores) else None))
        self._wake.set()

    def say(self, message: Message) -> None:
        """Send a message of this process as soon as there is credit."""
        self._outbox.append((codec.prepare(message), None))
        self._wake.set()

    def set_status(self, status: Heartbeat) -> None:
        """What the next heartbeats say."""
        self._session.status = status

    def tick(self) -> None:
        """Queue a heartbeat when one is due, and hang up on a device that has been silent for too long."""
        now_s = time.monotonic()
        try:
            self._session.tick(now_s)
        except ProtocolError:
            self._socket.transport.abort()
        since_s = now_s - self._since_s
        late = self.joined is None and since_s > self._limits.handshake_s
        if late or (self._session.state is State.LEAVING and since_s > self._limits.leaving_s):
            self._socket.transport.abort()
        self._wake.set()

    @property
    def name(self) -> str:
        """Its device's name, once it was let in."""
        return self._known.device.name

    def standing(self) -> RefusedError | None:
        """Why its device may not stay, by the roster as it is now; None where it may. Reads files."""
        return self._admission.standing()

    async def dismiss(self, error: RefusedError) -> None:
        """Its device may not stay: say so, and close."""
        if self._session.state is State.OPEN:
            await self._refuse(error.code, error, error.retry_after_s)

    async def replace(self) -> None:
        """A newer session of the same device takes over."""
        await self._socket.close(_REPLACED, "replaced by a newer session")

    # -- its life

    async def run(self) -> None:
        """Serve until either side closes.

        Raises:
            LocalProtocolError: what was to be sent broke the protocol; besides, what the store raises, and the socket
                when it closes.
        """
        tasks = [asyncio.create_task(work) for work in (self._flush_whenever_woken(), self._write_receipts())]
        for task in tasks:
            task.add_done_callback(self._hang_up_unless_cancelled)
        try:
            async for frame in self._socket:
                self.heard_s, self.received_bytes = time.monotonic(), self.received_bytes + len(frame)
                await self._take(frame)
                if self._session.state is State.CLOSED:
                    break
        except Exception as error:  # of a socket that we hung up on it says only that, the first fault says why
            self._fault = self._fault or error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._fault is not None:
            raise self._fault

    def _hang_up_unless_cancelled(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():  # it failed, and the reader would wait for a device that hears nothing
            self._fault = self._fault or task.exception()
            self._socket.transport.abort()

    async def _take(self, frame: str | bytes) -> None:
        try:
            if isinstance(frame, str):
                raise RemoteProtocolError("expected a binary message, found text", "update the device's software")
            for event in self._session.receive(frame, time.monotonic()):
                await self._follow(event)
        except RefusedError as error:
            await self._refuse(error.code, error, error.retry_after_s)
        except RemoteProtocolError as error:
            await self._refuse("protocol", error, None)
        if self._outbox or self._session.has_frames:
            self._wake.set()

    async def _follow(self, event: Event) -> None:
        if isinstance(event, Acknowledged):
            for number in [number for number in self._scores if number <= event.seq]:
                scores = self._scores.pop(number)
                await self._hub.in_store(self._store.answer, self._known.device.name, scores.ask, scores.batch)
        elif isinstance(event, Received):
            await self._receive(event)

    async def _receive(self, received: Received) -> None:
        message = received.message
        if isinstance(message, Hello | Proof | Enrol | Vouch):
            self._session.send(await self._hub.in_store(self._admission.answer, message))
            if self._session.state is State.CLOSED:  # enrolled: there is nothing more to say
                await self._drain()
            if self._admission.joined is not None:
                self._wake.set()
                await self._hub.join(self)
        elif isinstance(message, Fetch | Verdict) or (self._is_visit and not isinstance(message, Heartbeat | Bye)):
            await self._serve_visit(received)
        elif isinstance(message, Features):
            await self._keep(received, message)
        elif isinstance(message, REPLAYABLE):
            if isinstance(message, Activations):
                check_activations(message, self._expected, self._known.class_count, self._known.purpose)
            await self._hub.forward(self, received)  # at once; what comes twice after a crash is counted once there
            self._applied = received.seq
            self._note_soon()
        elif isinstance(message, Heartbeat):
            self.heartbeat = message
            if message.step != self._step and not self._is_visit:
                self._step = message.step
                await self._hub.forward(self, received)

    @property
    def _is_visit(self) -> bool:
        return self.joined is not None and self.joined.purpose == "update"

    async def _serve_visit(self, received: Received) -> None:
        """A device that came for a package: it fetches it, or says what became of it, and nothing else."""
        message = received.message
        if not self._is_visit or not isinstance(message, Fetch | Verdict):
            raise RemoteProtocolError(
                f"expected {'fetch or verdict' if self._is_visit else 'work'}, found {message.TYPE}",
                "update the device's software",
            )
        refused = await self._hub.in_store(self.standing)
        if refused is not None:
            raise refused
        if isinstance(message, Fetch):
            self.say(await self._hub.piece(self, message))
        else:
            await self._hub.judge(self, message)
        self._session.stored(received.seq)

    def _note_soon(self) -> None:
        """Replayable messages are noted as received several at once, but before the device runs out of credit."""
        if self._session.peer_needs_credit:
            self._receipts.set()
        elif self._receipts_timer is None:
            self._receipts_timer = asyncio.get_running_loop().call_later(self._limits.receipts_s, self._receipts.set)

    async def _write_receipts(self) -> None:
        """Note them, then acknowledge."""
        while True:
            await self._receipts.wait()
            self._receipts.clear()
            self._receipts_timer = None
            seq = self._applied
            await self._hub.in_store(self._store.note_received, self._known.device.name, self._known.session, seq)
            self._session.stored(seq)
            if self._session.has_frames:
                self._wake.set()

    async def _keep(self, received: Received, features: Features) -> None:
        """Durable first, acknowledged after."""
        known, seq = self._known, received.seq
        name, session = known.device.name, known.session
        if is_stale(features, known.run):
            await self._hub.in_store(self._store.note_received, name, session, seq)
            self._session.stored(seq)
            return
        check_features(features, self._expected, known.class_count, known.purpose)
        await self._hub.in_store(self._store.keep, known.device.site, name, session, seq, features)
        self._session.stored(seq)
        self._wake.set()
        await self._hub.forward(self, received, await self._hub.in_store(self._store.complete, name, features.ask))

    async def _refuse(self, code: str, error: ProtocolError, retry_after_s: float | None) -> None:
        self._session.send(Refuse(code, error.cause[:1000], error.cure[:1000], retry_after_s))
        await self._drain()
        await self._socket.close(_POLICY, code)

    @property
    def _known(self) -> Joined:
        assert self._admission.joined is not None  # the session lets no message of the work through before
        return self._admission.joined

    # -- writing

    async def _flush_whenever_woken(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox and self._session.state is State.OPEN and self._may_send(self._outbox[0][0]):
                payload, scores = self._outbox.popleft()
                number = self._session.send(payload)
                if payload.kind == Bye.TYPE:
                    self._since_s = time.monotonic()
                await self._drain()
                if scores is not None:
                    self._scores[number] = scores
                    self._hub.scored(self._known.device.name, scores.ask, scores.batch)
            await self._drain()

    def _may_send(self, payload: Payload) -> bool:
        return payload.kind == Bye.TYPE or self._session.credit > 0

    async def _drain(self) -> None:
        async with self._writing:
            while frames := self._session.frames_to_send():
                for frame in frames:
                    await self._socket.send(frame)
                    self.sent_bytes += len(frame)
