from __future__ import annotations

import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import AuthError, SignatureError, UsageError
from contract.signature import (
    PrivateKey,
    generate,
    key_id,
    load_private,
    load_public,
    proof_payload,
    save_private,
    save_public,
    sign,
    sign_raw,
    verify,
    verify_raw,
)

KEY = PrivateKey.from_private_bytes(bytes(range(32)))
ID = key_id(KEY.public_key())
TRUSTED = {ID: KEY.public_key()}
DATA = b'{"name":"front"}'


def test_signature_verifies_and_names_its_key() -> None:
    assert verify(DATA, sign(KEY, DATA), TRUSTED) == ID


def test_signature_is_one_line_of_fixed_bytes() -> None:
    # Ed25519 signs without randomness, so these bytes are the same on every machine and in every version.
    assert sign(KEY, b"abc") == (
        b"cutlayer-signature-v1 56475aa75463474c "
        b"zEbWLTdU9BdUsntuosssJyuvp6Wh9gYr0GD0FOUMqurC2matOc70QkqQI26pB7fYBX40Q9xav8mYaWfuchOkBw==\n"
    )


def test_keys_survive_their_files(tmp_path: Path) -> None:
    key = generate()
    save_private(tmp_path / "publisher.key", key)
    save_public(tmp_path / "publisher.pub", key.public_key())
    loaded, public = load_private(tmp_path / "publisher.key"), load_public(tmp_path / "publisher.pub")
    assert verify(DATA, sign(loaded, DATA), {key_id(public): public}) == key_id(key.public_key())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["publisher.key", "publisher.pub"]


def test_private_key_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    save_private(tmp_path / "a.key", KEY)
    assert stat.S_IMODE((tmp_path / "a.key").stat().st_mode) == 0o600


def test_existing_key_is_never_replaced(tmp_path: Path) -> None:
    save_private(tmp_path / "a.key", KEY)
    before = (tmp_path / "a.key").read_bytes()
    with pytest.raises(UsageError, match="a.key: expected to write a new key file"):
        save_private(tmp_path / "a.key", generate())
    assert (tmp_path / "a.key").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.key"]


def test_key_file_in_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory"):
        save_private(tmp_path / "missing" / "a.key", KEY)
    with pytest.raises(UsageError, match="expected a readable key file"):
        load_private(tmp_path / "missing" / "a.key")


@pytest.mark.parametrize("content", [b"", b"hello", b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"])
def test_file_that_holds_no_key(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(SignatureError, match="expected an Ed25519 private key"):
        load_private(tmp_path / "a")
    with pytest.raises(SignatureError, match="expected an Ed25519 public key"):
        load_public(tmp_path / "a")


def test_key_of_another_algorithm_or_with_a_password(tmp_path: Path) -> None:
    other = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "ec.key").write_bytes(
        other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    )
    (tmp_path / "ec.pub").write_bytes(other.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    with pytest.raises(SignatureError, match="without a password"):
        load_private(tmp_path / "ec.key")
    (tmp_path / "ec.key").write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(SignatureError, match="expected an Ed25519 private key"):
        load_private(tmp_path / "ec.key")
    with pytest.raises(SignatureError, match="expected an Ed25519 public key"):
        load_public(tmp_path / "ec.pub")


def test_public_key_is_no_private_key(tmp_path: Path) -> None:
    save_public(tmp_path / "a.pub", KEY.public_key())
    with pytest.raises(SignatureError, match="expected an Ed25519 private key"):
        load_private(tmp_path / "a.pub")


# --- the challenge -----------------------------------------------------------------------------------------------


def test_proof_of_a_device() -> None:
    payload = proof_payload(bytes(32), b"binding", "pi-4", None)
    verify_raw(KEY.public_key(), payload, sign_raw(KEY, payload))


def test_proof_payload_is_stable_and_separate_from_everything_else_that_is_signed() -> None:
    assert proof_payload(b"\x01", b"\x02", "pi-4", "s-1") == b'cutlayer-proof-v1\x00["01","02","pi-4","s-1"]'
    assert proof_payload(b"\x01", b"", "pi-4", None) == b'cutlayer-proof-v1\x00["01","","pi-4",""]'


names = st.text(alphabet="ab-", max_size=3)


@given(st.tuples(st.binary(max_size=2), st.binary(max_size=2), names, names))
def test_different_facts_never_give_one_proof_payload(facts: tuple[bytes, bytes, str, str]) -> None:
    nonce, binding, device, session = facts
    shifted = (nonce + binding[:1], binding[1:], device + session[:1], session[1:])
    assert (proof_payload(*facts) == proof_payload(*shifted)) == (facts == shifted)


@pytest.mark.parametrize("change", ["nonce", "channel_binding", "device", "session"])
def test_proof_of_another_conversation_is_refused(change: str) -> None:
    facts = {"nonce": bytes(32), "channel_binding": b"tls", "device": "pi-4", "session": "s-1"}
    proof = sign_raw(KEY, proof_payload(**facts))  # type: ignore[arg-type]
    value = facts[change]
    facts[change] = value + ("x" if isinstance(value, str) else b"x")  # type: ignore[operator]
    with pytest.raises(AuthError, match=f"signature by key {ID}"):
        verify_raw(KEY.public_key(), proof_payload(**facts), proof)  # type: ignore[arg-type]


@pytest.mark.parametrize("signature", [b"", bytes(64), bytes(63), bytes(100)])
def test_bytes_that_are_no_proof(signature: bytes) -> None:
    with pytest.raises(AuthError):
        verify_raw(KEY.public_key(), DATA, signature)
