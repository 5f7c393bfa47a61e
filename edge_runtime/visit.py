"""One conversation with the server about packages: tell what became of one, hear of an offer, fetch it.

It is a session of its own (purpose "update"), beside those of a run. What comes is kept by `fetching`, what is done
with it is decided in `taking`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from websockets.asyncio.client import ClientConnection

from contract.errors import ProtocolError, UnreachableError
from contract.messages import (
    PROTOCOL,
    PROTOCOL_MIN,
    Bye,
    Challenge,
    Hello,
    Message,
    Offer,
    Piece,
    Proof,
    Refuse,
    Verdict,
    Welcome,
)
from contract.session import Acknowledged, Received, Role, Session, SessionLimits
from contract.signature import proof_payload
from edge_runtime.allowance import CONNECTION_BYTES
from edge_runtime.conduct import refused
from edge_runtime.dialling import Endpoint, channel_binding, open_socket
from edge_runtime.fetching import Fetched
from edge_runtime.identity import Identity

TICK_S = 5.0
M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Caller:
    """Who calls, with which package current."""

    endpoint: Endpoint
    identity: Identity
    package_digest: str | None


@dataclass(frozen=True)
class Visited:
    """What came of it: the package that the server's run wants, and the one that was fetched to the end, or why not."""

    wanted: str
    later: bool
    fetched: Path | None = None


async def visit(
    caller: Caller,
    told: Verdict | None,
    begin: Callable[[Offer], Fetched | Verdict],
    on_bytes: Callable[[int], None],
) -> Visited:
    """Say `told`, if anything; fetch what is offered, unless `begin` knows already what is to be said of it.

    It returns once what was said is kept by the server. `on_bytes` is told what comes, and what goes before it does.
    Raises: what `on_bytes` and a socket raises; as `_Talk.hear`, `Fetched.next` and `put`.
    """
    endpoint = caller.endpoint
    on_bytes(CONNECTION_BYTES)
    context = endpoint.tls()
    async with open_socket(endpoint.server, context) as socket:
        talk = _Talk(socket, on_bytes)
        welcome = await talk.shake_hands(caller)
        if told is not None:
            await talk.tell(told)
        offer = await talk.hear(Offer)
        folder: Path | None = None
        if offer.package is not None and (told is None or told.package != offer.package):
            begun = begin(offer)
            if isinstance(begun, Verdict):
                await talk.tell(begun)
            else:
                while (wanted := begun.next()) is not None:
                    await talk.say(wanted)
                    begun.put(await talk.hear(Piece), wanted)
                folder = begun.folder
        await talk.say(Bye("updated", may_return=True))
        return Visited(welcome.package_digest, offer.later, folder)


class _Talk:
    """Messages over a socket, one question at a time."""

    def __init__(self, socket: ClientConnection, on_bytes: Callable[[int], None]) -> None:
        self._socket, self._on_bytes = socket, on_bytes
        self._session = Session(Role.DEVICE, SessionLimits())
        self._inbox: list[Message] = []
        self._acknowledged = 0

    async def shake_hands(self, caller: Caller) -> Welcome:
        identity = caller.identity
        await self.say(
            Hello(
                identity.device, identity.key_id, PROTOCOL_MIN, PROTOCOL, (), caller.package_digest, 0, None, "update",
                None, 0,
            )
        )  # fmt: skip
        challenge = await self.hear(Challenge)
        payload = proof_payload(challenge.nonce, channel_binding(self._socket), identity.device, None)
        await self.say(Proof(identity.sign(payload)))
        return await self.hear(Welcome)

    async def tell(self, verdict: Verdict) -> None:
        """Say it, until the server has kept it."""
        number = await self.say(verdict)
        while self._acknowledged < number:
            await self._take()

    async def say(self, message: Message) -> int:
        number = self._session.send(message)
        await self._flush()
        return number

    async def hear(self, kind: type[M]) -> M:
        """The next message but heartbeats, which must be of this kind.

        Raises: RefusedError, AuthError; UnreachableError when the server takes its leave; ProtocolError.
        """
        while not self._inbox:
            await self._take()
        message = self._inbox.pop(0)
        if isinstance(message, Refuse):
            raise refused(message)
        if isinstance(message, Bye):
            raise UnreachableError(f"the server took its leave: {message.reason}", "nothing to do: it is asked again")
        if not isinstance(message, kind):
            raise ProtocolError(f"expected {kind.TYPE}, found {message.TYPE}", "update both programs to one version")
        return message

    async def _take(self) -> None:
        try:
            frame = await asyncio.wait_for(self._socket.recv(), TICK_S)
        except asyncio.TimeoutError:
            self._session.tick(time.monotonic())  # it raises when the server is silent for too long
            await self._flush()
            return
        if isinstance(frame, str):
            raise ProtocolError("the server sent text, expected binary frames", "check --server")
        self._on_bytes(len(frame))
        for event in self._session.receive(frame, time.monotonic()):
            if isinstance(event, Acknowledged):
                self._acknowledged = event.seq
            elif isinstance(event, Received):
                if event.seq:
                    self._session.stored(event.seq)
                if event.message.TYPE != "heartbeat":
                    self._inbox.append(event.message)

    async def _flush(self) -> None:
        while frames := self._session.frames_to_send():
            for frame in frames:
                self._on_bytes(len(frame))
                await self._socket.send(frame)
