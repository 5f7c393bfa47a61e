"""Who may join: hello -> challenge -> proof -> welcome, or a refusal that names the field.

It decides and does no I/O: the roster, the ledger of sessions and class lists, and random bytes are handed in; the
order of messages is `contract.session`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from contract.errors import AuthError, ProtocolError, RefusedError, RemoteProtocolError
from contract.manifest import LabelMode
from contract.messages import UPGRADE_REQUIRED, Challenge, Hello, Message, Proof, Welcome, choose_protocol
from contract.signature import proof_payload, verify_raw

from .roster import Device, Roster


class Ledger(Protocol):
    """What is remembered of sessions and class lists over restarts."""

    def fix_classes(self, site: str, class_count: int, class_list_hash: str | None) -> tuple[int, str | None]:
        """The site's class list: the given one for the first joiner, the first joiner's for all others."""
        ...

    def received_seq(self, device: str, session: str) -> int | None:
        """Highest seq received in a session; None when it is unknown."""
        ...

    def open_session(self, device: str, session: str, purpose: str) -> None:
        """Remember a new session."""
        ...


@dataclass(frozen=True)
class Terms:
    """What every welcome of a run says."""

    run: str
    strategy: str
    label_mode: LabelMode
    package_digest: str
    kappa: float
    seed: int
    credit: int = 64
    heartbeat_s: float = 10.0
    own_classes: bool = False  # a site's devices need not have the same classes: their heads are their own


@dataclass(frozen=True)
class Joined:
    """A device that was let in, and where its session goes on."""

    device: Device
    purpose: str
    run: str
    session: str
    class_count: int


class Admission:
    """One connection's way in."""

    def __init__(
        self, roster: Roster, terms: Terms, ledger: Ledger, channel_binding: bytes, random: Callable[[int], bytes]
    ) -> None:
        self._roster = roster
        self._terms = terms
        self._ledger = ledger
        self._channel_binding = channel_binding
        self._random = random  # number of bytes -> that many unpredictable ones
        self._nonce = b""
        self._hello: Hello | None = None
        self.joined: Joined | None = None

    def answer(self, message: Message) -> Challenge | Welcome:
        """The reply to a message of the handshake.

        Raises:
            RefusedError: the device is told no, with this text, and the connection is closed.
            RemoteProtocolError: the message belongs to no handshake.
        """
        if isinstance(message, Hello):
            self._check_hello(message)
            self._hello, self._nonce = message, self._random(32)
            return Challenge(self._nonce)
        if isinstance(message, Proof) and self._hello is not None:
            return self._welcome(self._hello, message)
        raise RemoteProtocolError(f"expected hello or proof, found {message.TYPE}", "update the device's software")

    def _check_hello(self, hello: Hello) -> None:
        try:
            choose_protocol(hello.protocol_min, hello.protocol_max)
        except ProtocolError as error:
            raise RefusedError(error.cause, error.cure, UPGRADE_REQUIRED) from error
        device = self._roster.devices.get(hello.device)
        if device is None:
            raise RefusedError(
                f"device: {hello.device!r} is not enrolled here",
                f"copy the device's public key to ROSTER/<site>/{hello.device}.pub and restart server-run",
                "unknown-device",
            )
        if hello.key_id != device.key_id:
            raise RefusedError(
                f"key_id: {hello.device!r} is enrolled with key {device.key_id}, it came with {hello.key_id}",
                "enrol the device's current public key and restart server-run, or restore the device's key",
                "wrong-key",
            )
        if hello.package_digest != self._terms.package_digest:
            raise RefusedError(
                f"package_digest (device | server): {hello.package_digest or 'none'} | {self._terms.package_digest}",
                "install on the device the package that was exported together with this server's backend",
                "package",
            )

    def _welcome(self, hello: Hello, proof: Proof) -> Welcome:
        device = self._roster.devices[hello.device]
        payload = proof_payload(self._nonce, self._channel_binding, hello.device, hello.session)
        try:
            verify_raw(device.public_key, payload, proof.signature)
        except AuthError as error:
            raise RefusedError(error.cause, error.cure, "wrong-key") from error
        # Only now: nobody without the key may fix a site's class list.
        self._check_classes(hello, device.site)
        session = hello.session
        received = None if session is None else self._ledger.received_seq(device.name, session)
        if session is None or received is None:
            session, received = self._random(8).hex(), 0
            self._ledger.open_session(device.name, session, hello.purpose)
        terms = self._terms
        self.joined = Joined(device, hello.purpose, terms.run, session, hello.class_count)
        return Welcome(
            session=session,
            run=terms.run,
            site=device.site,
            strategy=terms.strategy,
            label_mode=terms.label_mode,
            class_count=hello.class_count,
            class_list_hash=hello.class_list_hash,
            package_digest=terms.package_digest,
            kappa=terms.kappa,
            seed=terms.seed,
            credit=terms.credit,
            heartbeat_s=terms.heartbeat_s,
            last_seq=received,
        )

    def _check_classes(self, hello: Hello, site: str) -> None:
        if hello.class_count < 1:
            raise RefusedError("class_count: expected 1 or more, found 0", "give the device classes", "class-count")
        count, list_hash = self._ledger.fix_classes(site, hello.class_count, hello.class_list_hash)
        rows = [
            f"{name}: {theirs} | {ours}"
            for name, theirs, ours in (
                ("class_count", hello.class_count, count),
                ("class_list_hash", hello.class_list_hash, list_hash),
            )
            if theirs != ours
        ]
        if rows and not self._terms.own_classes:
            raise RefusedError(
                f"site {site!r} has another class list, fixed by its first device (device | site): " + "; ".join(rows),
                "give all devices of a site the same class list (--classes FILE) and the same site secret",
                "class-list",
            )
