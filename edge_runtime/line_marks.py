"""Moments of the line that a run which is measured wants to know; otherwise nobody is told and nothing is sent.

When an answer has arrived at the server is told by a ping behind it: pongs come in the order of what they follow, and
the server's library sends them by itself. When an ask begins to come in is told by its first bytes, before anybody
knows what they are. What follows from the moments is left to those who are told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol

from websockets.asyncio.client import ClientConnection


class LineMarks(Protocol):
    """Told of each moment as it is, on the socket's thread."""

    def wants_arrival(self) -> bool:
        """Everything was written out: whether to be told when the server has it. Asked again with each writing."""

    def arrived(self) -> None:
        """The server has what was written out when `wants_arrival` said yes, and its word of that is here."""

    def bytes_came(self) -> None:
        """Some bytes came in."""

    def went_on(self) -> None:
        """What came in was no ask, and nothing has come in part."""

    def connection_ended(self) -> None:
        """Whatever was under way on it will not come."""


def connection_that_tells(marks: LineMarks) -> type[ClientConnection]:
    """The library's connection, which also tells `marks` of bytes."""

    class Connection(ClientConnection):
        def data_received(self, data: bytes) -> None:
            marks.bytes_came()
            super().data_received(data)

    return Connection


async def tell_arrival(socket: ClientConnection, marks: LineMarks) -> None:
    """Let `marks` know when the server has received all that was written so far."""
    pong: Awaitable[float] = await socket.ping()

    def told(done: asyncio.Future[float]) -> None:
        if not done.cancelled() and done.exception() is None:
            marks.arrived()

    asyncio.ensure_future(pong).add_done_callback(told)
