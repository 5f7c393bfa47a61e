"""The device's side of the conversation, without sockets: what to say next, what to keep, what to hand to the worker.

Pure but for the spool it is given. Legal order is contract.session's rule, the terms are `terms`'s; `client` feeds
frames in, writes frames out, and forwards what `receive` returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from contract.canonical import INT_MAX
from contract.errors import AuthError, RefusedError
from contract.messages import (
    PROTOCOL,
    PROTOCOL_MIN,
    UPDATES,
    Ask,
    Bye,
    Challenge,
    Heartbeat,
    Hello,
    Message,
    Offer,
    Proof,
    Refuse,
    Scores,
    Welcome,
)
from contract.session import Acknowledged, Role, Session, SessionLimits, State
from contract.signature import proof_payload
from edge_runtime.identity import Identity
from edge_runtime.spool import Spool
from edge_runtime.terms import Terms, check_ask, check_welcome, refusal
from edge_runtime.unanswered import Unanswered

AUTH_CODES = ("unknown-device", "wrong-key", "not-enrolled", "revoked", "claim")
FINAL_REASONS = ("collected", "done")  # what a server says when it needs this device no longer
UPDATE = "update"  # our own word: a package is there to be taken, and nothing else to be done
QUIET_S = 5.0  # without an ask or an answer: then there is nothing to be done


@dataclass(frozen=True)
class Outcome:
    """How a run ended: "collected", "done", "stopped", or the server's own word."""

    reason: str
    may_return: bool


@dataclass
class Offers:
    """Of a device that takes packages: whether one is there, and from when on a run may be left for it."""

    from_s: float = 0.0
    heard: bool = False


Order = Ask | Welcome  # for the worker: answer this; or begin predicting under these terms


