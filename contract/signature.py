"""Ed25519 signatures over exact bytes: of packages by their publisher, of challenges by a device.

Nothing is parsed before its signature was verified, so this file knows nothing of what it signs; which keys are
trusted is the caller's configuration.

A detached signature is one line of text: `cutlayer-signature-v1 <key id> <base64 of 64 bytes>` and a newline. The key
id tells an unknown signer from altered bytes; it proves nothing by itself.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from contract.canonical import to_json
from contract.errors import AuthError, SignatureError, UsageError

PrivateKey = Ed25519PrivateKey
PublicKey = Ed25519PublicKey

_LINE = re.compile(rb"cutlayer-signature-v1 ([0-9a-f]{16}) ([A-Za-z0-9+/]{85}[AQgw]==)\n")  # one text per signature
_PROOF_PURPOSE = b"cutlayer-proof-v1\0"  # a device signs nothing without it, so a proof fits nowhere else
_ENROL_PURPOSE = b"cutlayer-enrol-v1\0"
_TOKEN = re.compile(r"claim-([A-Za-z0-9_-]{43})")
_CURE_UNTRUSTED = "install a package of a publisher you trust, or add the publisher's public key to the trusted keys"
_CURE_ALTERED = "do not use these files: get the package again from its publisher"


# --- keys --------------------------------------------------------------------------------------------------------


def generate() -> PrivateKey:
    """A new private key from the operating system's random source."""
    return Ed25519PrivateKey.generate()


def key_id(public: PublicKey) -> str:
    """Name of a key: the first 16 hex digits of SHA-256 over its 32 raw bytes."""
    return hashlib.sha256(raw_public(public)).hexdigest()[:16]


def load_private(path: Path) -> PrivateKey:
    """Private key from a PEM file (PKCS8, no password).

    Raises: UsageError if the file cannot be read; SignatureError if it holds something else.
    """
    data = _read(path)
    try:
        key = load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: a password is needed
        raise _not_a_key(path, "private") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise _not_a_key(path, "private")
    return key


def load_public(path: Path) -> PublicKey:
    """Public key from a PEM file (SubjectPublicKeyInfo).

    Raises: UsageError if the file cannot be read; SignatureError if it holds something else.
    """
    data = _read(path)
    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _not_a_key(path, "public") from error
    if not isinstance(key, Ed25519PublicKey):
        raise _not_a_key(path, "public")
    return key


def save_private(path: Path, key: PrivateKey) -> None:
    """Write a private key as PEM, readable by its owner only; an existing file is never replaced.

    Raises: UsageError if the file exists or cannot be written.
    """
    _write_new(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), mode=0o600)


def save_public(path: Path, key: PublicKey) -> None:
    """Write a public key as PEM; an existing file is never replaced.

    Raises: UsageError if the file exists or cannot be written.
    """
    _write_new(path, public_pem(key), mode=0o644)


# --- signatures of files -----------------------------------------------------------------------------------------


def sign(private: PrivateKey, data: bytes) -> bytes:
    """Detached signature over `data`: one line of text."""
    encoded = base64.b64encode(private.sign(data)).decode("ascii")
    return f"cutlayer-signature-v1 {key_id(private.public_key())} {encoded}\n".encode("ascii")


def verify(data: bytes, signature: bytes, trusted: Mapping[str, PublicKey]) -> str:
    """Id of the trusted key (`trusted` maps ids to keys) that made the detached `signature` over exactly `data`.

    Raises: SignatureError, telling a malformed signature, an unknown signer and altered bytes apart.
    """
    line = _LINE.fullmatch(signature)
    if line is None:
        raise SignatureError(
            f"signature: expected one line 'cutlayer-signature-v1 KEY BASE64', found {len(signature)} other bytes",
            _CURE_ALTERED,
        )
    signer = line[1].decode("ascii")
    public = trusted.get(signer)
    if public is None:
        known = ", ".join(sorted(trusted)) or "none"
        raise SignatureError(f"signature: expected a trusted signer ({known}), found key {signer}", _CURE_UNTRUSTED)
    try:
        public.verify(base64.b64decode(line[2]), data)
    except InvalidSignature as error:
        raise SignatureError(
            f"signature: expected the bytes that key {signer} signed, found altered bytes or another key's signature",
            _CURE_ALTERED,
        ) from error
    return signer


