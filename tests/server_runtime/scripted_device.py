"""A device of a few lines for tests: the contract's session over a real socket, driven by hand."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import ssl
import time
from pathlib import Path
from types import TracebackType

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from websockets.asyncio.client import ClientConnection, connect

from contract import signature
from contract.codec import LIMITS
from contract.messages import Challenge, Heartbeat, Hello, Message, Proof, Refuse, Welcome
from contract.session import Acknowledged, Received, Role, Session, SessionLimits, State


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A throw-away self-signed certificate for 127.0.0.1 and its key, as PEM files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.timezone.utc)
    addresses = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "server.pem", folder / "server.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths


class Refused(Exception):
    """The server said no."""

    def __init__(self, refuse: Refuse) -> None:
        super().__init__(f"{refuse.code}: {refuse.cause}")
        self.code = refuse.code


class ScriptedDevice:
    """One connection of one device; as a context manager it has shaken hands."""

    def __init__(
        self,
        url: str,
        hello: Hello,
        key: signature.PrivateKey,
        *,
        certificate: Path | None = None,
        next_seq: int = 1,
        frame_bytes: int = LIMITS.frame_bytes,
    ) -> None:
        self.url, self.hello, self.key = url, hello, key
        self.tls = None if certificate is None else ssl.create_default_context(cafile=str(certificate))
        limits = SessionLimits(frame_bytes=frame_bytes)
        self.session = Session(Role.DEVICE, limits, received_seq=hello.last_seq, next_seq=next_seq)
        self.acknowledged = 0
        self.statuses: list[str] = []
        self.inbox: list[Message] = []

    async def __aenter__(self) -> ScriptedDevice:
        self.socket: ClientConnection = await connect(
            self.url, ssl=self.tls, compression=None, max_size=LIMITS.frame_bytes
        )
        await self.send(self.hello)
        challenge = await self.receive()
        assert isinstance(challenge, Challenge)
        tls = self.socket.transport.get_extra_info("ssl_object")
        binding = hashlib.sha256(tls.getpeercert(binary_form=True)).digest() if tls else b""
        payload = signature.proof_payload(challenge.nonce, binding, self.hello.device, self.hello.session)
        await self.send(Proof(signature.sign_raw(self.key, payload)))
        welcome = await self.receive()
        assert isinstance(welcome, Welcome)
        self.welcome = welcome
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.socket.close()

    async def send(self, message: Message) -> int:
        """Send one message now; its number."""
        number = self.session.send(message)
        await self.flush()
        return number

    async def flush(self) -> None:
        for frame in self.session.frames_to_send():
            await self.socket.send(frame)

    async def receive(self) -> Message:
        """The next message that is not a heartbeat; whatever comes is acknowledged."""
        while not self.inbox:
            await self._take()
        return self.inbox.pop(0)

    async def wait_for_ack(self, seq: int) -> None:
        """Until the server has stored everything up to `seq`."""
        while self.acknowledged < seq:
            await self._take()

    async def _take(self) -> None:
        frame = await self.socket.recv()
        assert isinstance(frame, bytes)
        for event in self.session.receive(frame, time.monotonic()):
            if isinstance(event, Acknowledged):
                self.acknowledged = event.seq
            elif isinstance(event, Received) and isinstance(event.message, Heartbeat):
                self.statuses.append(event.message.waiting_for)
            elif isinstance(event, Received):
                if isinstance(event.message, Refuse):
                    raise Refused(event.message)
                if event.seq:
                    self.session.stored(event.seq)
                self.inbox.append(event.message)
        if self.session.state is State.OPEN:
            await self.flush()
