"""A device's and a server's session joined in memory, so that one line of a test runs both state machines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from contract.messages import Challenge, Hello, Message, Proof, Welcome
from contract.session import Event, Received, Role, Session, SessionLimits, State
from tests.golden.samples import MESSAGES

LIMITS = SessionLimits()
HELLO = dataclasses.replace(MESSAGES["hello"], session=None, last_seq=0)
WELCOME = dataclasses.replace(MESSAGES["welcome"], last_seq=0)
assert isinstance(HELLO, Hello) and isinstance(WELCOME, Welcome)

# What leads a fresh pair from START to OPEN, in order.
HANDSHAKE: tuple[tuple[Role, Message], ...] = (
    (Role.DEVICE, HELLO),
    (Role.SERVER, Challenge(bytes(32))),
    (Role.DEVICE, Proof(bytes(64))),
    (Role.SERVER, WELCOME),
)


@dataclasses.dataclass
class Pair:
    """Two sessions and the frames between them; time stands still unless a test moves `now_s`."""

    device: Session
    server: Session
    now_s: float = 0.0
    frames: list[bytes] = dataclasses.field(default_factory=list)  # every frame that crossed, in order

    def side(self, role: Role) -> Session:
        """The session of a role."""
        return self.device if role is Role.DEVICE else self.server

    def deliver(self, sender: Role, change: Callable[[bytes], bytes] = lambda frame: frame) -> list[Event]:
        """Carry all frames of one side to the other, each through `change`, and return what they mean there."""
        receiver = self.server if sender is Role.DEVICE else self.device
        events: list[Event] = []
        while frames := self.side(sender).frames_to_send():
            for frame in frames:
                self.frames.append(frame)
                events += receiver.receive(change(frame), self.now_s)
        return events

    def say(self, sender: Role, message: Message) -> list[Event]:
        """Send one message and deliver it."""
        self.side(sender).send(message)
        return self.deliver(sender)


def fresh(limits: SessionLimits = LIMITS) -> Pair:
    """A pair that has not spoken yet."""
    return Pair(Session(Role.DEVICE, limits), Session(Role.SERVER, limits))


def pair(
    state: State = State.OPEN,
    *,
    hello: Hello = HELLO,
    welcome: Welcome = WELCOME,
    device_next_seq: int = 1,
) -> Pair:
    """A pair that went through the handshake until both are in `state`; each side's frame limit is in its greeting."""
    joined = Pair(
        Session(
            Role.DEVICE,
            dataclasses.replace(LIMITS, frame_bytes=hello.frame_bytes),
            received_seq=hello.last_seq,
            next_seq=device_next_seq,
        ),
        Session(Role.SERVER, dataclasses.replace(LIMITS, frame_bytes=welcome.frame_bytes)),
    )
    for sender, message in HANDSHAKE:
        if joined.device.state is state:
            break
        greeting = {"hello": hello, "welcome": welcome}.get(message.TYPE, message)
        events = joined.say(sender, greeting)
        assert events[0] == Received(0, greeting)
    assert joined.device.state is joined.server.state is state
    return joined
