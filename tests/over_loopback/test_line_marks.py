"""Moments of the line, told on a real one: that an answer arrived, and that something begins to come in."""

from __future__ import annotations

import asyncio

from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve

from edge_runtime.line_marks import connection_that_tells, tell_arrival

ANSWER, ASK = bytes(3 << 20), bytes(5 << 20)
LIMIT_S = 60.0


class Heard:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.arrivals, self.pieces = 0, 0
        self.has_arrived = asyncio.Event()

    def wants_arrival(self) -> bool:
        return True

    def arrived(self) -> None:
        self.arrivals += 1
        self.has_arrived.set()

    def bytes_came(self) -> None:
        self.pieces += 1

    def went_on(self) -> None:
        raise AssertionError("that is the client's to tell")

    connection_ended = went_on


async def talk() -> None:
    heard, reading = Heard(), asyncio.Event()

    async def server(socket: ServerConnection) -> None:
        socket.transport.pause_reading()
        reading.set()
        await resumed.wait()
        socket.transport.resume_reading()
        assert await socket.recv() == ANSWER
        await asked.wait()
        await socket.send(ASK)
        await socket.wait_closed()

    resumed, asked = asyncio.Event(), asyncio.Event()
    limits = {"compression": None, "max_size": None, "ping_interval": None}
    async with serve(server, "127.0.0.1", 0, **limits) as listening:  # type: ignore[arg-type]
        port = listening.sockets[0].getsockname()[1]
        kind = connection_that_tells(heard)
        async with connect(f"ws://127.0.0.1:{port}", create_connection=kind, **limits) as socket:  # type: ignore[arg-type]
            await reading.wait()
            sending = asyncio.create_task(socket.send(ANSWER))
            await asyncio.sleep(0)
            assert not heard.arrivals
            resumed.set()
            await sending
            await tell_arrival(socket, heard)
            await heard.has_arrived.wait()
            before = heard.pieces
            asked.set()
            assert await socket.recv() == ASK
            assert heard.pieces - before > 1 and heard.arrivals == 1  # told before the whole of it was here
            gone = Heard()
            socket.transport.pause_reading()
            await tell_arrival(socket, gone)
            socket.transport.abort()
        assert not gone.arrivals  # a line that broke tells nothing


def test_arrival_is_told_when_the_server_has_it_and_a_beginning_before_the_end() -> None:
    asyncio.run(asyncio.wait_for(talk(), LIMIT_S))
