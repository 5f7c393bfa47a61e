"""The product's socket process with a torch process that says nothing, for many idle devices.

What is measured is `bench_fleet`'s affair.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from contract.console import run_command, say
from server_runtime import pipe, server
from server_runtime.acceptance import Expected
from server_runtime.admission import Terms
from server_runtime.pipe import PipeFrame
from server_runtime.plan import Listen
from server_runtime.roster import read_roster
from server_runtime.server import Job, Server
from server_runtime.store import Store

PACKAGE_DIGEST = "0" * 64
HEARTBEAT_S = 10.0


class SilentChild:
    """In the torch process's place: it is ready, asks nothing, and passes over what it is told."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()

    @classmethod
    async def start(cls, start: PipeFrame, threads: int) -> SilentChild:
        return cls()

    async def send(self, frame: PipeFrame) -> None:
        pass

    async def frames(self) -> AsyncIterator[PipeFrame]:
        yield PipeFrame(pipe.READY)
        await self._ended.wait()

    async def stop(self) -> None:
        self._ended.set()


def main() -> int:
    root, keys = Path(sys.argv[1]), Path(sys.argv[2])
    server.TorchChild = SilentChild  # type: ignore[misc,assignment]
    root.mkdir(parents=True)
    job = Job(
        root=root,
        listen=Listen("localhost", 0, keys / "server.pem", keys / "server.key"),
        roster=read_roster(keys / "roster"),
        terms=Terms("fleet", "bench", "logit-gradient", PACKAGE_DIGEST, kappa=1.0, seed=0, heartbeat_s=HEARTBEAT_S),
        expected=Expected(None, "logit-gradient"),
        start=PipeFrame(pipe.START),
        threads=1,
        exit_when_done=False,
    )
    asyncio.run(Server(job, Store(root, say), lambda line: print(line, flush=True), say).run())
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
