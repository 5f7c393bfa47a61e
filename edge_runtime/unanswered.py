"""Inference batches on their way: kept until their scores came, sent again on every new connection.

Numbers and sending are the spool's and `conduct`'s part; what scores mean is left to `predictions`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contract.codec import Payload
from contract.errors import RemoteProtocolError
from edge_runtime.spool import Spool


@dataclass(frozen=True)
class WindowLimits:
    """How many batches may wait for their scores; more would grow memory with the folder."""

    batches: int = 8


class Unanswered:
    """The batches of one prediction run, from the worker's thread to the socket's and back."""

    def __init__(self, ask: str, spool: Spool, limits: WindowLimits | None = None) -> None:
        self.ask = ask
        self.scores: dict[int, NDArray[np.float32]] = {}  # by batch
        self._spool, self._limits = spool, limits or WindowLimits()
        self._frames: dict[int, Payload] = {}
        self._rows: list[int] = []  # images of each batch
        self._all_put = False
        self._lock = threading.Condition()

    def put(self, batch: int, frame: Payload, images: int) -> None:
        """Send the next batch, and keep it until its scores come."""
        with self._lock:
            self._frames[batch] = frame
            self._rows.append(images)
            self._spool.append(frame, durable=False)

    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait until another batch may be put; False when it still may not after `timeout_s`."""
        with self._lock:
            return self._lock.wait_for(lambda: len(self._frames) < self._limits.batches, timeout_s)

    def finish(self) -> None:
        """No further batch will be put."""
        with self._lock:
            self._all_put = True

    def restart(self, session: str, run: str) -> None:
        """A new connection has a new session: everything without scores goes out again."""
        with self._lock:
            self._spool.begin(session, run, 0)
            for batch in sorted(self._frames):
                self._spool.append(self._frames[batch], durable=False)

    def answer(self, ask: str, batch: int, values: NDArray[np.float32]) -> None:
        """Take in the scores of a batch; again is no harm, for they may come twice.

        Raises: RemoteProtocolError when no such batch was sent, or it held another number of samples.
        """
        with self._lock:
            if ask != self.ask or (batch not in self._frames and batch not in self.scores):
                raise RemoteProtocolError(
                    f"scores of batch {batch} of {ask!r}, which this device never sent", "update the server"
                )
            if len(values) != self._rows[batch]:
                raise RemoteProtocolError(
                    f"expected scores of {self._rows[batch]} samples, found {len(values)}", "update the server"
                )
            self._frames.pop(batch, None)
            self.scores[batch] = values
            self._lock.notify_all()

    def rows(self) -> list[tuple[int, NDArray[np.float32]]]:
        """The scores that came, batch by batch, each with the place of its first image."""
        with self._lock:
            starts = np.concatenate([[0], np.cumsum(self._rows)]).astype(int)
            return [(int(starts[batch]), self.scores[batch]) for batch in sorted(self.scores)]

    @property
    def complete(self) -> bool:
        """Whether every batch was put and has its scores."""
        with self._lock:
            return self._all_put and not self._frames
