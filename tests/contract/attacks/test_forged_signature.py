"""Attacks on what is signed: each is refused before a byte of the document is parsed."""

from __future__ import annotations

import base64

import pytest

from contract import manifest
from contract.errors import SignatureError
from contract.signature import PrivateKey, key_id, sign, verify
from tests.golden.samples import MANIFEST_FILE

PUBLISHER = PrivateKey.from_private_bytes(bytes(range(32)))
STRANGER = PrivateKey.from_private_bytes(bytes(range(1, 33)))
TRUSTED = {key_id(PUBLISHER.public_key()): PUBLISHER.public_key()}
DATA = MANIFEST_FILE.read_bytes()
SIGNATURE = sign(PUBLISHER, DATA)


def read_package(data: bytes, signature: bytes) -> manifest.Manifest:
    """The one order in which a package is read."""
    verify(data, signature, TRUSTED)
    return manifest.from_bytes(data)


def test_tampered_manifest_is_refused_before_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    monkeypatch.setattr(manifest, "from_bytes", parsed.append)
    tampered = DATA.replace(b'"kappa":1.0', b'"kappa":0.0')
    assert tampered != DATA
    with pytest.raises(SignatureError, match="found altered bytes or another key's signature"):
        read_package(tampered, SIGNATURE)
    assert parsed == []


@pytest.mark.parametrize("place", [0, len(DATA) // 2, len(DATA) - 1])
def test_one_flipped_bit(place: int) -> None:
    altered = bytearray(DATA)
    altered[place] ^= 1
    with pytest.raises(SignatureError, match="altered bytes"):
        read_package(bytes(altered), SIGNATURE)


@pytest.mark.parametrize("data", [DATA + b"\n", DATA[:-1], b""])
def test_bytes_added_or_removed(data: bytes) -> None:
    with pytest.raises(SignatureError, match="altered bytes"):
        read_package(data, SIGNATURE)


def test_unknown_signer() -> None:
    stranger = key_id(STRANGER.public_key())
    with pytest.raises(SignatureError, match=f"expected a trusted signer .*found key {stranger}"):
        read_package(DATA, sign(STRANGER, DATA))


def test_no_trusted_key_at_all() -> None:
    with pytest.raises(SignatureError, match=r"trusted signer \(none\)"):
        verify(DATA, SIGNATURE, {})


def test_signature_of_other_key() -> None:
    stolen_name = sign(STRANGER, DATA).replace(
        key_id(STRANGER.public_key()).encode(), key_id(PUBLISHER.public_key()).encode()
    )
    with pytest.raises(SignatureError, match="another key's signature"):
        read_package(DATA, stolen_name)


def test_signature_of_other_document() -> None:
    with pytest.raises(SignatureError, match="altered bytes"):
        read_package(DATA, sign(PUBLISHER, DATA + b" "))


def test_malleated_signature() -> None:
    # S + L verifies under the same equation; RFC 8032 demands S < L.
    order = 2**252 + 27742317777372353535851937790883648493
    head, signer, encoded = SIGNATURE.split()
    raw = base64.b64decode(encoded)
    larger = int.from_bytes(raw[32:], "little") + order
    forged = base64.b64encode(raw[:32] + larger.to_bytes(32, "little"))
    with pytest.raises(SignatureError):
        read_package(DATA, b" ".join((head, signer, forged)) + b"\n")


@pytest.mark.parametrize(
    "signature",
    [
        b"",
        b"\n",
        SIGNATURE[:-1],
        SIGNATURE + b"\n",
        SIGNATURE + SIGNATURE,
        b" " + SIGNATURE,
        SIGNATURE.replace(b"v1", b"v2"),
        SIGNATURE.replace(b" ", b"  "),
        SIGNATURE.replace(b" ", b"\t"),
        SIGNATURE.replace(b"==", b"="),
        SIGNATURE.replace(b"==", b"AA"),
        SIGNATURE[:-4] + bytes([SIGNATURE[-4] + 1]) + SIGNATURE[-3:],  # decodes to the same 64 bytes
        SIGNATURE.upper(),
        SIGNATURE.replace(b"\n", b"\r\n"),
        bytes(10**6),
        b"\xff" * 100,
    ],
)
def test_signature_in_any_other_form(signature: bytes) -> None:
    with pytest.raises(SignatureError, match="expected one line"):
        read_package(DATA, signature)
