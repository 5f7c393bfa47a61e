"""Tells how a run stands while it goes on: a file in the state directory, and over HTTP /metrics and /status.

What is told is `standing`'s part, reading the file is `status_file`'s. The file is written when something turned, else
once a minute and without fsync: a card wears out by writing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from contract import exposition
from contract.errors import ConfigError
from edge_runtime.service import Notifier
from edge_runtime.standing import Standing, families

STATUS_FILE = "status.json"
LOOK_S = 2.0
WRITE_S = 60.0
REQUEST_S = 5.0


class Witness:
    """One run's."""

    def __init__(self, root: Path, look: Callable[[], Standing], notifier: Notifier | None = None) -> None:
        self._path, self._look, self._notifier = root / STATUS_FILE, look, notifier or Notifier()
        self._turn: object = None
        self._written_s = float("-inf")

    async def keep(self) -> None:
        """For as long as the run lasts."""
        self._notifier.tell("READY=1")
        while True:
            at = self._look()
            self.write_if_turned(at)
            self._notifier.beat(at)
            await asyncio.sleep(LOOK_S)

    def write_if_turned(self, at: Standing) -> None:
        """Write when the link, the run, or whether there is work is other than last time, or a minute has passed."""
        turn = (
            at.link.connected,
            at.link.cause,
            at.run,
            at.busy,
            at.server_says.split(" ")[0],
            at.images_acknowledged == at.images,
        )
        if turn == self._turn and at.taken_s - self._written_s < WRITE_S:
            return
        self._turn, self._written_s = turn, at.taken_s
        self._write(at)

    def write(self) -> None:
        """Now, whatever was written last."""
        self._write(self._look())

    def _write(self, at: Standing) -> None:
        draft = self._path.with_name(STATUS_FILE + ".partial")
        with contextlib.suppress(OSError):  # a full disk must not end a run that needs none
            draft.write_text(json.dumps(at.document()) + "\n", "utf-8")
            os.replace(draft, self._path)

    @contextlib.asynccontextmanager
    async def shown(self, address: tuple[str, int] | None, say: Callable[[str], None]) -> AsyncIterator[None]:
        """Answer requests while the block lasts; nothing where no address was given.

        Raises: ConfigError where it cannot be listened on.
        """
        if address is None:
            yield
            return
        pages: exposition.Pages = {
            "/metrics": lambda: (exposition.CONTENT_TYPE, exposition.to_text(families(self._look()))),
            "/status": lambda: ("application/json", json.dumps(self._look().document()) + "\n"),
        }

        async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(
                OSError, asyncio.TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError
            ):
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), REQUEST_S)
                writer.write(exposition.answer(head, pages))
                await asyncio.wait_for(writer.drain(), REQUEST_S)
            writer.close()

        host, port = address
        try:
            server = await asyncio.start_server(converse, host, port, limit=exposition.REQUEST_BYTES)
        except OSError as error:
            raise ConfigError(
                f"cannot show metrics on {host}:{port}: {error.strerror}", "choose another port"
            ) from error
        async with server:
            say(f"metrics on http://{host}:{server.sockets[0].getsockname()[1]}/metrics")
            yield
