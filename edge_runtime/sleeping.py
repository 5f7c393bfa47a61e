"""A rest that the server gave this device: waited through, or slept through by a command of the owner's.

The command (`sleep_command`, such as `rtcwake -m mem -s`) gets whole seconds as its last argument; no shell reads it.
Where it fails, that is told and the rest is waited through, as it is where the command comes back early. Time counts
on while the machine sleeps. When to rest is `client`'s part.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable
from contextlib import suppress

REST_MOST_S = 86_400.0  # whatever the server says: it may not have a device powered down for years
CHECK_S = 1.0  # a machine that slept must notice soon that its time is over: its timers did not go on meanwhile
LATE_S = 60.0  # a command that takes so much longer than it was told is ended
STDERR = 2


def since_boot_s() -> float:
    """Seconds of a clock that goes on while the machine sleeps, where it has one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Sleeper:
    """Spends the rests of one run."""

    def __init__(
        self, command: tuple[str, ...], say: Callable[[str], None], clock: Callable[[], float] = since_boot_s
    ) -> None:
        """Without a command it waits."""
        self._command, self._say, self._clock = command, say, clock

    async def rest(self, seconds: float, stop: asyncio.Event) -> None:
        """Returns after so many seconds, a day at most, or when `stop` is set."""
        seconds = min(seconds, REST_MOST_S)
        ends_s = self._clock() + seconds
        if self._command and seconds >= 1.0:
            await self._run((*self._command, str(int(seconds))), ends_s, stop)
        while not stop.is_set() and (left_s := ends_s - self._clock()) > 0.0:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stop.wait(), min(CHECK_S, left_s))

    async def _run(self, words: tuple[str, ...], ends_s: float, stop: asyncio.Event) -> None:
        name = shlex.join(words)
        try:  # what it says goes to the log; stdout is for this program's own document
            command = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.DEVNULL, stdout=STDERR)
        except OSError as error:
            self._say(f"sleep_command {name}: {error.strerror}; waiting instead")
            return
        ended, stopping = asyncio.create_task(command.wait()), asyncio.create_task(stop.wait())
        try:
            while not (ended.done() or stop.is_set() or self._clock() > ends_s + LATE_S):
                await asyncio.wait((ended, stopping), timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not ended.done():
                with suppress(ProcessLookupError):
                    command.terminate()
        if not stop.is_set() and (not ended.done() or ended.result()):
            how = f"ended with exit code {ended.result()}" if ended.done() else "has not ended in time"
            self._say(f"sleep_command {name} {how}; waiting instead")
        if not ended.done():
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(ended, CHECK_S)
