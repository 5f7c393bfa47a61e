"""Bad weather between real devices and a real server: slow, cut, silent and flapping links, and altered messages.

`TcpProxy` carries bytes and knows nothing of them, so TLS goes through it from end to end. `FrameProxy` speaks TLS and
WebSockets on both sides (with the server's own certificate, so that the channel binding holds) and hands every message
to a function of the test. Both run on a thread of their own; what comes of the weather is for the tests to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

HOST = "127.0.0.1"
PIECE_BYTES = 2048
TO_SERVER, TO_DEVICE = "to server", "to device"


@dataclass(frozen=True)
class Cut:
    """When a connection ends: so many bytes to the server, or seconds, after it began; by RST, or by FIN."""

    after_bytes: int | None = None
    after_s: float | None = None
    reset: bool = True


@dataclass
class Weather:
    """How a link is; a test may change any of it at any moment."""

    bytes_per_s: float | None = None  # each way
    delay_s: float = 0.0  # before each piece
    refuses: bool = False  # new connections are reset at once
    swallowed: set[str] = field(default_factory=set)  # directions in which bytes vanish
    cut: Callable[[int], Cut | None] = lambda number: None  # of the connection with this number, from 1 on


def flapping(seed: int, shortest_s: float, longest_s: float, times: int) -> Callable[[int], Cut | None]:
    """The first `times` connections are cut at random moments, by RST and FIN alike."""
    rng = random.Random(seed)

    def cut(number: int) -> Cut | None:
        drawn = Cut(after_s=rng.uniform(shortest_s, longest_s), reset=rng.random() < 0.5)
        return drawn if number <= times else None

    return cut


class _Thread:
    """An event loop on a thread, from `start` to `stop`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)  # type: ignore[arg-type]

    def stop(self) -> None:
        async def end_tasks() -> None:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self.call(end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@dataclass
class _Carried:
    """A connection: how it ends when it is cut, and directions of which bytes have vanished."""

    reset: bool
    lost: set[str] = field(default_factory=set)


class TcpProxy:
    """A port that leads to `upstream`, another port of this machine, through `weather`."""

    def __init__(self, upstream: int, weather: Weather, port: int = 0) -> None:
        self.weather = weather
        self.upstream = upstream
        self.port = port
        self.connections = 0
        self.cuts = 0
        self.carried_bytes = {TO_SERVER: 0, TO_DEVICE: 0}
        self.swallowing = 0  # connections of which bytes have vanished: these never recover
        self._carried: dict[asyncio.Task[None], _Carried] = {}
        self._thread = _Thread()

    @property
    def standing(self) -> int:
        """Connections that both sides have open, and of which no byte has vanished."""
        return sum(not carried.lost for carried in list(self._carried.values()))

    def drop(self, reset: bool = True) -> None:
        """End every connection that stands, now: by RST, or by FIN."""
        self._thread.call(self._drop(reset))

    async def _drop(self, reset: bool) -> None:
        dropped = list(self._carried)
        for connection in dropped:
            self._carried[connection].reset = reset
            connection.cancel()
        await asyncio.gather(*dropped, return_exceptions=True)

    def __enter__(self) -> TcpProxy:
        self._thread.start()
        self._thread.call(self._listen())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.call(self._close())
        self._thread.stop()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._carry, HOST, self.port, limit=PIECE_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, both ways, until an end or the cut."""
        self.connections += 1
        if self.weather.refuses:
            _reset(writer)
            return
        cut = self.weather.cut(self.connections) or Cut()
        try:
            up_reader, up_writer = await asyncio.open_connection(HOST, self.upstream, limit=PIECE_BYTES)
        except OSError:
            _reset(writer)
            return
        connection = asyncio.current_task()
        assert connection is not None
        carried = self._carried[connection] = _Carried(cut.reset)
        was_cut, lost = True, carried.lost
        pumps = [
            asyncio.create_task(self._pump(reader, up_writer, TO_SERVER, lost, cut.after_bytes)),
            asyncio.create_task(self._pump(up_reader, writer, TO_DEVICE, lost, None)),
        ]
        try:
            done, _ = await asyncio.wait(pumps, timeout=cut.after_s, return_when=asyncio.FIRST_COMPLETED)
            was_cut = not done or any(task.result() for task in done)
        except asyncio.CancelledError:
            pass  # dropped
        finally:
            del self._carried[connection]
            for task in pumps:
                task.cancel()
            self.cuts += was_cut
            for each in (writer, up_writer):
                if was_cut and carried.reset:
                    _reset(each)
                else:
                    each.close()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        direction: str,
        lost: set[str],
        most_bytes: int | None,
    ) -> bool:
        """Carry one direction to its end; True when `most_bytes` were reached. A direction that lost bytes stays lost,
        and nobody hears of its end."""
        left = most_bytes
        while True:
            try:
                piece = await reader.read(PIECE_BYTES)
            except OSError:
                piece = b""
            if direction in self.weather.swallowed | lost:
                self.swallowing += not lost
                lost |= self.weather.swallowed
                if not piece:
                    await asyncio.Event().wait()
                continue
            if not piece:
                return False
            if self.weather.bytes_per_s or self.weather.delay_s:
                paced_s = len(piece) / self.weather.bytes_per_s if self.weather.bytes_per_s else 0.0
                await asyncio.sleep(paced_s + self.weather.delay_s)
            if left is not None and len(piece) >= left:
                writer.write(piece[:left])
                return True
            writer.write(piece)
            self.carried_bytes[direction] += len(piece)
            left = None if left is None else left - len(piece)
            with contextlib.suppress(OSError):
                await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, so that whatever was on its way is lost."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class Mute:
    """A port that takes connections, with TLS where a certificate is given, and never says a word."""

    def __init__(self, certificate: tuple[Path, Path] | None = None) -> None:
        self.port = 0
        self.connections = 0
        self._context = server_context(certificate) if certificate else None
        self._thread = _Thread()

    def __enter__(self) -> Mute:
        self._thread.start()
        self._thread.call(self._listen())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.call(self._close())
        self._thread.stop()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._hear, HOST, 0, ssl=self._context)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(OSError):
            while await reader.read(PIECE_BYTES):
                pass
        writer.close()


# (direction, connection number from 1, message number of that direction from 1, message) -> what is sent instead
Tamper = Callable[[str, int, int, bytes], Sequence[bytes]]


def server_context(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    return context


class FrameProxy:
    """A wss:// port that hands each message between a device and the server to `tamper`."""

    def __init__(self, upstream: int, certificate: tuple[Path, Path], authority: Path, tamper: Tamper) -> None:
        """`certificate` is the server's own with its key, `authority` what signed it."""
        self.port = 0
        self.connections = 0
        self.closed: list[tuple[str, int | None, str]] = []  # who hung up first, its close code and reason
        self._upstream = f"wss://localhost:{upstream}"
        self._certificate, self._authority, self._tamper = certificate, authority, tamper
        self._thread = _Thread()

    def __enter__(self) -> FrameProxy:
        self._thread.start()
        self._thread.call(self._listen())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.call(self._close())
        self._thread.stop()

    async def _listen(self) -> None:
        self._server = await serve(
            self._carry, HOST, 0, ssl=server_context(self._certificate), compression=None, max_size=None,
            ping_interval=None, close_timeout=1,
        )  # fmt: skip
        self.port = next(iter(self._server.sockets)).getsockname()[1]

    async def _close(self) -> None:
        self._server.close(close_connections=False)

    async def _carry(self, device: ServerConnection) -> None:
        self.connections += 1
        number = self.connections
        trusted = ssl.create_default_context(cafile=self._authority)
        try:
            server = await connect(
                self._upstream, ssl=trusted, compression=None, max_size=None, ping_interval=None, close_timeout=1,
                proxy=None,
            )  # fmt: skip
        except OSError:
            return
        pumps = {
            asyncio.create_task(self._pump(device, server, TO_SERVER, number)): (device, "device"),
            asyncio.create_task(self._pump(server, device, TO_DEVICE, number)): (server, "server"),
        }
        done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        leaver, who = pumps[next(iter(done))]
        self.closed.append((who, leaver.close_code, leaver.close_reason or ""))
        for task in pumps:
            task.cancel()
        code, reason = leaver.close_code or 1006, leaver.close_reason or ""
        for each in (device, server):
            await each.close(code if code not in (1005, 1006, 1015) else 1000, reason)

    async def _pump(
        self, source: ServerConnection | ClientConnection, target: ServerConnection | ClientConnection,
        direction: str, connection: int,
    ) -> None:  # fmt: skip
        count = 0
        with contextlib.suppress(ConnectionClosed):
            async for message in source:
                assert isinstance(message, bytes)
                count += 1
                for each in self._tamper(direction, connection, count, message):
                    await target.send(each)