class Conduct:
    """One run of edge-run over any number of connections."""

    def __init__(
        self,
        identity: Identity,
        terms: Terms,
        purpose: Literal["adapt", "infer"],
        spool: Spool,
        window: Unanswered | None = None,
        offers: Offers | None = None,
    ) -> None:
        """`window` holds the batches of a prediction run (purpose "infer"); `offers` None: this device takes none."""
        self.outcome: Outcome | None = None
        self.server_status = ""
        self.welcome: Welcome | None = None
        self.sent_again, self.sent_again_most = 0, 0  # messages of the spool: in all, and after one reconnection
        self._identity, self._terms, self._purpose = identity, terms, purpose
        self._spool, self._window = spool, window
        self._session = Session(Role.DEVICE, SessionLimits())
        self._channel_binding = b""
        self._claimed: str | None = None  # the session that our hello resumes
        self._sent = 0
        self._connections = 0
        self._working_on: str | None = None
        self._rest_s: float | None = None  # told by the newest ask, if that was to sleep
        self._progressed = False
        self._offers, self._moved_s = offers, 0.0

    @property
    def is_open(self) -> bool:
        """Whether the handshake is done and nobody has left."""
        return self._session.state is State.OPEN

    @property
    def is_amid_message(self) -> bool:
        """Whether a message has come in part."""
        return self._session.is_amid_message

    @property
    def largest_bytes(self) -> int:
        """The largest message that is to go out, or of which a part has come; 0 where there is none."""
        return max(self._spool.largest_bytes, self._session.incoming_bytes)

    @property
    def is_amid_sending(self) -> bool:
        """Whether frames of a message wait behind others of it that were given out."""
        return self._session.is_amid_sending

    @property
    def is_all_sent(self) -> bool:
        """Whether every message of the spool was written out on this connection."""
        return self.is_open and self._sent + 1 >= self._spool.next_seq

    @property
    def acknowledged(self) -> int:
        """The last number of ours that the server has stored."""
        return self._spool.acknowledged

    def take_rest(self) -> float | None:
        """For how long the server can do without this device, once: when it has been told so and has acknowledged all,
        so that nothing goes out again after the rest."""
        if self._rest_s is None or self._working_on is not None or self._spool.acknowledged + 1 < self._spool.next_seq:
            return None
        rest_s, self._rest_s = self._rest_s, None
        return rest_s

    def take_progress(self) -> bool:
        """Whether an acknowledgement, an ask or scores have come since this was asked last."""
        progressed, self._progressed = self._progressed, False
        return progressed

    # In.

    def connect(self, channel_binding: bytes) -> None:
        """Begin a session on a new connection; `channel_binding` is the server certificate's digest, or empty."""
        head = self._spool.head
        self._claimed = head.session if head and self._purpose == "adapt" else None
        self._channel_binding = channel_binding
        # Frames kept in memory only were numbered beyond what a fresh process knows: only later connections can check.
        given_out = self._spool.next_seq if self._connections else INT_MAX
        self._connections += 1
        self._session = Session(Role.DEVICE, SessionLimits(), next_seq=given_out)
        self._session.send(
            Hello(
                device=self._identity.device,
                key_id=self._identity.key_id,
                protocol_min=PROTOCOL_MIN,
                protocol_max=PROTOCOL,
                features=() if self._offers is None else (UPDATES,),
                package_digest=self._terms.package_digest,
                class_count=self._terms.class_count,
                class_list_hash=self._terms.class_list_hash,
                purpose=self._purpose,
                session=self._claimed,
                last_seq=0,  # nothing of the server's is kept: it asks again, by ask id
            )
        )

    def receive(self, frame: bytes, now_s: float) -> list[Order]:
        """Take in a frame; what it gives the worker to do is returned.

        Raises: RemoteProtocolError; RefusedError or AuthError when either side says no.
        """
        orders: list[Order] = []
        if not self._moved_s:
            self._moved_s = now_s
        for event in self._session.receive(frame, now_s):
            if isinstance(event, Acknowledged):
                self._progressed = self._progressed or event.seq > self._spool.acknowledged
                self._spool.acknowledge(event.seq)
                continue
            if isinstance(event.message, Ask | Scores):
                self._progressed, self._moved_s = True, now_s
            order = self._take(event.message)
            orders += [order] if order else []
            if event.seq:
                self._session.stored(event.seq)
        return orders

    def _take(self, message: Message) -> Order | None:
        match message:
            case Challenge():
                payload = proof_payload(message.nonce, self._channel_binding, self._identity.device, self._claimed)
                self._session.send(Proof(self._identity.sign(payload)))
            case Welcome():
                return self._join(message)
            case Refuse():
                raise refused(message)
            case Ask():
                if self._purpose == "infer":  # its answers would show labels of images that are only to be predicted
                    raise refusal(f"ask {message.ask}", "none while predicting", message.kind, "update the server")
                check_ask(message, self._terms)
                self._rest_s = float(message.parameters["wake_s"]) if message.kind == "sleep" else None
                if message.ask != self._working_on:  # asked again on a new connection, while the work goes on
                    self._working_on = message.ask
                    return message
            case Scores() if self._window is not None:
                self._window.answer(message.ask, message.batch, message.values)
                self._finish_when_answered()
            case Offer():
                if self._offers is not None:
                    self._offers.heard = message.package is not None
            case Heartbeat():
                self.server_status = message.waiting_for
            case Bye() if message.reason in FINAL_REASONS or not message.may_return:
                self.outcome = Outcome(message.reason, message.may_return)
            case _:
                pass
        return None

    def _join(self, welcome: Welcome) -> Order | None:
        check_welcome(welcome, self._terms)
        earlier, self.welcome = self.welcome, welcome
        if self._window is not None:
            if earlier is not None and earlier.run != welcome.run:
                raise refusal(
                    "run", earlier.run, welcome.run, "predict again: half of the scores would be another model's"
                )
            self._window.restart(welcome.session, welcome.run)
        else:
            head = self._spool.head
            resumed = head is not None and (head.session, head.run) == (welcome.session, welcome.run)
            if not resumed or welcome.last_seq < self._spool.acknowledged:
                self._spool.begin(welcome.session, welcome.run, welcome.last_seq)
                self._working_on = None
            else:
                again = max(0, self._sent - welcome.last_seq)  # written out, and not known to the server
                self.sent_again += again
                self.sent_again_most = max(self.sent_again_most, again)
            self._spool.acknowledge(welcome.last_seq)
        self._sent = welcome.last_seq
        return welcome if earlier is None and self._window is not None else None

    # Out.

    @property
    def has_news(self) -> bool:
        """Whether there is something to write, or the run is over."""
        waiting = self._session.credit > 0 and self._sent + 1 < self._spool.next_seq
        return waiting or self._session.has_frames or self.outcome is not None

    def frames_to_send(self) -> list[bytes]:
        """Frames to write now, at most one message of the spool among them; call again until it is empty."""
        session, seq = self._session, self._sent + 1
        frames = session.frames_to_send()
        if not frames and session.credit > 0 and seq < self._spool.next_seq:
            session.send(self._spool.payload(seq), seq)
            self._sent = seq
            frames = session.frames_to_send()
        return frames

    def tick(self, now_s: float, status: Heartbeat) -> None:
        """Let time pass: heartbeats go out and say `status`, a silent peer is noticed.

        Raises: ProtocolError when the server is silent for too long.
        """
        self._session.status = status
        self._session.tick(now_s)
        self._finish_when_answered()
        if self._offers is not None and self._offers.heard and self.outcome is None:
            if status.busy or self._working_on is not None or self._spool.acknowledged + 1 < self._spool.next_seq:
                self._moved_s = now_s
            if now_s >= max(self._offers.from_s, self._moved_s + QUIET_S):
                self.outcome = Outcome(UPDATE, True)

    def work_done(self, ask: str) -> None:
        """The worker has put its whole answer into the spool: the same ask may be given to it again."""
        if self._working_on == ask:
            self._working_on = None

    def leave(self, reason: str) -> None:
        """Say goodbye, if the conversation is open; nothing of what this device holds is in `reason`."""
        if self.is_open:
            self._session.send(Bye(reason, may_return=True))

    def _finish_when_answered(self) -> None:
        if self._window is not None and self._window.complete and self.outcome is None:
            self.outcome = Outcome("done", True)


def refused(message: Refuse) -> RefusedError | AuthError:
    """The server's refusal as our error."""
    cause = f"the server refuses ({message.code}): {message.cause}"
    if message.code in AUTH_CODES:
        return AuthError(cause, message.cure)
    return RefusedError(cause, message.cure, message.code, message.retry_after_s)
