"""From the worker into the spool, on a thread of its own: an upload goes on where the spool has it, and may be stopped.

What the answers are is `worker`'s part, sending them is `client`'s. An answer that takes less time than waking a thread
or little more is made where its ask came in; anything longer would keep heartbeats from going out.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from contract.codec import prepare
from contract.errors import DataError
from contract.messages import Ask, Features, Heartbeat, Welcome
from edge_runtime.conduct import Order
from edge_runtime.part_worker import PartWorker
from edge_runtime.spool import Spool
from edge_runtime.stored import StoredWorker
from edge_runtime.threads import start_worker
from edge_runtime.unanswered import Unanswered
from edge_runtime.worker import Upload, Worker

ROOM_POLL_S = 0.5


@dataclass(frozen=True)
class DeliveryLimits:
    """What counts as quick."""

    quick_bytes: int = 128 << 10  # logits of an ask: a softmax of so many took 2 ms where it was measured


class Stopped(Exception):
    """The run is being stopped; nothing is wrong."""


@dataclass(frozen=True)
class UploadNote:
    """What the spool remembers of the upload whose frames it holds: batch i has the number first_seq + i."""

    ask: str
    kappa: float
    first_seq: int
    fingerprint: str
    fresh: str | None


def plan_upload(
    ask: Ask, frame_bytes: int, worker: Worker | StoredWorker, spool: Spool, new_draw: Callable[[], str | None]
) -> Upload:
    """Where an upload begins: at its first batch, behind those that the spool or the server has, or again at the first
    when the server had all of them and asks nevertheless.

    `new_draw` names the noise of a new upload (None: keyed). The plan is durable when this returns.
    Raises: DataError when the upload was begun with other images or settings.
    """
    note = read_note(spool)
    if note is None or note.ask != ask.ask:
        upload = Upload(ask.ask, "train", float(ask.parameters["kappa"]), frame_bytes, fresh=new_draw())
        note = UploadNote(ask.ask, upload.kappa, spool.next_seq, worker.fingerprint(upload), upload.fresh)
        spool.annotate(json.dumps(asdict(note)))
        return upload
    done = max(0, spool.next_seq - note.first_seq)
    upload = Upload(ask.ask, "train", float(ask.parameters["kappa"]), frame_bytes, done, note.fresh)
    if worker.fingerprint(upload) != note.fingerprint:
        raise DataError(
            f"the upload {ask.ask} was begun with other images or settings ({done} batches of it are on their way)",
            "put the images and settings back as they were, or let the server start a new run",
        )
    batches = -(-len(worker.samples) // worker.batch_size(upload))
    if spool.acknowledged >= note.first_seq + batches - 1:
        # The server had it all and asks again: it has lost a part since. The same batches go out under new numbers.
        spool.annotate(json.dumps(asdict(note) | {"first_seq": spool.next_seq}))
        return replace(upload, first_batch=0)
    if spool.next_seq < note.first_seq:
        # A damaged spool lost frames in front of this upload, so its numbers begin earlier.
        spool.annotate(json.dumps(asdict(note) | {"first_seq": spool.next_seq}))
    return upload


def is_outdated(welcome: Welcome, worker: Worker, spool: Spool) -> bool:
    """Whether the upload that the server took may be of other images or settings than those here.

    A state without a record of it is such a case: another machine under this name, or a state that was lost.
    """
    note = read_note(spool)
    if note is None:
        return True
    upload = Upload(note.ask, "train", note.kappa, welcome.frame_bytes, 0, note.fresh)
    return worker.fingerprint(upload) != note.fingerprint


def read_note(spool: Spool) -> UploadNote | None:
    """The upload that the spool speaks of; None where there is none, or another version of this program wrote it."""
    try:
        return UploadNote(**json.loads(spool.head.note)) if spool.head else None
    except (ValueError, TypeError):
        return None


def is_quick(order: Order, limits: DeliveryLimits) -> bool:
    """Whether the answer is only arithmetic on a few numbers: no engine, no image, no disk."""
    return (
        isinstance(order, Ask) and order.kind == "score_batch" and order.tensors["logits"].nbytes <= limits.quick_bytes
    )


class Delivery:
    """The worker's thread: orders in, frames into the spool."""

    def __init__(
        self,
        worker: Worker | PartWorker | StoredWorker,
        spool: Spool,
        new_draw: Callable[[], str | None],
        window: Unanswered | None,
        stop: threading.Event,
        limits: DeliveryLimits | None = None,
    ) -> None:
        """`stop` interrupts the worker at its next image; `window` is there for a prediction run."""
        self.failure: Exception | None = None
        self.round_trips = 0  # asks that were answered in whole
        self.on_change: Callable[[], object] = lambda: None  # called from the worker's thread after each frame
        self.answered: queue.SimpleQueue[str] = queue.SimpleQueue()  # asks whose whole answer is in the spool
        self._worker, self._spool, self._new_draw, self._window, self._stop = worker, spool, new_draw, window, stop
        self._limits = limits or DeliveryLimits()
        self._given_up = threading.Event()
        self._given, self._done = 0, 0  # orders for the thread; the first is counted by `take` alone, the second by it
        self._idle_since_s: float | None = None
        self._upload: tuple[int, int] | None = None  # number of its first frame, images per frame
        self._orders: queue.SimpleQueue[tuple[Order, Welcome] | None] = queue.SimpleQueue()
        start_worker(self._run)

    @property
    def busy(self) -> bool:
        """Whether the thread has an order in hand or waiting."""
        return self._done < self._given

    def status(self, now_s: float) -> Heartbeat:
        """What heartbeats say: the step moves with every image, so that slow work is told from none."""
        if self.busy or self._idle_since_s is None:
            self._idle_since_s = now_s
        waiting_for = "" if self.busy else "an ask" if self._window is None else "scores"
        return Heartbeat(self._worker.counters.steps, self.busy, waiting_for, max(0.0, now_s - self._idle_since_s))

    def images_acknowledged(self) -> int | None:
        """How many images of the upload in hand the server has; None while there is none."""
        if self._upload is None:
            return None
        first_seq, size = self._upload
        batches = max(0, self._spool.acknowledged - first_seq + 1)
        return min(batches * size, len(self._worker.samples))

    def take(self, order: Order, welcome: Welcome) -> None:
        """Queue an order that came under these terms, or answer it at once if it is quick and nothing is before it."""
        idle = not self.busy and self.failure is None
        if idle and is_quick(order, self._limits) and self._spool.wait_for_room(0.0):
            self._follow(order, welcome)
            if self.failure is not None:
                self.on_change()
            return
        self._given += 1
        self._orders.put((order, welcome))

    def give_up(self) -> None:
        """Nobody will hear the rest of a prediction: send no more of it."""
        self._given_up.set()

    def close(self) -> None:
        """Let the thread end when it has nothing left to do."""
        self._orders.put(None)

    def _run(self) -> None:
        while self.failure is None and (entry := self._orders.get()) is not None:
            self._follow(*entry)
            self._done += 1
            self.on_change()

    def _follow(self, order: Order, welcome: Welcome) -> None:
        try:
            if isinstance(order, Ask):
                self._answer(order, welcome)
            else:
                self._predict(order)
        except Stopped:
            pass
        except Exception as error:  # whatever it is, the socket's thread raises it where it is reported
            self.failure = error

    def _answer(self, ask: Ask, welcome: Welcome) -> None:
        if ask.kind == "collect_features" and isinstance(self._worker, Worker | StoredWorker):
            upload = plan_upload(ask, welcome.frame_bytes, self._worker, self._spool, self._new_draw)
            note = read_note(self._spool)
            self._upload = (note.first_seq, self._worker.batch_size(upload)) if note else None
        else:
            upload = Upload(ask.ask, "train", welcome.kappa, welcome.frame_bytes)
        for message in self._worker.answer(ask, welcome.run, upload):
            self._wait(self._spool.wait_for_room)
            # Features are promised for good; gradients are made again by ask id.
            durable = isinstance(message, Features)
            self._spool.append(prepare(message), durable=durable)
            if durable:  # one of many; of a gradient `_run` tells: to wake the socket's thread twice would cost most
                self.on_change()
        self.round_trips += 1
        self.answered.put(ask.ask)

    def _predict(self, welcome: Welcome) -> None:
        assert self._window is not None
        upload = Upload(
            self._window.ask, "infer", welcome.kappa, welcome.frame_bytes, fresh=self._new_draw(), run=welcome.run
        )
        for message in self._worker.infer(upload):
            self._wait(self._window.wait_for_room)
            images = len(message.codes if isinstance(message, Features) else message.values)
            self._window.put(message.batch, prepare(message), images)
            self.on_change()
        self._window.finish()

    def _wait(self, for_room: Callable[[float], bool]) -> None:
        """Room comes with acknowledgements or scores, however long the server is away."""
        while not for_room(ROOM_POLL_S):
            check_stop(self._stop)
            check_stop(self._given_up)
        check_stop(self._given_up)


def check_stop(stop: threading.Event) -> None:
    """Raises: Stopped once the run is being stopped."""
    if stop.is_set():
        raise Stopped
