"""What a listening socket needs: the address to bind, the TLS context, and the channel binding of its certificate.

Accepting devices is left to `server`.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
from asyncio.sslproto import SSLProtocol

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


def tls_context(listen: Listen) -> tuple[ssl.SSLContext | None, bytes]:
    """The TLS context, and the channel binding that a device's proof must contain: SHA-256 of the certificate
    (tls-server-end-point, RFC 5929), empty without TLS.

    Raises:
        ConfigError: the certificate or its key cannot be used.
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
    return context, hashlib.sha256(leaf.public_bytes(Encoding.DER)).digest()
