"""How the benchmark tells its programs what to do: lines of JSON over a Unix socket, one order, one answer.

What the orders mean is left to the programs: `bench_wire_child` and `bench_wire_bare`.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

WAIT_S = 120.0  # for one answer

Order = dict[str, Any]


class Control:
    """The benchmark's end: it listens before the program is started, and then gives orders."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._listener.settimeout(WAIT_S)

    def accept(self) -> None:
        """Wait until the program is there."""
        connected, _ = self._listener.accept()
        connected.settimeout(WAIT_S)
        self._stream = connected.makefile("rw")

    def ask(self, do: str, **values: object) -> Order:
        """Give an order and wait for the answer."""
        self._stream.write(json.dumps({"do": do, **values}) + "\n")
        self._stream.flush()
        line = self._stream.readline()
        if not line:
            raise RuntimeError(f"a program of the benchmark ended while it was to {do}")
        answer: Order = json.loads(line)
        return answer
