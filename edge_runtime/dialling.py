"""How a device's sockets are opened: where the server is, what vouches for it and for this device, and why TLS ended.

What is said over them is left to `client`, `visit` and `enrolment`.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from contract.codec import LIMITS as CODEC_LIMITS
from contract.errors import ConfigError, why
from edge_runtime.config import is_loopback
from edge_runtime.line_marks import LineMarks, connection_that_tells
from edge_runtime.reconnect import EndedAfterTls, tls_alert

OPEN_S, GOODBYE_S = 20.0, 3.0


@dataclass(frozen=True)
class Endpoint:
    """Where the server is, and what vouches for it."""

    server: str
    ca: Path | None
    clock_floor: datetime
    certificate: Path | None = None  # this device's own, where the server asks for one
    certificate_key: Path | None = None

    def tls(self) -> ssl.SSLContext | None:
        """Raises: ConfigError when a file cannot be used."""
        return tls_context(self.server, self.ca, self.certificate, self.certificate_key)


def tls_context(
    server: str, ca: Path | None, certificate: Path | None = None, certificate_key: Path | None = None
) -> ssl.SSLContext | None:
    """Verification is never switched off; None for ws:// on this machine.

    Raises: ConfigError when the CA's file, or the certificate with its key, cannot be used.
    """
    if urlsplit(server).scheme == "ws":
        return None
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"the CA certificate {ca} cannot be used: {why(error, ca)}", "give --ca a PEM file"
        ) from error
    if certificate is not None:
        try:
            context.load_cert_chain(certificate, certificate_key, password=lambda: b"")  # never asked on a terminal
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ConfigError(
                f"the certificate {certificate} with the key {certificate_key} cannot be used: {why(error)}",
                "give --certificate and --certificate-key PEM files that belong together; the key without a password",
            ) from error
    return context


@asynccontextmanager
async def open_socket(
    server: str, context: ssl.SSLContext | None, open_s: float = OPEN_S, marks: LineMarks | None = None
) -> AsyncIterator[ClientConnection]:
    """A connection to the server; `marks` is told of its bytes.

    Raises: what the library raises; ssl.SSLError where the server ended TLS with an alert, EndedAfterTls where it did
    without one. In TLS 1.3 that comes after this side's handshake is done, when the server has looked at the
    certificate; the library tells of a lost line only.
    """
    lost: list[BaseException] = []
    began, spoke, opened = False, False, False
    base = ClientConnection if marks is None else connection_that_tells(marks)

    class Connection(base):  # type: ignore[misc,valid-type]
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            nonlocal began
            began = True
            super().connection_made(transport)

        def data_received(self, data: bytes) -> None:
            nonlocal spoke
            spoke = True
            super().data_received(data)

        def connection_lost(self, exc: Exception | None) -> None:
            lost.extend([] if exc is None else [exc])
            super().connection_lost(exc)

    try:
        async with connect(server, create_connection=Connection, **socket_options(server, context, open_s)) as socket:
            opened = True
            yield socket
    except (OSError, WebSocketException) as error:
        ended = next((each for each in lost if tls_alert(each) is not None), None)
        if ended is not None:
            raise ended from error
        timed_out = isinstance(error, TimeoutError | asyncio.TimeoutError)
        if began and not spoke and not opened and not timed_out and context is not None:
            raise EndedAfterTls(str(error)) from error
        raise


def socket_options(server: str, context: ssl.SSLContext | None, open_s: float) -> dict[str, Any]:
    """How this device's sockets are opened."""
    options: dict[str, Any] = {
        "ssl": context,
        "compression": None,  # noise does not compress, and it costs memory on both sides (WI-02)
        "max_size": CODEC_LIMITS.frame_bytes,
        "max_queue": 4,
        "open_timeout": open_s,
        "close_timeout": GOODBYE_S,
        "ping_interval": None,
    }
    takes_proxy = "proxy" in inspect.signature(connect.__init__).parameters  # websockets 15 and later
    if takes_proxy and is_loopback(urlsplit(server).hostname or ""):
        options["proxy"] = None  # else the environment's would be asked for this very machine
    return options


def channel_binding(socket: ClientConnection) -> bytes:
    """SHA-256 of the server's certificate (DER), so that a relayed proof is worth nothing; empty without TLS."""
    tls = socket.transport.get_extra_info("ssl_object")
    certificate = tls.getpeercert(binary_form=True) if tls else None
    return hashlib.sha256(certificate).digest() if certificate else b""
