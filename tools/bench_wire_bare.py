"""The peer of the comparison: the websockets library over the same TLS, and nothing else; a server and its clients.

The server times and obeys `bench_wire`; what a client shall do it is told in a text frame. Options of the library are
the product's: no compression, no keep-alive, the same largest frame.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import ssl
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy  # noqa: F401  a client that does anything with tensors has it, and its memory is compared
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve

FRAME_BYTES = 1 << 20
OPTIONS: dict[str, Any] = {"compression": None, "max_size": FRAME_BYTES, "max_queue": 4, "ping_interval": None}


def cut(size_bytes: int) -> list[int]:
    """Sizes of the frames in which so many bytes travel."""
    whole, rest = divmod(size_bytes, FRAME_BYTES)
    return [FRAME_BYTES] * whole + ([rest] if rest else [])


class Disk:
    """Frames to a file, each with an fsync: what durability costs at the least."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("wb")

    def keep(self, frame: bytes) -> None:
        self._stream.write(frame)
        self._stream.flush()
        os.fsync(self._stream.fileno())


# --- client ------------------------------------------------------------------------------------------------------


async def run_client(url: str, ca: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    disk, data = Disk(folder / "frames"), os.urandom(FRAME_BYTES)
    async with connect(url, ssl=ssl.create_default_context(cafile=ca), **OPTIONS) as socket:
        async for text in socket:
            order = json.loads(text)
            for _ in range(order["count"]):
                await answer(socket, order, disk, data)


async def answer(socket: ClientConnection, order: dict[str, Any], disk: Disk, data: bytes) -> None:
    for _ in cut(order["down_bytes"]):
        await socket.recv()
    for size_bytes in cut(order["up_bytes"]):
        frame = data[:size_bytes]
        if order["durable"]:
            await asyncio.get_running_loop().run_in_executor(None, disk.keep, frame)
        await socket.send(frame)


# --- server ------------------------------------------------------------------------------------------------------


class BareServer:
    """Asks all clients at once and times until all have answered."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._disks = ThreadPoolExecutor(max_workers=1)
        self._clients: list[tuple[ServerConnection, Disk]] = []
        self._joined = asyncio.Condition()

    async def take(self, socket: ServerConnection) -> None:
        async with self._joined:
            self._clients.append((socket, Disk(self._folder / str(len(self._clients)))))
            self._joined.notify_all()
        await socket.wait_closed()

    async def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        async with self._joined:
            await self._joined.wait_for(lambda: len(self._clients) >= order["clients"])
        if order["do"] == "join":
            return {}
        chosen = self._clients[: order["clients"]]
        down = os.urandom(min(order["down_bytes"], FRAME_BYTES))
        told = json.dumps({name: order[name] for name in ("count", "down_bytes", "up_bytes", "durable")})
        for socket, _ in chosen:
            await socket.send(told)
        whole_s = []
        for _ in range(order["count"]):
            started_s = time.perf_counter()
            await asyncio.gather(*(self._exchange(*client, order, down) for client in chosen))
            whole_s.append(time.perf_counter() - started_s)
        return {"whole_s": whole_s}

    async def _exchange(self, socket: ServerConnection, disk: Disk, order: dict[str, Any], down: bytes) -> None:
        for size_bytes in cut(order["down_bytes"]):
            await socket.send(down[:size_bytes])
        for _ in cut(order["up_bytes"]):
            frame = await socket.recv()
            if order["durable"]:
                assert isinstance(frame, bytes)
                await asyncio.get_running_loop().run_in_executor(self._disks, disk.keep, frame)


async def run_server(keys: Path, folder: Path, control: Path) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(keys / "server.pem", keys / "server.key")
    bare = BareServer(folder)
    async with serve(bare.take, "127.0.0.1", 0, ssl=context, **OPTIONS) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        print(f"listening on wss://localhost:{port}", flush=True)
        reader, writer = await asyncio.open_unix_connection(str(control))
        while line := await reader.readline():
            writer.write(json.dumps(await bare.obey(json.loads(line))).encode() + b"\n")
            await writer.drain()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("server", "client"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--keys", type=Path, required=True)
    parser.add_argument("--control", type=Path)
    parser.add_argument("--server")
    options = parser.parse_args()
    if options.role == "server":
        asyncio.run(run_server(options.keys, options.folder, options.control))
    else:
        asyncio.run(run_client(options.server, options.keys / "ca.pem", options.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
