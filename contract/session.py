"""What may be said when, in one conversation between a device and a server; without sockets, clocks or files.

Bytes are `contract.codec`'s part. The program around a session feeds received frames in, writes out what
`frames_to_send` returns, makes received messages durable and says so with `stored`, and calls `tick` now and then.

The file is long because the table and the machine that obeys it are one thing.

Everything about order is in `TRANSITIONS`, the only place that knows which message a role may send or receive in a
state and where that leads. What is not in the table is an error: ours (LocalProtocolError: nothing was sent, the
state is as before) or theirs (RemoteProtocolError: the state is BROKEN, the connection must be closed).

    START -hello-> GREETED -challenge-> CHALLENGED -proof-> PROVEN -welcome-> OPEN -bye-> CLOSED
    START -enrol-> GREETED -challenge-> CHALLENGED -vouch-> PROVEN -enrolled-> CLOSED
    (the server may `refuse` in any of them; who says bye is LEAVING until the peer says it too)

Numbers. Every message of the work (ask, features, scores, gradient, checkpoints) has the next number of its direction.
The frames of a message that travels in chunks all bear its number, so numbers do not depend on the size of frames and
a device may write them into its spool. Other messages bear 0.

    device -> server   numbers go on over connections: `Welcome.last_seq` says what is stored, the device goes on from
                       there, sending again what it holds.
    server -> device   numbers begin at `Hello.last_seq` + 1 on every connection; an ask is repeated by its id.

Acknowledgements. Every frame outside the handshake bears the highest number that `stored` was called for. Where none is
to be sent, a heartbeat carries it: at once for features, which the sender keeps on its disk until then; after
`ack_wait_s` or half of the credit for what can be made again, as the answer that follows will mostly carry it. A number
received again is dropped and acknowledged again; a number left out is an error, as the connection keeps order.

Credit. Neither side has more than `Welcome.credit` messages unacknowledged: a hard cap on what a peer must hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from contract import codec
from contract.codec import Assembler, Payload
from contract.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from contract.messages import Chunk, Heartbeat, Hello, Message, Welcome


class Role(str, Enum):
    """Which side of the conversation a session is."""

    DEVICE = "device"
    SERVER = "server"


class State(str, Enum):
    """How far the conversation is."""

    START = "start"
    GREETED = "greeted"
    CHALLENGED = "challenged"
    PROVEN = "proven"
    OPEN = "open"
    LEAVING = "leaving"
    CLOSED = "closed"
    BROKEN = "broken"


class Direction(str, Enum):
    """Which way a message goes, seen from this side."""

    SEND = "send"
    RECEIVE = "receive"


# --- the table ---------------------------------------------------------------------------------------------------

_OTHER = {Role.DEVICE: Role.SERVER, Role.SERVER: Role.DEVICE}
_HANDSHAKE = (
    (Role.DEVICE, State.START, "hello", State.GREETED),
    (Role.SERVER, State.GREETED, "challenge", State.CHALLENGED),
    (Role.DEVICE, State.CHALLENGED, "proof", State.PROVEN),
    (Role.SERVER, State.PROVEN, "welcome", State.OPEN),
    # A conversation of its own, about a new key; that a vouch follows no hello is the server's rule.
    (Role.DEVICE, State.START, "enrol", State.GREETED),
    (Role.DEVICE, State.CHALLENGED, "vouch", State.PROVEN),
    (Role.SERVER, State.PROVEN, "enrolled", State.CLOSED),
)
_WORK = {
    Role.DEVICE: (
        *("features", "gradient", "checkpoints", "settled", "choice", "activations", "update"),
        *("patch_features", "prototypes", "fetch", "verdict", "chunk", "heartbeat"),
    ),
    Role.SERVER: ("ask", "scores", "offer", "piece", "chunk", "heartbeat"),
}
_NUMBERED = frozenset(kind for kinds in _WORK.values() for kind in kinds) - {"heartbeat"}
_CARRYING_ACK = _NUMBERED | {"heartbeat", "bye"}
_DURABLE = frozenset(("features",))  # others are replayable: made again by id


def _transitions() -> Mapping[tuple[Role, State, Direction, str], State]:
    table: dict[tuple[Role, State, Direction, str], State] = {}
    for sender, state, kind, following in _HANDSHAKE:
        table[sender, state, Direction.SEND, kind] = following
        table[_OTHER[sender], state, Direction.RECEIVE, kind] = following
    for sender, kinds in _WORK.items():
        for kind in kinds:
            table[sender, State.OPEN, Direction.SEND, kind] = State.OPEN
            table[_OTHER[sender], State.OPEN, Direction.RECEIVE, kind] = State.OPEN
            table[_OTHER[sender], State.LEAVING, Direction.RECEIVE, kind] = State.LEAVING  # crossed our bye
    for role in Role:
        table[role, State.OPEN, Direction.SEND, "bye"] = State.LEAVING
        table[role, State.OPEN, Direction.RECEIVE, "bye"] = State.CLOSED
        table[role, State.LEAVING, Direction.RECEIVE, "bye"] = State.CLOSED
    for state in (State.START, State.GREETED, State.CHALLENGED, State.PROVEN, State.OPEN):
        table[Role.SERVER, state, Direction.SEND, "refuse"] = State.CLOSED
        table[Role.DEVICE, state, Direction.RECEIVE, "refuse"] = State.CLOSED
    table[Role.DEVICE, State.LEAVING, Direction.RECEIVE, "refuse"] = State.CLOSED
    table[Role.SERVER, State.BROKEN, Direction.SEND, "refuse"] = State.CLOSED  # tell the device why, then close
    return table


# (role, state, direction, message type) -> the state it leads to
TRANSITIONS = _transitions()

_CURE_LOCAL = "report this text: the program broke its own protocol"
_CURE_REMOTE = "update both programs to one version; if it stays, the peer is faulty or hostile"


# --- values ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SessionLimits:
    """What a session takes from its peer, and what it hands out.

    `silence_s` without any frame means that the peer is gone; an acknowledgement of what can be made again waits for
    `ack_wait_s`, then goes with the next `tick`; `burst_bytes` of frames or a few more are made at once.
    """

    frame_bytes: int = codec.LIMITS.frame_bytes
    object_bytes: int = codec.LIMITS.object_bytes
    silence_s: float = 45.0
    ack_wait_s: float = 0.1
    burst_bytes: int = 2 << 20


@dataclass(frozen=True)
class Received:
    """A message for this side, and the bytes that it came in, or was put together from.

    `seq` is to be given to `stored`, or 0 where nothing is to be acknowledged.
    """

    seq: int
    message: Message
    frame: bytes | memoryview = field(default=b"", compare=False, repr=False)


@dataclass(frozen=True)
class Acknowledged:
    """The peer has stored every message up to this number: they need not be kept for sending again."""

    seq: int


Event = Received | Acknowledged


@dataclass
class _Outgoing:
    """Our numbers: the next to give, the last written out, the last that the peer has stored."""

    next: int = 1
    sent: int = 0
    acknowledged: int = 0


@dataclass
class _Incoming:
    """The peer's numbers: the last received, the last durable one among them, the last stored here, the last that we
    told it is stored."""

    received: int = 0
    stored: int = 0
    announced: int = 0
    durable: int = 0


@dataclass(frozen=True)
class _Queued:
    """A message on its way out: its frames are made one after the other, so that a large one is never there twice."""

    seq: int
    carries_ack: bool
    parts: Iterator[Payload]


# --- the machine -------------------------------------------------------------------------------------------------


class Session:
    """One side of one connection; see the top of this file for the rules that it keeps.

    A device that resumes gives `received_seq`, which its Hello must repeat, and `next_seq`, the first number that it
    never used in that session, so that a server that claims more is found out. A server learns its numbers from the
    handshake.
    """

    def __init__(self, role: Role, limits: SessionLimits, *, received_seq: int = 0, next_seq: int = 1) -> None:
        self.role = Role(role)
        self.state = State.START
        self.status = Heartbeat(step=0, busy=False, waiting_for="", since_s=0.0)  # what our heartbeats say
        self._limits = limits
        self._resume_received, self._resume_next = received_seq, next_seq
        self._outgoing, self._incoming = _Outgoing(), _Incoming()
        self._ack_due_s: float | None = None  # when a heartbeat is sent to acknowledge; None: nothing to acknowledge
        self._queue: deque[_Queued] = deque()
        self._assembler = Assembler(codec.Limits(object_bytes=limits.object_bytes))
        self._hello: Hello | None = None
        self._welcome: Welcome | None = None
        self._peer_frame_bytes = limits.frame_bytes
        self._now_s = 0.0
        self._heard_s: float | None = None
        self._spoke_s = 0.0

    # Sending.

    def send(self, message: Message | Payload, seq: int | None = None) -> int:
        """Queue a message and return its number (0: not numbered); `seq`, if given, must be the number that is next.

        A payload is a message of the work that was prepared before; its arrays must not change until it is written out.
        Raises: LocalProtocolError if it is not legal now, lacks credit, or cannot be encoded; nothing has changed then.
        """
        kind = message.kind if isinstance(message, Payload) else message.TYPE
        following = self._following(Direction.SEND, kind)
        if kind == Chunk.TYPE:
            raise self._fault(Direction.SEND, "a whole message, which is cut here if it is large", "a chunk")
        payload = message if isinstance(message, Payload) else codec.prepare(message)
        number = self._number(kind, seq)
        if not isinstance(message, Payload):
            self._agree(Direction.SEND, message)
        if number:
            self._outgoing.next += 1
        self._enqueue(number, payload)
        self.state = following
        return number

    def frames_to_send(self) -> list[bytes]:
        """Frames to write out now, in order; each is given out once. Call again until there are none."""
        if self._ack_is_due() and not any(queued.carries_ack for queued in self._queue):
            self._enqueue(0, codec.prepare(self.status))
        frames: list[bytes] = []
        left_bytes = self._limits.burst_bytes
        while self._queue and left_bytes > 0:
            queued = self._queue[0]
            payload = next(queued.parts, None)
            if payload is None:
                self._queue.popleft()
                continue
            ack = 0
            if queued.carries_ack:
                ack = self._incoming.announced = self._incoming.stored
                self._ack_due_s = None
            self._outgoing.sent = max(self._outgoing.sent, queued.seq)
            frames.append(payload.frame(queued.seq, ack))
            left_bytes -= len(frames[-1])
        if frames:
            self._spoke_s = self._now_s
        return frames

    @property
    def has_frames(self) -> bool:
        """Whether `frames_to_send` would give any."""
        return bool(self._queue) or self._ack_is_due()

    @property
    def is_amid_sending(self) -> bool:
        """Whether frames that `frames_to_send` gave are to be followed by others of the same message."""
        return bool(self._queue)

    def _ack_is_due(self) -> bool:
        return self._ack_due_s is not None and self._now_s >= self._ack_due_s and self.state is State.OPEN

    @property
    def credit(self) -> int:
        """How many numbered messages `send` still takes before acknowledgements arrive; 0 while it takes none."""
        if self._welcome is None or self.state is not State.OPEN:
            return 0
        return self._welcome.credit - (self._outgoing.next - 1 - self._outgoing.acknowledged)

    # Receiving.

    def receive(self, frame: bytes, now_s: float) -> list[Event]:
        """What a received frame means for this side; `now_s` is a clock that never goes back.

        Raises: RemoteProtocolError if the peer broke a rule; then the connection must be closed.
        """
        self._now_s = self._heard_s = now_s
        try:
            return self._receive(frame)
        except RemoteProtocolError:
            self.state = State.BROKEN
            self._queue.clear()
            raise

    def stored(self, seq: int) -> None:
        """All messages up to `seq` are durable here, or applied where they need not be: they may be acknowledged.

        Raises: LocalProtocolError if `seq` was not received.
        """
        if seq > self._incoming.received:
            raise self._fault(Direction.SEND, f"to store up to {self._incoming.received}", f"{seq}")
        incoming = self._incoming
        if seq > incoming.stored:
            at_once = incoming.durable > incoming.stored or self.peer_needs_credit
            incoming.stored = seq
            self._owe_ack(0.0 if at_once else self._limits.ack_wait_s)

    @property
    def peer_needs_credit(self) -> bool:
        """Whether half of the credit is used up: what was received should be stored and acknowledged soon."""
        credit = self._welcome.credit if self._welcome else 0
        return 2 * (self._incoming.received - self._incoming.announced) >= credit

    @property
    def is_amid_message(self) -> bool:
        """Whether some chunks of a message have come and others have not."""
        return self._assembler.unfinished

    @property
    def incoming_bytes(self) -> int:
        """The size of the message of which some chunks have come; 0 between messages."""
        return self._assembler.whole_bytes

    def pending_ack(self) -> bool:
        """Whether an acknowledgement waits for a frame to carry it."""
        return self._ack_due_s is not None

    def _owe_ack(self, wait_s: float) -> None:
        due_s = self._now_s + wait_s
        self._ack_due_s = due_s if self._ack_due_s is None else min(due_s, self._ack_due_s)

    # Time.

    def tick(self, now_s: float) -> None:
        """Queue a heartbeat if one is due. Feed frames that already arrived first, or a peer may seem silent.

        Raises: ProtocolError if the peer has been silent for too long; the connection must be closed.
        """
        self._now_s = now_s
        if self.state in (State.CLOSED, State.BROKEN):
            return
        if self._heard_s is None:
            self._heard_s = now_s
        if now_s - self._heard_s > self._limits.silence_s:
            raise ProtocolError(
                f"{_OTHER[self.role].value}: expected a sign of life within {self._limits.silence_s:g} s, found none",
                "check the network and the peer, then connect again: nothing acknowledged is lost",
            )
        due = self._welcome is not None and now_s - self._spoke_s >= self._welcome.heartbeat_s
        if due and self.state is State.OPEN and not self._queue:
            self._enqueue(0, codec.prepare(self.status))

    # Private: both directions.

    def _following(self, direction: Direction, kind: str) -> State:
        following = TRANSITIONS.get((self.role, self.state, direction, kind))
        if following is None:
            legal = [key[3] for key in TRANSITIONS if key[:3] == (self.role, self.state, direction)]
            raise self._fault(direction, f"to {direction.value} {' or '.join(legal) or 'nothing'}", kind)
        return following

    def _agree(self, direction: Direction, message: Message) -> None:
        """Take over what a hello or welcome settles: each says what its sender has received, and what it can take."""
        if not isinstance(message, (Hello, Welcome)):
            return
        if direction is Direction.SEND and message.frame_bytes != self._limits.frame_bytes:
            raise self._fault(direction, f"frame_bytes {self._limits.frame_bytes}", f"{message.frame_bytes}")
        if isinstance(message, Hello):
            if direction is Direction.SEND and message.last_seq != self._resume_received:
                raise self._fault(direction, f"last_seq {self._resume_received}", f"{message.last_seq}")
            self._hello = message
        else:
            self._check_terms(direction, message)
            self._welcome = message
        if direction is Direction.SEND:
            self._incoming = _Incoming(message.last_seq, message.last_seq, message.last_seq)
        else:
            self._outgoing = _Outgoing(message.last_seq + 1, message.last_seq, message.last_seq)
            self._peer_frame_bytes = message.frame_bytes

    def _check_terms(self, direction: Direction, welcome: Welcome) -> None:
        resumed = self._hello is not None and self._hello.session == welcome.session
        given_out = self._resume_next - 1
        if not resumed and welcome.last_seq:
            raise self._fault(direction, "last_seq 0, as the session is new", f"{welcome.last_seq}")
        if resumed and self.role is Role.DEVICE and welcome.last_seq > given_out:
            raise self._fault(direction, f"last_seq of at most {given_out}, the last given out", f"{welcome.last_seq}")
        if 2 * welcome.heartbeat_s > self._limits.silence_s:
            most = f"heartbeat_s of at most half of silence_s ({self._limits.silence_s:g})"
            raise self._fault(direction, most, f"{welcome.heartbeat_s:g}")

    def _fault(self, direction: Direction, expected: str, found: str) -> LocalProtocolError | RemoteProtocolError:
        cause = f"{self.role.value} in state {self.state.value}: expected {expected}, found {found}"
        if direction is Direction.SEND:
            return LocalProtocolError(cause, _CURE_LOCAL)
        return RemoteProtocolError(cause, _CURE_REMOTE)

    # Private: sending.

    def _number(self, kind: str, seq: int | None) -> int:
        expected = self._outgoing.next if kind in _NUMBERED else 0
        if seq is not None and seq != expected:
            raise self._fault(Direction.SEND, f"{kind} with number {expected}", f"{seq}")
        if expected and self.credit < 1:
            raise self._fault(Direction.SEND, "an acknowledgement before the next message", kind)
        return expected

    def _enqueue(self, seq: int, payload: Payload) -> None:
        parts: Iterator[Payload] = iter((payload,))
        if payload.size_bytes > self._peer_frame_bytes:
            parts = map(codec.prepare, codec.split(payload.parts(seq=0, ack=0), self._peer_frame_bytes))
        self._queue.append(_Queued(seq, payload.kind in _CARRYING_ACK, parts))

    # Private: receiving.

    def _receive(self, frame: bytes) -> list[Event]:
        envelope = codec.decode(frame, self._limits.frame_bytes)
        message = envelope.message
        following = self._following(Direction.RECEIVE, message.TYPE)
        events: list[Event] = []
        if message.TYPE in _CARRYING_ACK:
            events += self._take_ack(envelope.ack)
        elif envelope.ack:
            raise self._fault(Direction.RECEIVE, f"{message.TYPE} with acknowledgement 0", f"{envelope.ack}")
        if message.TYPE in _NUMBERED:
            events += self._take_numbered(envelope.seq, message, frame)
        elif envelope.seq:
            raise self._fault(Direction.RECEIVE, f"{message.TYPE} with number 0", f"{envelope.seq}")
        else:
            self._agree(Direction.RECEIVE, message)
            events.append(Received(0, message, frame))
            if isinstance(message, Welcome) and message.last_seq:
                events.append(Acknowledged(message.last_seq))
        self.state = following
        if following is State.CLOSED:
            self._queue.clear()
        return events

    def _take_ack(self, ack: int) -> list[Event]:
        outgoing = self._outgoing
        if not outgoing.acknowledged <= ack <= outgoing.sent:
            between = f"an acknowledgement of {outgoing.acknowledged} to {outgoing.sent}"
            raise self._fault(Direction.RECEIVE, between, f"{ack}")
        if ack == outgoing.acknowledged:
            return []
        outgoing.acknowledged = ack
        return [Acknowledged(ack)]

    def _take_numbered(self, seq: int, message: Message, frame: bytes | memoryview) -> list[Event]:
        incoming = self._incoming
        if self.state is State.LEAVING:
            return []  # not acknowledged, so the peer keeps it for the next connection
        if 0 < seq <= incoming.received:
            self._owe_ack(0.0)
            return []
        if seq != incoming.received + 1:
            raise self._fault(Direction.RECEIVE, f"{message.TYPE} with number {incoming.received + 1}", f"{seq}")
        if self._welcome is not None and seq > incoming.announced + self._welcome.credit:
            allowed = f"at most {self._welcome.credit} messages beyond acknowledgement {incoming.announced}"
            raise self._fault(Direction.RECEIVE, allowed, f"number {seq}")
        if isinstance(message, Chunk):
            whole = self._assembler.add(message)
            if whole is None:
                return []
            message, frame = self._open_object(whole), whole
        elif self._assembler.unfinished:
            raise self._fault(Direction.RECEIVE, f"the other chunks of message {seq}", message.TYPE)
        incoming.received = seq
        if message.TYPE in _DURABLE:
            incoming.durable = seq
        return [Received(seq, message, frame)]

    def _open_object(self, whole: memoryview) -> Message:
        inner = codec.decode(whole, self._limits.object_bytes)
        self._following(Direction.RECEIVE, inner.message.TYPE)
        if inner.message.TYPE not in _NUMBERED - {"chunk"} or inner.seq or inner.ack:
            found = f"{inner.message.TYPE} with number {inner.seq}"
            raise self._fault(Direction.RECEIVE, "chunks of a message of the work, without numbers", found)
        return inner.message
