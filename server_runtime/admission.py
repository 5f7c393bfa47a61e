"""Who may join: hello -> challenge -> proof -> welcome, or a refusal that names the field; and which key is whose:
enrol -> challenge -> vouch -> enrolled.

It decides and does no I/O of its own: the roster, the ledger of sessions and class lists, random bytes and the time are
handed in; the order of messages is `contract.session`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from contract.errors import AuthError, ProtocolError, RefusedError, RemoteProtocolError
from contract.manifest import LabelMode
from contract.messages import (
    UPGRADE_REQUIRED,
    Challenge,
    Enrol,
    Enrolled,
    Hello,
    Message,
    Proof,
    Vouch,
    Welcome,
    choose_protocol,
)
from contract.signature import PublicKey, enrol_payload, key_id, proof_payload, raw_public, read_raw_public, verify_raw

from . import enrolment
from .roster import Device, Roster

RESTART_POLL_S = 60.0  # how often a device looks whether the server was restarted


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
    package_digest: str | None = None
    features: tuple[str, ...] = ()


class Admission:
    """One connection's way in."""

    def __init__(
        self, roster: Roster, terms: Terms, ledger: Ledger, channel_binding: bytes, random: Callable[[int], bytes],
        now: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._roster = roster
        self._terms = terms
        self._ledger = ledger
        self._channel_binding = channel_binding
        self._random = random  # number of bytes -> that many unpredictable ones
        self._now = now  # only claims look at it, which this server's own clock dates
        self._nonce = b""
        self._first: Hello | Enrol | None = None
        self.joined: Joined | None = None

    def answer(self, message: Message) -> Challenge | Welcome | Enrolled:
        """The reply to a message of the handshake.

        Raises:
            RefusedError: the device is told no, with this text, and the connection is closed.
            RemoteProtocolError: the message belongs to no handshake.
        """
        if isinstance(message, Hello | Enrol):
            if isinstance(message, Hello):
                self._check_hello(message)
            else:
                self._check_enrol(message)
            self._first, self._nonce = message, self._random(32)
            return Challenge(self._nonce)
        if isinstance(message, Proof) and isinstance(self._first, Hello):
            return self._welcome(self._first, message)
        if isinstance(message, Vouch) and isinstance(self._first, Enrol):
            return self._enrol(self._first, message)
        raise RemoteProtocolError(
            f"expected hello and proof, or enrol and vouch, found {message.TYPE}", "update the device's software"
        )

    def standing(self) -> RefusedError | None:
        """Why the device that was let in may not stay, by the roster as it is now; None where it may."""
        if self.joined is None or not isinstance(self._first, Hello):
            return None
        try:
            self._device(self._first)
        except RefusedError as error:
            return error
        return None

    # -- which key is whose

    def _check_enrol(self, enrol: Enrol) -> tuple[Device, PublicKey | None]:
        """The device, and the key that must vouch: its claim's or its present one; None where the key that it brings is
        its own already, as when it asks again because it never heard the answer."""
        device = self._roster.current(enrol.device)
        if device is None:
            raise _unknown(enrol.device)
        if device.revoked:
            raise _revoked(device)
        if device.public_key is not None and raw_public(device.public_key) == enrol.public_key:
            return device, None
        if device.claim is not None and device.claim.key_id == enrol.by:
            if self._now() > device.claim.expires_s:
                raise RefusedError(
                    f"by: the claim of {enrol.device!r} has expired", "issue a new one: server-run claim", "claim"
                )
            return device, device.claim.public_key
        if device.public_key is not None and device.key_id == enrol.by:
            return device, device.public_key
        raise RefusedError(
            f"by: {enrol.by} is neither an open claim of {enrol.device!r} nor its present key"
            + ("; it has enrolled a key already" if device.public_key is not None else ""),
            "a claim works once: issue another with server-run claim, on the machine that holds the roster",
            "claim",
        )

    def _enrol(self, enrol: Enrol, vouch: Vouch) -> Enrolled:
        device, vouching = self._check_enrol(enrol)  # again: the roster may have changed meanwhile
        payload = enrol_payload(self._nonce, self._channel_binding, enrol.device, enrol.by, enrol.public_key)
        own = read_raw_public(enrol.public_key)
        try:
            verify_raw(own, payload, vouch.own_signature)
            if vouching is not None:
                verify_raw(vouching, payload, vouch.signature)
        except AuthError as error:
            raise RefusedError(error.cause, error.cure, "wrong-key") from error
        if vouching is not None:
            enrolment.enrol(self._roster.root, device, own)
        return Enrolled(device.site, key_id(own))

    # -- who may join

    def _device(self, hello: Hello) -> tuple[Device, PublicKey]:
        """The device as it stands now, with the key that it said it has."""
        device = self._roster.current(hello.device)
        if device is None:
            raise _unknown(hello.device)
        if device.revoked:
            raise _revoked(device)
        if device.public_key is None:
            raise RefusedError(
                f"device: {hello.device!r} has a claim and no key yet",
                "run edge-run enrol on it, with the token that server-run claim printed",
                "not-enrolled",
            )
        if hello.key_id != device.key_id:
            raise RefusedError(
                f"key_id: {hello.device!r} is enrolled with key {device.key_id}, it came with {hello.key_id}",
                "another machine has this name: give each a name of its own; or let this one enrol anew (server-run "
                "claim, then edge-run enrol), or restore its key",
                "wrong-key",
            )
        if device.name not in {name for names in self._roster.sites.values() for name in names}:
            raise RefusedError(
                f"device: {hello.device!r} was enrolled after this server had started",
                "restart server-run: it goes on where it was",
                "restart-needed",
                RESTART_POLL_S,
            )
        return device, device.public_key

    def _check_hello(self, hello: Hello) -> None:
        try:
            choose_protocol(hello.protocol_min, hello.protocol_max)
        except ProtocolError as error:
            raise RefusedError(error.cause, error.cure, UPGRADE_REQUIRED) from error
        self._device(hello)
        if hello.package_digest != self._terms.package_digest and hello.purpose != "update":
            raise RefusedError(
                f"package_digest (device | server): {hello.package_digest or 'none'} | {self._terms.package_digest}",
                "install on the device the package that was exported together with this server's backend",
                "package",
            )

    def _welcome(self, hello: Hello, proof: Proof) -> Welcome:
        device, public_key = self._device(hello)
        payload = proof_payload(self._nonce, self._channel_binding, hello.device, hello.session)
        try:
            verify_raw(public_key, payload, proof.signature)
        except AuthError as error:
            raise RefusedError(error.cause, error.cure, "wrong-key") from error
        # Only now: nobody without the key may fix a site's class list.
        session, received = hello.session, None
        if hello.purpose != "update":
            self._check_classes(hello, device.site)
            received = None if session is None else self._ledger.received_seq(device.name, session)
        if session is None or received is None:
            session, received = self._random(8).hex(), 0
            if hello.purpose != "update":  # which is no part of the run
                self._ledger.open_session(device.name, session, hello.purpose)
        terms = self._terms
        self.joined = Joined(
            device, hello.purpose, terms.run, session, hello.class_count, hello.package_digest, hello.features
        )
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


def _unknown(name: str) -> RefusedError:
    return RefusedError(
        f"device: {name!r} is not enrolled here",
        f"issue a claim for it (server-run claim), or copy its public key to ROSTER/<site>/{name}.pub and restart "
        "server-run",
        "unknown-device",
    )


def _revoked(device: Device) -> RefusedError:
    return RefusedError(
        f"device: {device.name!r} was revoked by the operator of this server",
        f"ask the operator; server-run restore {device.name} lets it in again",
        "revoked",
    )
