"""A server of a few lines on contract.session, without sockets: what the device's conduct is tested against."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from contract.messages import Ask, Bye, Challenge, Features, Gradient, Hello, Message, Proof, Refuse, Scores, Welcome
from contract.session import Acknowledged, Role, Session, SessionLimits
from contract.signature import PublicKey, proof_payload, verify_raw
from edge_runtime.conduct import Conduct
from edge_runtime.delivery import Delivery


@dataclass
class MemoryServer:
    """Stores what comes, acknowledges it, and says what its `script` tells it to when a message arrived."""

    public_key: PublicKey
    welcome: Welcome
    stored: dict[tuple[str, int], Features] = field(default_factory=dict)  # by ask and batch: each once (WI-04)
    gradients: list[Gradient] = field(default_factory=list)
    hello: Hello | None = None
    last_seq: dict[str, int] = field(default_factory=dict)  # by session
    copies: int = 0  # messages that came again under another number
    wire: list[bytes] = field(default_factory=list)
    channel_binding: bytes = b""
    refusal: Refuse | None = None  # what a hello is answered with instead
    on_open: Callable[[MemoryServer], None] = lambda server: None
    on_message: Callable[[MemoryServer, Message], None] = lambda server, message: None
    session: Session = field(default_factory=lambda: Session(Role.SERVER, SessionLimits()))

    def connect(self) -> None:
        """A new connection: numbers come from the handshake."""
        self.session = Session(Role.SERVER, SessionLimits())

    def take(self, frame: bytes) -> None:
        self.wire.append(frame)
        for event in self.session.receive(frame, 0.0):
            if isinstance(event, Acknowledged):
                continue
            self._answer(event.message)
            if event.seq:
                self.last_seq[self.welcome.session] = event.seq
                self.session.stored(event.seq)

    def _answer(self, message: Message) -> None:
        match message:
            case Hello():
                self.hello = message
                self.session.send(self.refusal or Challenge(bytes(32)))
            case Proof():
                assert self.hello is not None
                payload = proof_payload(bytes(32), self.channel_binding, self.hello.device, self.hello.session)
                verify_raw(self.public_key, payload, message.signature)
                resumed = self.hello.session == self.welcome.session
                last_seq = self.last_seq.get(self.welcome.session, 0) if resumed else 0
                self.session.send(dataclasses.replace(self.welcome, last_seq=last_seq))
                self.on_open(self)
            case Features():
                self.copies += (message.ask, message.batch) in self.stored
                self.stored.setdefault((message.ask, message.batch), message)
            case Gradient():
                self.gradients.append(message)
            case _:
                pass
        self.on_message(self, message)

    def ask_features(self, kappa: float = 1.0) -> None:
        self.session.send(Ask("run-1.features", "collect_features", {"kappa": kappa, "seed": 7}, 60.0))

    def say_bye_when_complete(self, message: Message) -> None:
        if isinstance(message, Features) and self.images >= message.total:
            self.session.send(Bye("collected", True))

    def score(self, message: Message, width: int) -> None:
        """Answer an inference batch with scores that name its samples."""
        if isinstance(message, Features) and message.split == "infer":
            values = np.arange(len(message.codes) * width, dtype=np.float32).reshape(-1, width)
            self.session.send(Scores(message.ask, message.batch, values))

    @property
    def images(self) -> int:
        return sum(len(batch.codes) for batch in self.stored.values())


def exchange(
    conduct: Conduct, delivery: Delivery, server: MemoryServer, until: Callable[[], bool], limit_s: float = 20.0
) -> None:
    """Carry frames both ways until the condition holds; the worker's thread wakes us as it would the socket's."""
    deadline_s = time.monotonic() + limit_s
    while not until():
        assert time.monotonic() < deadline_s, "the conversation does not come to its end"
        if delivery.failure is not None:
            raise delivery.failure
        while not delivery.answered.empty():
            conduct.work_done(delivery.answered.get())
        conduct.tick(0.0, delivery.status(0.0))
        moved = False
        for frame in conduct.frames_to_send():
            moved = True
            server.take(frame)
        for frame in server.session.frames_to_send():
            moved = True
            for order in conduct.receive(frame, 0.0):
                assert conduct.welcome is not None
                delivery.take(order, conduct.welcome)
        if not moved:
            time.sleep(0.001)


def connect(conduct: Conduct, server: MemoryServer) -> None:
    """A fresh connection between the two."""
    server.connect()
    conduct.connect(b"")
