"""Signals while an event loop runs: the first is told to the loop and to the worker's thread, the second ends the
program at once (DE-03). What a stop then means is each command's own part."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable

from edge_runtime.service import Notifier

STOP_S = 8.0  # how long the worker may take to notice a stop, before the program leaves without it


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
