"""Who may join, and what a refusal says; both ends of the session in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from contract import signature
from contract.errors import RefusedError, RemoteProtocolError
from contract.messages import Bye, Challenge, Hello, Proof, Welcome
from contract.signature import proof_payload
from server_runtime.admission import Admission, Terms
from server_runtime.roster import read_roster
from server_runtime.store import Store
from tests.server_runtime import tiny

DIGEST, OTHER = "ab" * 32, "cd" * 32
TERMS = Terms("run", "split_adaptation", "permuted-label", DIGEST, 1.0, 7)
BINDING = b"the certificate"


class Desk:
    """A roster of one site with two devices, and a store."""

    def __init__(self, root: Path) -> None:
        self.keys = {name: tiny.enrol(root / "roster", "clinic", name) for name in ("pi", "jetson")}
        self.store = Store(root / "run")
        self.roster = read_roster(root / "roster")

    def hello(self, device: str = "pi") -> Hello:
        key_id = signature.key_id(self.keys[device].public_key())
        return Hello(device, key_id, 1, 1, (), DIGEST, 3, OTHER, "adapt", None, 0)

    def join(self, hello: Hello, binding: bytes = BINDING, key: signature.PrivateKey | None = None) -> Admission:
        """Shake hands as the device of `hello`."""
        bits = iter(range(1, 99))
        admission = Admission(self.roster, TERMS, self.store, BINDING, lambda count: bytes([next(bits)]) * count)
        challenge = admission.answer(hello)
        assert isinstance(challenge, Challenge)
        payload = proof_payload(challenge.nonce, binding, hello.device, hello.session)
        self.welcome = admission.answer(Proof(signature.sign_raw(key or self.keys[hello.device], payload)))
        return admission


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_an_enrolled_device_is_welcome(desk: Desk) -> None:
    admission = desk.join(desk.hello())
    welcome = desk.welcome
    assert isinstance(welcome, Welcome)
    assert (welcome.site, welcome.strategy, welcome.label_mode) == ("clinic", "split_adaptation", "permuted-label")
    assert (welcome.class_count, welcome.class_list_hash, welcome.last_seq) == (3, OTHER, 0)
    assert admission.joined is not None
    assert (admission.joined.device.name, admission.joined.purpose) == ("pi", "adapt")


def test_a_known_session_goes_on_where_it_was_stored(desk: Desk) -> None:
    desk.join(desk.hello())
    session = desk.welcome.session
    desk.store.note_received("pi", session, 9)
    desk.join(replace(desk.hello(), session=session, last_seq=4))
    assert (desk.welcome.session, desk.welcome.last_seq) == (session, 9)


def test_an_unknown_session_or_another_devices_begins_anew(desk: Desk) -> None:
    desk.join(desk.hello("jetson"))
    foreign = desk.welcome.session
    desk.store.note_received("jetson", foreign, 9)
    bits = desk.join(replace(desk.hello(), session="elsewhere"))
    assert bits.joined is not None
    assert desk.welcome.last_seq == 0
    desk.join(replace(desk.hello(), session=foreign))
    assert desk.welcome.last_seq == 0


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        ({"device": "mallory"}, "unknown-device", "mallory"),
        ({"key_id": "0" * 16}, "wrong-key", "key_id"),
        ({"protocol_min": 2, "protocol_max": 3}, "upgrade-required", "protocol"),
        ({"package_digest": None}, "package", "package_digest"),
        ({"package_digest": OTHER}, "package", f"{OTHER} | {DIGEST}"),
        ({"class_count": 0}, "class-count", "class_count"),
    ],
)
def test_se_04_each_field_that_does_not_fit_is_named(
    change: dict[str, object], code: str, named: str, desk: Desk
) -> None:
    with pytest.raises(RefusedError) as refusal:
        desk.join(replace(desk.hello(), **change))  # type: ignore[arg-type]
    assert refusal.value.code == code
    assert named in refusal.value.cause
    assert refusal.value.retry_after_s is None
    desk.join(desk.hello("jetson"))  # the others keep joining


@pytest.mark.parametrize(
    ("change", "named"),
    [({"class_count": 4}, "class_count: 4 | 3"), ({"class_list_hash": DIGEST}, f"class_list_hash: {DIGEST} | {OTHER}")],
)
def test_se_04_the_first_joiner_fixes_the_class_list(change: dict[str, object], named: str, desk: Desk) -> None:
    desk.join(desk.hello())
    with pytest.raises(RefusedError) as refusal:
        desk.join(replace(desk.hello("jetson"), **change))  # type: ignore[arg-type]
    assert refusal.value.code == "class-list"
    assert named in refusal.value.cause
    desk.join(desk.hello("jetson"))


def test_attack_a_stranger_cannot_fix_the_class_list(desk: Desk) -> None:
    with pytest.raises(RefusedError):
        desk.join(replace(desk.hello(), class_count=99), key=signature.generate())
    desk.join(desk.hello())
    assert desk.store.classes("clinic") == (3, OTHER)


def test_attack_another_key_is_refused(desk: Desk) -> None:
    with pytest.raises(RefusedError) as refusal:
        desk.join(desk.hello(), key=desk.keys["jetson"])
    assert refusal.value.code == "wrong-key"


def test_attack_a_proof_relayed_over_another_tls_connection_is_refused(desk: Desk) -> None:
    with pytest.raises(RefusedError) as refusal:
        desk.join(desk.hello(), binding=b"another certificate")
    assert refusal.value.code == "wrong-key"


def test_attack_a_recorded_proof_does_not_fit_the_next_challenge(desk: Desk) -> None:
    admission = Admission(desk.roster, TERMS, desk.store, BINDING, lambda count: b"\1" * count)
    challenge = admission.answer(desk.hello())
    recorded = Proof(signature.sign_raw(desk.keys["pi"], proof_payload(challenge.nonce, BINDING, "pi", None)))
    assert isinstance(admission.answer(recorded), Welcome)
    later = Admission(desk.roster, TERMS, desk.store, BINDING, lambda count: b"\2" * count)
    later.answer(desk.hello())
    with pytest.raises(RefusedError):
        later.answer(recorded)


def test_what_is_no_part_of_a_handshake_is_an_error(desk: Desk) -> None:
    admission = Admission(desk.roster, TERMS, desk.store, BINDING, lambda count: b"\1" * count)
    for message in (Bye("x", True), Proof(b"\0" * 64)):
        with pytest.raises(RemoteProtocolError):
            admission.answer(message)
