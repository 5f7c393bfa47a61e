"""Signals that stop a command of the device. What a stop then means is each command's own part.

Without an event loop SIGTERM unwinds like any error, with exit code 0. With one, the first signal is told to the loop
and to the worker's thread, and the second ends the program at once (DE-03).
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable

from contract.console import say
from edge_runtime.service import Notifier

STOP_S = 8.0  # how long the worker may take to notice a stop, before the program leaves without it


def stop_on_sigterm() -> None:
    """From now on; call it first of all, from the main thread."""
    signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: object) -> None:
    say("stopped before the work was done; nothing half-written is left")
    raise SystemExit(0)


class StopSignals:
    """SIGTERM and SIGINT alike, for the event loop and for the worker's thread."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """Install the handlers; call from the running event loop."""
        self.asked, self.thread_asked = asyncio.Event(), threading.Event()
        self._say = say
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._take, number)

    def _take(self, number: int) -> None:
        if self.asked.is_set():
            os._exit(128 + number)
        self._say("stopping; a second signal ends edge-run at once")
        Notifier().tell("STOPPING=1")
        self.asked.set()
        self.thread_asked.set()
