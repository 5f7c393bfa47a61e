"""What systemd is told of a run: that it is ready, how it stands, that it stops, and that work goes on.

Eight lines of datagram instead of a library; without systemd nothing is sent. The unit's text is `unit`'s part.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress

from edge_runtime.standing import Standing

NOTIFY = "NOTIFY_SOCKET"


class Notifier:
    """Sends states to the service manager that started this program, if there is one."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        address = environ.get(NOTIFY, "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._dog = Watchdog()

    def tell(self, *states: str) -> None:
        """Such as READY=1. A manager that does not listen is no fault of the run."""
        if self._address:
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                out.sendto("\n".join(states).encode(), self._address)

    def beat(self, at: Standing) -> None:
        """How it stands; and the watchdog is fed if work went on, or there is none."""
        link = "connected" if at.link.connected else f"offline: {at.link.cause or 'connecting'}"
        does = f"works, step {at.step}" if at.busy else f"waits for {at.waiting_for or 'nothing'}"
        fed = ("WATCHDOG=1",) if self._dog.is_fed(at.step, at.busy) else ()
        self.tell(f"STATUS={link}; {does}"[:400].replace("\n", " "), *fed)


class Watchdog:
    """Fed by work and never by a timer: a worker that hangs is not covered up by a loop that turns."""

    def __init__(self) -> None:
        self._step: int | None = None

    def is_fed(self, step: int, busy: bool) -> bool:
        """Whether something was finished since the last look, or nothing is to be done."""
        went_on = step != self._step
        self._step = step
        return went_on or not busy
