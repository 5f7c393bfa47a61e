"""The socket process's side of the torch process: start it, talk frames, notice its end, stop it.

What frames mean is left to `server`; torch is never imported here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from contract import errors
from contract.errors import CutlayerError, TrainingError

from . import pipe
from .pipe import PipeFrame

READ_BYTES = WRITE_BYTES = 1 << 20
_JOINED_BYTES = 256 << 10  # to copy so much costs less than a second system call
_STOP_S = 5.0  # between asking it to stop and killing it; its files are whole at any moment


def environment(threads: int) -> dict[str, str]:
    """Environment of a torch process whose results repeat: thread counts and cuBLAS's workspace must be set before it
    starts. Its idle threads sleep unless told otherwise: spinning ones would slow a shared machine down."""
    package_root = str(Path(__file__).resolve().parent.parent)
    path = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    fixed = dict.fromkeys(names, str(threads)) | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return {"OMP_WAIT_POLICY": "PASSIVE"} | dict(os.environ) | fixed | {"PYTHONPATH": os.pathsep.join(path)}


class TorchChild:
    """A running torch process."""

    def __init__(self, running: asyncio.subprocess.Process) -> None:
        self._running = running
        self._stopping = False
        self._sending = asyncio.Lock()

    @classmethod
    async def start(cls, start: PipeFrame, threads: int) -> TorchChild:
        """Start it and hand it its plan; it says READY when the backend is loaded."""
        running = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "server_runtime.training",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment(threads), limit=READ_BYTES,
            start_new_session=True,  # a terminal's Ctrl-C is the socket process's to pass on
        )  # fmt: skip
        child = cls(running)
        await child.send(start)
        return child

    async def send(self, frame: PipeFrame) -> None:
        """Hand a frame over, whole even if the caller is cancelled; a process that has just ended is reported by
        `frames`."""
        parts = pipe.parts(frame)
        if sum(map(len, parts)) <= _JOINED_BYTES:
            await self._write((b"".join(parts),))
        else:
            await asyncio.shield(self._write(parts))

    async def _write(self, parts: Sequence[bytes | memoryview]) -> None:
        """All of a frame before the next; in pieces, as asyncio copies what the pipe has no room for."""
        assert self._running.stdin is not None
        async with self._sending:
            with contextlib.suppress(ConnectionError):
                for part in parts:
                    for start in range(0, len(part), WRITE_BYTES):
                        self._running.stdin.write(part[start : start + WRITE_BYTES])
                        await self._running.stdin.drain()

    async def frames(self) -> AsyncIterator[PipeFrame]:
        """All that it says, until it is stopped.

        Raises:
            CutlayerError: the error that ended it, as it told; TrainingError when it ended without a word.
        """
        assert self._running.stdout is not None
        unpacker = pipe.Unpacker()
        while data := await self._running.stdout.read(READ_BYTES):
            for frame in unpacker.feed(data):
                if frame.kind == pipe.FAILED and not frame.site:
                    raise _told_error(frame)
                yield frame
        code = await self._running.wait()
        if not self._stopping and code != -signal.SIGTERM:  # a service manager sends it to both
            raise TrainingError(
                f"the training process ended {_how(code)}",
                "start server-run again: it goes on from the last checkpoint; "
                "if it was killed for memory, use a machine with more",
            )

    async def stop(self) -> None:
        """Ask it to end, and kill it when it does not within a few seconds."""
        self._stopping = True
        try:
            await asyncio.wait_for(self._ask_to_end(), _STOP_S)
        except asyncio.TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._running.kill()
            await self._running.wait()
        assert self._running.stdin is not None
        self._running.stdin.close()
        with contextlib.suppress(ConnectionError):
            await self._running.stdin.wait_closed()

    async def _ask_to_end(self) -> None:
        await self.send(PipeFrame(pipe.STOP))  # one that reads no more takes no word of it either
        await self._running.wait()


def _told_error(frame: PipeFrame) -> CutlayerError:
    kind = getattr(errors, str(frame.values["error"]), TrainingError)
    error: CutlayerError = kind(str(frame.values["cause"]), str(frame.values["cure"]))
    return error


def _how(code: int) -> str:
    if code < 0:
        return f"by signal {signal.Signals(-code).name}"
    return f"with exit code {code}"
