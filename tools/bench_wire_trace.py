"""Where a program of the product spends an exchange: time inside chosen functions, and waits between two of them.

Functions are wrapped from outside; time in a wrapped function that another one calls counts for the inner one only.
A wait is from the return of one function to the call of another, such as from queueing work to its thread's start.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Plan:
    """Shares by name: functions as "module:Class.name", waits as (what returns, what is called)."""

    functions: Mapping[str, tuple[str, ...]]
    waits: Mapping[str, tuple[str, str]]


_COMMON = {
    "codec: decode": ("contract.codec:decode",),
    "codec: prepare and frame": ("contract.codec:prepare", "contract.codec:Payload.frame", "contract.codec:split"),
    "codec: chunks": ("contract.codec:Assembler.add",),
    "session": ("contract.session:Session.receive", "contract.session:Session.send",
                "contract.session:Session.frames_to_send", "contract.session:Session.stored"),
    "TLS": ("ssl:SSLObject.read", "ssl:SSLObject.write"),
    "websockets: receive": ("websockets.protocol:Protocol.receive_data",),
    "websockets: send": ("websockets.protocol:Protocol.send_binary", "websockets.protocol:Protocol.data_to_send"),
    "event loop: system calls": ("socket:socket.send", "socket:socket.recv"),
    "event loop: waits for the other side": ("selectors:EpollSelector.select",),
}  # fmt: skip
DEVICE = Plan(
    _COMMON
    | {
        "spool": tuple(f"edge_runtime.spool:Spool.{name}" for name in ("append", "read", "acknowledge")),
        "stand-in for the worker": ("__main__:Answers.answer",),
    },
    {
        "hand-off to the worker's thread": (
            "edge_runtime.delivery:Delivery.take",
            "__main__:Answers.answer",
        ),
        "hand-off back to the socket": (
            "edge_runtime.spool:Spool.append",
            "edge_runtime.conduct:Conduct.frames_to_send",
        ),
    },
)
SERVER = Plan(
    _COMMON
    | {
        "SQLite": ("server_runtime.store:Store.note_received",),
        "pipe": ("server_runtime.pipe:pack", "server_runtime.pipe:Unpacker._frame"),
    },
    {
        "from the pipe to the first byte sent": (
            "server_runtime.connection:Connection.post",
            "contract.session:Session.send",
        )
    },
)


class Trace:
    """Wraps the plan's functions in this process; those that a version of the product lacks are left out."""

    def __init__(self, plan: Plan) -> None:
        self._spent_s: dict[str, float] = defaultdict(float)
        self._stack = threading.local()
        self._returned_s: dict[str, float] = {}
        self._begins = {first: share for share, (first, _) in plan.waits.items()}
        self._ends = {last: share for share, (_, last) in plan.waits.items()}
        places = {place: share for share, places in plan.functions.items() for place in places}
        for place in {**places, **self._begins, **self._ends}:
            self._wrap(place, places.get(place))

    def write(self, path: Path) -> None:
        """Seconds by share since the start."""
        path.write_text(json.dumps(self._spent_s))

    def _wrap(self, place: str, share: str | None) -> None:
        module_name, _, names = place.partition(":")
        owner: Any = importlib.import_module(module_name)
        *parents, name = names.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        original = getattr(owner, name, None)
        if original is None:
            return
        wrapped = self._timed(place, share, original)
        setattr(owner, name, wrapped)
        for module in [module for key, module in sys.modules.items() if key.startswith(("edge_", "server_", "tools"))]:
            if module.__dict__.get(name) is original:  # imported by name
                setattr(module, name, wrapped)

    def _timed(self, place: str, share: str | None, original: Callable[..., Any]) -> Callable[..., Any]:
        begins, ends = self._begins.get(place), self._ends.get(place)

        @functools.wraps(original)
        def timed(*arguments: Any, **named: Any) -> Any:
            if ends is not None and ends in self._returned_s:
                self._spent_s[ends] += time.perf_counter() - self._returned_s.pop(ends)
            inner: list[float] = self._stack.__dict__.setdefault("inner_s", [0.0])
            inner.append(0.0)
            started_s = time.perf_counter()
            try:
                return original(*arguments, **named)
            finally:
                spent_s, inside_s = time.perf_counter() - started_s, inner.pop()
                if share is not None:
                    self._spent_s[share] += spent_s - inside_s
                    inner[-1] += spent_s
                else:
                    inner[-1] += inside_s
                if begins is not None:
                    self._returned_s[begins] = time.perf_counter()

        return timed
