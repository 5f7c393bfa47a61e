"""The product's socket process, with a scripted torch process: its server, connections, session, store and pipe.

The torch process is `bench_wire_child`. What is timed here is an exchange as the socket process sees it: from the
ask's arrival at its end of the pipe until the answer is put into the pipe.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from contract.console import run_command, say
from contract.tokens import TokenLayout
from server_runtime import pipe, server, torch_child
from server_runtime.acceptance import Expected
from server_runtime.admission import Terms
from server_runtime.pipe import PipeFrame
from server_runtime.plan import Listen
from server_runtime.roster import read_roster
from server_runtime.server import Job, Server
from server_runtime.store import Store
from server_runtime.torch_child import TorchChild, environment
from tools.bench_wire_trace import SERVER, Trace

RUN, SITE = "bench", "site"
LAYOUT = TokenLayout(1, (14, 14), 1024)  # of ViT-L/16 at 224 pixels
PACKAGE_DIGEST = "0" * 64


class ScriptedChild(TorchChild):
    """The script instead of torch; notes when asks come out of the pipe and answers go into it."""

    def __init__(self, running: asyncio.subprocess.Process) -> None:
        super().__init__(running)
        self._asked_s: dict[str, float] = {}

    @classmethod
    async def start(cls, start: PipeFrame, threads: int) -> ScriptedChild:
        running = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tools.bench_wire_child",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment(threads),
            limit=torch_child.READ_BYTES, start_new_session=True,
        )  # fmt: skip
        child = cls(running)
        await child.send(start)
        return child

    async def send(self, frame: PipeFrame) -> None:
        if frame.kind == pipe.MESSAGE:
            boundary_s = time.perf_counter() - self._asked_s[frame.device]
            frame = replace(frame, values={"boundary_s": boundary_s})
        await super().send(frame)

    async def frames(self) -> AsyncIterator[PipeFrame]:
        async for frame in super().frames():
            if frame.kind == pipe.MESSAGE:
                self._asked_s[frame.device] = time.perf_counter()
            yield frame


def say_warning(text: str) -> None:
    if text.startswith("warning"):  # that it stops when told to is no news
        say(text)


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("root", "keys", "control"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--trace", type=Path)
    options = parser.parse_args()
    trace = Trace(SERVER) if options.trace else None
    server.TorchChild = ScriptedChild  # type: ignore[misc]
    options.root.mkdir(parents=True)
    job = Job(
        root=options.root,
        listen=Listen("localhost", 0, options.keys / "server.pem", options.keys / "server.key"),
        roster=read_roster(options.keys / "roster"),
        terms=Terms(RUN, "bench", "logit-gradient", PACKAGE_DIGEST, kappa=1.0, seed=0),
        expected=Expected(LAYOUT, "logit-gradient"),
        start=PipeFrame(pipe.START, text=str(options.control), values={"site": SITE, "run": RUN}),
        threads=1,
        exit_when_done=False,
    )
    asyncio.run(Server(job, Store(options.root, say), lambda line: print(line, flush=True), say_warning).run())
    if trace is not None:
        trace.write(options.trace)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
