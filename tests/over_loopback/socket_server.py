"""A scripted server on real sockets: contract.session behind websockets, with or without TLS; made-up certificates."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from contract.session import State
from tests.edge_runtime.memory_server import MemoryServer


def write_certificate(folder: Path, starts: datetime | None = None) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that is its own authority, and its key: (certificate, key) as PEM files."""
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test server")])
    starts = starts or datetime.now(timezone.utc) - timedelta(days=1)
    import ipaddress

    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(starts)
        .not_valid_after(starts + timedelta(days=3650))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.KeyUsage(True, False, False, False, False, True, True, False, False), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "server.crt", folder / "server.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths


def certificate_digest(path: Path) -> bytes:
    """SHA-256 of a PEM certificate's DER form: the channel binding."""
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest()


class SocketServer:
    """Runs a MemoryServer on a port of this machine, on a thread of its own, one connection at a time."""

    def __init__(
        self, certificate: tuple[Path, Path] | None = None, port: int = 0, client_ca: Path | None = None
    ) -> None:
        self.memory: MemoryServer | None = None
        self.connections = 0
        self.closed_after: Callable[[int], bool] = lambda frames: False  # cut a connection after so many frames
        self.close_code: int | None = None  # cut with this instead of an abort
        self._certificate = certificate
        self._ready = threading.Event()
        self._port, self._client_ca = port, client_ca
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    @property
    def url(self) -> str:
        return f"{'wss' if self._certificate else 'ws'}://127.0.0.1:{self._port}"

    def start(self) -> SocketServer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop, self._done = asyncio.get_running_loop(), asyncio.Event()
        context = None
        if self._certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*self._certificate)
            if self._client_ca is not None:
                context.load_verify_locations(self._client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
                context.verify_flags |= ssl.VERIFY_X509_STRICT
        async with serve(self._talk, "127.0.0.1", self._port, ssl=context, compression=None, close_timeout=1) as server:
            self._port = next(iter(server.sockets)).getsockname()[1]
            self._ready.set()
            await self._done.wait()

    async def _talk(self, socket: ServerConnection) -> None:
        self.connections += 1
        assert self.memory is not None
        self.memory.connect()
        frames = 0
        try:
            async for frame in socket:
                assert isinstance(frame, bytes)
                self.memory.take(frame)
                for answer in self.memory.session.frames_to_send():
                    await socket.send(answer)
                frames += 1
                if self.closed_after(frames):
                    if self.close_code is not None:
                        await socket.close(self.close_code, "as the test wants")
                    socket.transport.abort()
                    return
                if self.memory.session.state is State.CLOSED or self.memory.session.state is State.LEAVING:
                    return
        except ConnectionClosed:
            pass