# --- the challenge of the handshake ------------------------------------------------------------------------------


def proof_payload(nonce: bytes, channel_binding: bytes, device: str, session: str | None) -> bytes:
    """What a device signs: the server's nonce, the TLS channel, its own name and the session it resumes, unambiguously.

    With the channel binding in it, a proof that was relayed over another connection is worth nothing.
    """
    return _PROOF_PURPOSE + to_json([nonce.hex(), channel_binding.hex(), device, session or ""])


def enrol_payload(nonce: bytes, channel_binding: bytes, device: str, by: str, public_key: bytes) -> bytes:
    """What a new key and the key that vouches for it sign: nonce, TLS channel, the device's name, and both keys."""
    return _ENROL_PURPOSE + to_json([nonce.hex(), channel_binding.hex(), device, by, public_key.hex()])


def claim_token(claim: PrivateKey) -> str:
    """The text by which an operator hands a one-time claim to a device: its private key. A server keeps the public one,
    from which nobody can enrol."""
    raw = claim.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
    return "claim-" + base64.urlsafe_b64encode(raw).decode("ascii").rstrip("=")


def read_claim(token: str) -> PrivateKey:
    """The key in a token.

    Raises: UsageError; the token is not in its text.
    """
    found = _TOKEN.fullmatch(token.strip())
    if found is None:
        raise UsageError(
            f"the claim should be 'claim-' and 43 characters, found {len(token.strip())} characters of something else",
            "copy the line that server-run claim printed",
        )
    return Ed25519PrivateKey.from_private_bytes(base64.urlsafe_b64decode(found[1] + "="))


def raw_public(public: PublicKey) -> bytes:
    """The 32 bytes of a public key."""
    return public.public_bytes(Encoding.Raw, PublicFormat.Raw)


def read_raw_public(raw: bytes) -> PublicKey:
    """The public key of 32 bytes."""
    return Ed25519PublicKey.from_public_bytes(raw)


def public_pem(public: PublicKey) -> bytes:
    """A public key as PEM."""
    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def sign_raw(private: PrivateKey, data: bytes) -> bytes:
    """Signature of 64 bytes over `data`."""
    return private.sign(data)


def verify_raw(public: PublicKey, data: bytes, signature: bytes) -> None:
    """Accept or refuse a signature of 64 bytes over `data`.

    Raises: AuthError.
    """
    try:
        public.verify(signature, data)
    except InvalidSignature as error:
        raise AuthError(
            f"proof: expected a signature by key {key_id(public)} over this connection's challenge, found another",
            "enrol the device's current public key on the server, and connect without a proxy that re-encrypts TLS",
        ) from error


# --- files -------------------------------------------------------------------------------------------------------


def _not_a_key(path: Path, part: str) -> SignatureError:
    cures = {
        "public": "give the publisher's public key: publisher.pub of tools/make_keys, or signing-key.pub.pem beside "
        "the package that export-frontend wrote",
        "private": "check the path; make a new pair of keys if this one is lost",
    }
    return SignatureError(
        f"{path}: expected an Ed25519 {part} key in PEM form without a password, found something else", cures[part]
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path}: expected a readable key file, found: {error.strerror}", "check the path and its permissions"
        ) from error


def _write_new(path: Path, data: bytes, mode: int) -> None:
    """Whole or not at all; the link fails where a file exists, which a rename would replace."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, path)
        finally:
            os.unlink(draft)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise UsageError(
            f"{path}: expected to write a new key file, found: {error.strerror}",
            "choose a path that does not exist yet, in a directory you may write to",
        ) from error
