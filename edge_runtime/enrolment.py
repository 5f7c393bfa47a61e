"""Make this device's key known to the server: for the first time by a one-time claim, later by the key it had before.

The private key is made here and never leaves. It lies as KEY.new until the server has it, so that a stop at any moment
is mended by the same command again: the server says yes to a key that is the device's already.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import WebSocketException

from contract.errors import ConfigError, ProtocolError, UnreachableError, UsageError
from contract.messages import Challenge, Enrol, Enrolled, Message, Refuse, Vouch
from contract.session import Received, Role, Session, SessionLimits
from contract.signature import (
    PrivateKey,
    enrol_payload,
    generate,
    key_id,
    load_private,
    raw_public,
    save_private,
    sign_raw,
)
from edge_runtime.conduct import refused
from edge_runtime.dialling import channel_binding, open_socket, tls_context
from edge_runtime.reconnect import BUILT, explain
from edge_runtime.state import sync_folder

ANSWER_S = 20.0


@dataclass(frozen=True)
class Desk:
    """Where the server is, and the name under which it knows this device."""

    server: str
    ca: Path | None
    device: str
    certificate: Path | None = None
    certificate_key: Path | None = None


def enrol(desk: Desk, key: Path, claim: PrivateKey) -> Enrolled:
    """A first key by a claim, or another one in place of a lost one.

    Raises: UsageError where `key` exists; as `ask`.
    """
    if key.exists():
        raise UsageError(
            f"{key} exists already: this device has a key",
            "edge-run rotate-key replaces it by a new one; to enrol anew, move the file away",
        )
    return _ask_and_keep(desk, key, claim)


def rotate(desk: Desk, key: Path) -> Enrolled:
    """A new key in place of the present one, which is good no longer; it is kept as KEY.old.

    Raises: as `ask`.
    """
    return _ask_and_keep(desk, key, load_private(key))


def _ask_and_keep(desk: Desk, key: Path, vouching: PrivateKey) -> Enrolled:
    new = key.with_name(key.name + ".new")
    try:
        key.parent.mkdir(parents=True, exist_ok=True)
        if not new.exists():
            save_private(new, generate())
        answer = asyncio.run(ask(desk, vouching, load_private(new)))
        if key.exists():
            os.replace(key, key.with_name(key.name + ".old"))
        os.replace(new, key)
        sync_folder(key.parent)
    except OSError as error:
        raise ConfigError(
            f"{key.parent} cannot be written: {error.strerror}", "give --key a path that this user may write"
        ) from error
    return answer


async def ask(desk: Desk, vouching: PrivateKey, own: PrivateKey) -> Enrolled:
    """One conversation: enrol, challenge, vouch, enrolled.

    Raises: UnreachableError; RefusedError or AuthError with the server's reason; ProtocolError.
    """
    with _explained(desk.server):
        context = tls_context(desk.server, desk.ca, desk.certificate, desk.certificate_key)
        async with open_socket(desk.server, context) as socket:
            return await asyncio.wait_for(_converse(socket, desk.device, vouching, own), ANSWER_S)


async def _converse(socket: ClientConnection, device: str, vouching: PrivateKey, own: PrivateKey) -> Enrolled:
    session = Session(Role.DEVICE, SessionLimits())
    by, public = key_id(vouching.public_key()), raw_public(own.public_key())
    challenge = await _say(socket, session, Enrol(device, by, public))
    if not isinstance(challenge, Challenge):
        raise ProtocolError(f"expected a challenge, found {challenge.TYPE}", "update the server")
    payload = enrol_payload(challenge.nonce, channel_binding(socket), device, by, public)
    answer = await _say(socket, session, Vouch(sign_raw(vouching, payload), sign_raw(own, payload)))
    if not isinstance(answer, Enrolled) or answer.key_id != key_id(own.public_key()):
        raise ProtocolError(f"expected this key to be enrolled, found {answer.TYPE}", "update the server")
    return answer


async def _say(socket: ClientConnection, session: Session, message: Message) -> Message:
    """Send a message, and give what comes back. Raises: RefusedError or AuthError when it is a refusal."""
    session.send(message)
    for frame in session.frames_to_send():
        await socket.send(frame)
    frame_or_text = await socket.recv()
    if isinstance(frame_or_text, str):
        raise ProtocolError("the server sent text, expected binary frames", "check that --server is a Cutlayer server")
    for event in session.receive(frame_or_text, time.monotonic()):
        if isinstance(event, Received):
            if isinstance(event.message, Refuse):
                raise refused(event.message)
            return event.message
    raise ProtocolError("the server's answer means nothing here", "update both programs to one version")


@contextmanager
def _explained(server: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ssl.SSLError, WebSocketException, asyncio.TimeoutError) as error:
        told = explain(error, server, datetime.now(timezone.utc), BUILT)
        raise UnreachableError(told.cause, told.cure) from error
