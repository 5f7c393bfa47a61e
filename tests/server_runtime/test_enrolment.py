"""Whose key is whose: claims, rotation, revocation; both ends of the session in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract import signature
from contract.errors import ConfigError, RefusedError, RemoteProtocolError
from contract.messages import Challenge, Enrol, Enrolled, Proof, Vouch
from contract.signature import enrol_payload, key_id, raw_public, sign_raw
from server_runtime import enrolment
from server_runtime.admission import Admission
from server_runtime.roster import read_roster
from tests.server_runtime.test_admission import BINDING, TERMS, Desk

LATER = 1e11  # s, the year 5138


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def ask(
    desk: Desk,
    vouching: signature.PrivateKey,
    own: signature.PrivateKey,
    device: str = "pi",
    binding: bytes = BINDING,
    now_s: float = 0.0,
    signer: signature.PrivateKey | None = None,
) -> Enrolled:
    """Enrol a key of a device; `signer` signs in the place of the key itself."""
    admission = Admission(desk.roster, TERMS, desk.store, BINDING, lambda count: b"\1" * count, lambda: now_s)
    by, public = key_id(vouching.public_key()), raw_public(own.public_key())
    challenge = admission.answer(Enrol(device, by, public))
    assert isinstance(challenge, Challenge)
    payload = enrol_payload(challenge.nonce, binding, device, by, public)
    answer = admission.answer(Vouch(sign_raw(vouching, payload), sign_raw(signer or own, payload)))
    assert isinstance(answer, Enrolled)
    return answer


def claim_for(desk: Desk, device: str, site: str = "clinic", until_s: float = LATER) -> signature.PrivateKey:
    token = enrolment.issue_claim(desk.roster.root, site, device, until_s)
    desk.roster = read_roster(desk.roster.root)
    return signature.read_claim(token + "\n")


def test_a_claim_enrols_one_key_and_is_spent(desk: Desk) -> None:
    claim, own = claim_for(desk, "new"), signature.generate()
    assert desk.roster.sites == {"clinic": ("jetson", "new", "pi")}  # it is waited for
    assert ask(desk, claim, own, "new") == Enrolled("clinic", key_id(own.public_key()))
    assert desk.roster.current("new").key_id == key_id(own.public_key())  # type: ignore[union-attr]
    desk.keys["new"] = own
    desk.join(desk.hello("new"))
    with pytest.raises(RefusedError, match="neither an open claim") as refused:
        ask(desk, claim, signature.generate(), "new")
    assert refused.value.code == "claim"


def test_a_device_that_never_heard_the_answer_is_told_again(desk: Desk) -> None:
    claim, own = claim_for(desk, "new"), signature.generate()
    assert ask(desk, claim, own, "new") == ask(desk, claim, own, "new")


def test_the_token_stays_with_the_device_and_the_server_keeps_nothing_to_enrol_with(desk: Desk) -> None:
    token = enrolment.issue_claim(desk.roster.root, "clinic", "new", LATER)
    kept = (desk.roster.root / "clinic" / "new.claim").read_text()
    raw = signature.raw_public(signature.read_claim(token).public_key()).hex()
    assert raw in kept
    assert token.removeprefix("claim-") not in kept


@pytest.mark.parametrize("expires", ["NaN", "Infinity", "1" + "0" * 400, "1e300", "-1", "null", "[" * 2000])
def test_a_claim_that_a_bad_disk_left_without_a_date_is_no_claim(expires: str, desk: Desk) -> None:
    enrolment.issue_claim(desk.roster.root, "clinic", "new", LATER)
    path = desk.roster.root / "clinic" / "new.claim"
    path.write_text(path.read_text().replace(repr(LATER), expires))
    assert expires in path.read_text()
    with pytest.raises(ConfigError, match="cannot be used"):
        read_roster(desk.roster.root)


@pytest.mark.parametrize("case", ["expired", "other device", "relayed", "not its own key", "no key yet"])
def test_what_a_claim_does_not_do(case: str, desk: Desk) -> None:
    claim, own = claim_for(desk, "new", until_s=100.0), signature.generate()
    with pytest.raises(RefusedError) as refused:
        if case == "expired":
            ask(desk, claim, own, "new", now_s=101.0)
        elif case == "other device":
            ask(desk, claim, own, "pi")
        elif case == "relayed":
            ask(desk, claim, own, "new", binding=b"another certificate")
        elif case == "not its own key":
            ask(desk, claim, own, "new", signer=claim)
        else:
            desk.keys["new"] = own
            desk.join(desk.hello("new"))
    expected = {"relayed": "wrong-key", "not its own key": "wrong-key", "no key yet": "not-enrolled"}
    assert refused.value.code == expected.get(case, "claim")
    assert desk.roster.current("new").public_key is None  # type: ignore[union-attr]


def test_a_key_is_replaced_on_the_word_of_the_one_before(desk: Desk) -> None:
    old, new = desk.keys["pi"], signature.generate()
    ask(desk, old, new)
    with pytest.raises(RefusedError, match="is enrolled with key") as refused:
        desk.join(desk.hello())
    assert refused.value.code == "wrong-key"
    desk.keys["pi"] = new
    desk.join(desk.hello())


def test_another_install_cannot_take_a_name(desk: Desk) -> None:
    stranger = signature.generate()
    with pytest.raises(RefusedError, match="neither an open claim"):
        ask(desk, stranger, signature.generate())
    with pytest.raises(RefusedError):
        ask(desk, desk.keys["jetson"], signature.generate())


def test_who_is_revoked_is_out_at_once_until_restored(desk: Desk) -> None:
    admission = desk.join(desk.hello())
    assert admission.standing() is None
    before = desk.roster.version()
    enrolment.revoke(desk.roster.root, "pi")
    assert desk.roster.version() != before
    refused = admission.standing()
    assert refused is not None
    assert refused.code == "revoked"
    with pytest.raises(RefusedError, match="revoked by the operator"):
        desk.join(desk.hello())
    with pytest.raises(RefusedError, match="revoked by the operator"):  # nor does it get itself another key
        ask(desk, desk.keys["pi"], signature.generate())
    assert read_roster(desk.roster.root).sites == {"clinic": ("jetson",)}
    enrolment.restore(desk.roster.root, "pi")
    desk.join(desk.hello())
    assert not enrolment.restore(desk.roster.root, "pi").revoked  # again: it stays so


def test_a_device_of_a_later_day_waits_for_the_next_start(desk: Desk) -> None:
    token = enrolment.issue_claim(desk.roster.root, "clinic", "late", LATER)
    own = signature.generate()
    ask(desk, signature.read_claim(token), own, "late")
    desk.keys["late"] = own
    with pytest.raises(RefusedError, match="after this server had started") as refused:
        desk.join(desk.hello("late"))
    assert refused.value.retry_after_s


def test_enrolling_and_joining_do_not_mix(desk: Desk) -> None:
    admission = Admission(desk.roster, TERMS, desk.store, BINDING, lambda count: b"\1" * count)
    admission.answer(desk.hello())
    with pytest.raises(RemoteProtocolError, match="expected hello and proof"):
        admission.answer(Vouch(b"\0" * 64, b"\0" * 64))
    admission.answer(Enrol("pi", key_id(desk.keys["pi"].public_key()), bytes(32)))
    with pytest.raises(RemoteProtocolError, match="expected hello and proof"):
        admission.answer(Proof(b"\0" * 64))


@pytest.mark.parametrize("site", ["elsewhere", ".."])
def test_a_claim_for_another_site_or_a_bad_name_is_refused(site: str, desk: Desk) -> None:
    with pytest.raises(ConfigError):
        enrolment.issue_claim(desk.roster.root, site, "pi", LATER)
