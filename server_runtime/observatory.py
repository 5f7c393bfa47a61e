"""Shows how a run stands: `status.json` in its directory, and over HTTP `/metrics`, `/status` and a page for people.

What there is to show is `status`'s part. It is read-only and speaks plain HTTP: on another address than this machine's
whoever reaches the port reads names of sites and devices, so put a proxy with TLS and a password in front.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from contract import exposition
from contract.errors import ConfigError

from .status import Standing, families
from .status_page import PAGE

STATUS_FILE = "status.json"
WRITE_S = 5.0  # between two versions of the file
REQUEST_S = 5.0  # that a request may take


def newest_metrics(path: Path, sites: tuple[str, ...], tail_bytes: int = 1 << 16) -> dict[str, dict[str, Any]]:
    """Each site's last line of figures among the file's last bytes; passed over are a line that is being written, and
    one that tells the end, which has none."""
    found: dict[str, dict[str, Any]] = {site: {} for site in sites}
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - tail_bytes))
            lines = stream.read().splitlines()
    except OSError:
        return found
    for line in lines:
        with contextlib.suppress(ValueError):
            values = json.loads(line)
            if isinstance(values, dict) and values.get("site") in found and "ended" not in values:
                found[values["site"]] = values
    return found


def write_status(root: Path, standing: Standing) -> None:
    """Replace the file; not synced, as it outlives no server, and a full disk is the store's news."""
    path, draft = root / STATUS_FILE, root / (STATUS_FILE + ".part")
    with contextlib.suppress(OSError):
        draft.write_text(json.dumps(standing.document()) + "\n", "utf-8")
        os.replace(draft, path)


@contextlib.asynccontextmanager
async def shown(host: str, port: int, look: Callable[[], Standing]) -> AsyncIterator[int]:
    """Answer requests while the block lasts; gives the port.

    Raises: ConfigError where it cannot be listened on.
    """
    pages: exposition.Pages = {
        "/": lambda: ("text/html; charset=utf-8", PAGE),
        "/metrics": lambda: (exposition.CONTENT_TYPE, exposition.to_text(families(look()))),
        "/status": lambda: ("application/json", json.dumps({"schema_version": 1, **look().document()}) + "\n"),
    }

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), REQUEST_S)
            writer.write(exposition.answer(head, pages))
            await asyncio.wait_for(writer.drain(), REQUEST_S)
        writer.close()

    try:
        server = await asyncio.start_server(converse, host, port, limit=exposition.REQUEST_BYTES)
    except OSError as error:
        raise ConfigError(
            f"cannot show metrics on {host}:{port}: {error.strerror}", "choose another --metrics HOST:PORT"
        ) from error
    async with server:
        yield server.sockets[0].getsockname()[1]
