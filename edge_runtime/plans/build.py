"""Builds one plan in a child process, attempt after attempt, and tells how far it is.

The child may die of anything; this process and its spool do not. A plan reaches its place by `store`, not here.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from contract.canonical import CanonicalError, decode, encode, to_json
from contract.errors import EngineError
from edge_runtime.plans.child import Outcome, Request
from edge_runtime.plans.ladder import RUNGS, Ended, Failure, Rung, explain
from edge_runtime.plans.progress import remaining_s

POLL_S = 0.2  # how long a stop may go unseen
SAY_S = 10.0  # between two lines of progress
ERRORS_BYTES = 64 << 10  # of what the child says, from the end
ROOT = Path(__file__).parents[2]  # where the child finds this package

Say = Callable[[str], None]


def build_plan(request: Request, check: Callable[[], None], say: Say, rungs: Sequence[Rung] = RUNGS) -> Outcome:
    """Build with less and less memory until a build succeeds; the plan then lies at `request.plan`.

    `check` raises to stop. Raises: EngineError with the last attempt's reason; what `check` raises.
    """
    failure: Failure | None = None
    for rung in rungs:
        attempt = replace(request, workspace_share=rung.workspace_share, level=rung.level, few_tactics=rung.few_tactics)
        done, ended = run_child(attempt, check, say)
        if done is not None:
            return done
        Path(request.plan).unlink(missing_ok=True)
        failure = explain(ended)
        if not failure.is_memory:
            break
        say(f"{failure.cause}; trying with less" if rung is not rungs[-1] else failure.cause)
    assert failure is not None
    raise EngineError(failure.cause, failure.cure)


def run_child(request: Request, check: Callable[[], None], say: Say) -> tuple[Outcome | None, Ended]:
    """One attempt, and how it ended."""
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "edge_runtime.plans.child", to_json(encode(request)).decode()],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=os.environ | {"PYTHONPATH": search},
        )  # fmt: skip
        watch = Watch(request.types, say)
        try:
            listen(child, watch, check)
        except BaseException:
            child.kill()
            Path(request.plan).unlink(missing_ok=True)
            raise
        finally:
            code = child.wait()
            if child.stdout is not None:
                child.stdout.close()
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - ERRORS_BYTES))
        said = tuple(line for line in errors.read().decode(errors="replace").splitlines() if line.strip())
    return (watch.done if code == 0 else None), Ended(code, said, watch.free_bytes, watch.workspace_bytes)


def listen(child: subprocess.Popen[bytes], watch: Watch, check: Callable[[], None]) -> None:
    """Take the child's events until it closes its end; `check` raises to stop."""
    assert child.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as ready:
        ready.register(child.stdout, selectors.EVENT_READ)
        while True:
            check()
            if not ready.select(POLL_S):
                watch.tick()
                continue
            data = os.read(child.stdout.fileno(), 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                watch.take(line)


class Watch:
    """What the child told so far; says now and then how far it is."""

    def __init__(self, types: str, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self.done: Outcome | None = None
        self.free_bytes: int | None = None
        self.workspace_bytes: int | None = None
        self._types, self._say, self._clock = types, say, clock
        self._fraction = 0.0
        self._started_s = self._said_s = clock()

    def take(self, line: bytes) -> None:
        """One line of the child; TensorRT's own prints are passed over."""
        try:
            event: Any = json.loads(line)
            if "done" in event:
                self.done = decode(Outcome, event["done"])
            self._fraction = float(event.get("fraction", self._fraction))
            self.free_bytes = event.get("free_bytes", self.free_bytes)
            self.workspace_bytes = event.get("workspace_bytes", self.workspace_bytes)
        except (ValueError, AttributeError, TypeError, CanonicalError):
            return
        self.tick()

    def tick(self) -> None:
        """A line each `SAY_S`."""
        now_s = self._clock()
        if now_s - self._said_s < SAY_S:
            return
        self._said_s = now_s
        elapsed_s = now_s - self._started_s
        rest_s = remaining_s(elapsed_s, self._fraction)
        left = "" if rest_s is None else f", about {rest_s:.0f} s left"
        self._say(f"building the {self._types} plan: {100 * self._fraction:.0f} % after {elapsed_s:.0f} s{left}")
