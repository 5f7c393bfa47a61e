"""How the end of the torch process is told; small Python programs stand in for it."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from contract.errors import CutlayerError, PackageError, TrainingError
from server_runtime import pipe, torch_child
from server_runtime.pipe import PipeFrame
from server_runtime.torch_child import TorchChild, environment

HEAD = "import os, signal, sys; from server_runtime import pipe; from server_runtime.pipe import PipeFrame, pack; "
TORN = {"error": "PackageError", "cause": "it is torn", "cure": "mend it"}
SAY = "sys.stdout.buffer.write(pack({})); sys.stdout.flush(); "


async def child_of(code: str) -> TorchChild:
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HEAD + code, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env=environment(1),
    )  # fmt: skip
    return TorchChild(running)


def frames_of(code: str) -> list[PipeFrame]:
    async def run() -> list[PipeFrame]:
        child = await child_of(code)
        try:
            return [frame async for frame in child.frames()]
        finally:
            await child.stop()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", TrainingError, "signal SIGKILL"),
        ("sys.exit(9)", TrainingError, "exit code 9"),
        ("", TrainingError, "exit code 0"),
        (SAY.format(f"PipeFrame(pipe.FAILED, values={TORN})"), PackageError, "it is torn"),
    ],
)
def test_its_end_is_an_error_with_its_own_exit_code(code: str, error: type[CutlayerError], text: str) -> None:
    with pytest.raises(error, match=text):
        frames_of(code)


def test_a_site_that_failed_does_not_end_it() -> None:
    async def run() -> PipeFrame:
        told = 'PipeFrame(pipe.FAILED, "clinic", values={"cause": "nan", "cure": "lower"})'
        child = await child_of(SAY.format(told) + "sys.stdin.buffer.read(1)")
        async for frame in child.frames():
            await child.stop()
            return frame
        raise AssertionError

    assert asyncio.run(run()).site == "clinic"


def test_de_03_sigterm_to_both_is_no_error() -> None:
    assert frames_of("os.kill(os.getpid(), signal.SIGTERM)") == []


def test_it_is_stopped_by_a_frame() -> None:
    async def run() -> None:
        child = await child_of("next(pipe.Unpacker().feed(sys.stdin.buffer.read1(1 << 16)))")
        await child.stop()
        assert [frame async for frame in child.frames()] == []

    asyncio.run(run())


WAITS = "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1}); " + SAY.format("PipeFrame(pipe.READY)")
READS = """
signal.sigwait({signal.SIGUSR1})
unpacker = pipe.Unpacker()
while data := os.read(0, 1 << 16):
    for frame in unpacker.feed(data):
        sys.stdout.buffer.write(pack(PipeFrame(frame.kind, frame.site, text=str(len(frame.message)))))
        sys.stdout.flush()
        if frame.kind == pipe.STOP: sys.exit(0)
"""


async def amid_a_large_frame(child: TorchChild) -> asyncio.Task[None]:
    """A frame that is under way to a child that does not read yet."""
    async for _ in child.frames():
        break
    sending = asyncio.create_task(child.send(PipeFrame(pipe.MESSAGE, "clinic", message=bytes(8 << 20))))
    assert child._running.stdin is not None
    while not child._running.stdin.transport.get_write_buffer_size():
        await asyncio.sleep(0)
    return sending


def test_a_frame_is_handed_over_whole_even_if_its_sender_is_cancelled() -> None:
    async def run() -> None:
        child = await child_of(f"exec({WAITS + chr(10) + READS!r})")
        sending = await amid_a_large_frame(child)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        after = asyncio.create_task(child.send(PipeFrame(pipe.LEFT, "clinic")))
        child._running.send_signal(signal.SIGUSR1)
        come = []
        async for frame in child.frames():
            come.append((frame.kind, frame.text))
            if len(come) == 2:
                break
        assert come == [(pipe.MESSAGE, str(8 << 20)), (pipe.LEFT, "0")]
        await after
        await child.stop()

    asyncio.run(asyncio.wait_for(run(), 60.0))


def test_one_that_reads_no_more_is_killed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_child, "_STOP_S", 0.3)

    async def run() -> None:
        child = await child_of(WAITS + "signal.sigwait({signal.SIGUSR1})")
        sending = await amid_a_large_frame(child)
        await child.stop()
        assert child._running.returncode == -signal.SIGKILL
        await sending  # the pipe is broken, which `frames` would tell

    asyncio.run(asyncio.wait_for(run(), 60.0))


def test_threads_and_import_path_are_fixed_before_it_starts() -> None:
    fixed = environment(3)
    assert fixed["OMP_NUM_THREADS"] == "3"
    assert Path(fixed["PYTHONPATH"].split(":")[0]) == Path(__file__).parents[2]
