"""What a listening socket needs: the address to bind, the TLS context, and the channel binding of its certificate.

Accepting devices is left to `server`.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from contract.errors import ConfigError, why

from .plan import Listen

TLS_BUFFER_BYTES = 64 << 10


def bind_address(listen: Listen) -> str:
    """What to bind: a free port is taken on one address only, as each address would get a port of its own."""
    if listen.port:
        return listen.host
    found = socket.getaddrinfo(listen.host, 0, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def shrink_tls_buffers() -> None:
    """asyncio fills a read buffer of 256 KiB for each TLS connection, which is most of what an idle device costs.

    An attribute of its own that it does not promise to keep: without it, everything works as before.
    """
    if isinstance(getattr(SSLProtocol, "max_size", None), int):
        SSLProtocol.max_size = TLS_BUFFER_BYTES  # type: ignore[attr-defined]


def tell_alerts() -> None:
    """asyncio closes a connection whose TLS handshake failed before the alert that says why is written; write it.

    As above: without these attributes a device is told less.
    """
    complete = getattr(SSLProtocol, "_on_handshake_complete", None)
    if complete is None or not hasattr(SSLProtocol, "_process_outgoing") or hasattr(complete, "tells"):
        return

    def telling(protocol: Any, error: BaseException | None) -> None:
        if error is not None:
            protocol._process_outgoing()
        complete(protocol, error)

    telling.tells = True  # type: ignore[attr-defined]
    SSLProtocol._on_handshake_complete = telling  # type: ignore[attr-defined]


def tls_context(listen: Listen) -> tuple[ssl.SSLContext | None, bytes]:
    """The TLS context, and the channel binding that a device's proof must contain: SHA-256 of the certificate
    (tls-server-end-point, RFC 5929), empty without TLS.

    Raises:
        ConfigError: the certificate, its key or the CA of the devices cannot be used.
    """
    if listen.certificate is None:
        return None, b""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(listen.certificate, listen.certificate_key)
        leaf = x509.load_pem_x509_certificates(listen.certificate.read_bytes())[0]
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"the certificate {listen.certificate} with the key {listen.certificate_key} cannot be used: {why(error)}",
            "give PEM files that belong together and that this user may read",
        ) from error
    if listen.client_ca is not None:
        try:
            context.load_verify_locations(listen.client_ca)
        except OSError as error:
            raise ConfigError(
                f"the CA {listen.client_ca} of the devices' certificates cannot be used: {why(error)}",
                "give --client-ca a PEM file (tools/make_keys makes ca.pem)",
            ) from error
        tell_alerts()
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT  # as later Pythons do by themselves
    return context, hashlib.sha256(leaf.public_bytes(Encoding.DER)).digest()
