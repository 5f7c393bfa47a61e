"""A real run of training, joined as edge-run joins one: how long its steps keep the device from its work, at what cost.

Seen from the device a step has two parts. It works: from an ask to its answer. Then it is away: the answer goes up
until the server has it, the server works, and the next ask comes down, from its first byte on. What the link costs is
the energy of going up and coming down, beyond idling; what waiting costs beyond idling is in the total alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from contract.errors import PackageError
from contract.messages import Activations, Ask, Message
from edge_runtime.config import DeviceConfig
from edge_runtime.equip import equip
from edge_runtime.part_worker import PartWorker
from edge_runtime.profiling.rows import AWAY_PARTS, Away, AwayPart, Row
from edge_runtime.run import converse
from edge_runtime.stages import StageCost, Stages
from edge_runtime.stop_signals import StopSignals
from edge_runtime.threads import in_worker
from edge_runtime.throttle import SlowdownWatch
from edge_runtime.worker import Upload, Worker


class AwayMarks:
    """Notes when the device is away from its work, and in which part of that: `stages` gets a stage for each."""

    def __init__(self, stages: Stages) -> None:
        self.images: dict[int, int] = {}  # of each split, those whose time away has ended
        self._stages, self._lock = stages, threading.Lock()  # the worker's thread and the socket's tell in turn
        self._away: tuple[int, int] | None = None  # split, and images of the batch that was answered
        self._part = ""
        self._asked = False  # to be told of the answer's arrival

    def leave(self, split: int, images: int) -> None:
        """A batch of so many images was answered."""
        with self._lock:
            self._away, self._asked = (split, images), False
            self._stages.begin(stage_of(split))
            self._change("upload")

    def come_back(self) -> None:
        """An ask is here."""
        with self._lock:
            if self._away is not None:
                split, images = self._away
                self._change("")
                self._stages.end(stage_of(split))
                self.images[split] = self.images.get(split, 0) + images
                self._away = None

    def wants_arrival(self) -> bool:
        """As `LineMarks` says."""
        with self._lock:
            wants = self._part == "upload" and not self._asked
            self._asked = self._asked or wants
            return wants

    def arrived(self) -> None:
        """As `LineMarks` says."""
        self._go_on("upload", "wait")

    def bytes_came(self) -> None:
        """As `LineMarks` says."""
        self._go_on("wait", "download")

    def went_on(self) -> None:
        """As `LineMarks` says."""
        self._go_on("download", "wait")

    def connection_ended(self) -> None:
        """As `LineMarks` says; an answer that had not arrived is written again, and asked after again."""
        self._go_on("download", "wait")
        with self._lock:
            self._asked = False

    def _go_on(self, before: str, after: str) -> None:
        with self._lock:
            if self._part == before:
                self._change(after)

    def _change(self, part: str) -> None:
        if self._away is not None:
            if self._part:
                self._stages.end(stage_of(self._away[0], self._part))
            if part:
                self._stages.begin(stage_of(self._away[0], part))
        self._part = part


class MarkedWorker:
    """A worker that tells `marks` when it is away, and for which split."""

    def __init__(self, worker: PartWorker, marks: AwayMarks) -> None:
        self.counters = worker.counters
        self._worker, self._marks = worker, marks
        self._split: int | None = None

    @property
    def samples(self) -> Sequence[object]:
        """As the worker's."""
        return self._worker.samples

    def answer(self, ask: Ask, run: str, upload: Upload) -> Iterator[Message]:
        """As the worker's; the device is away from the answer of one batch to the next ask, if there is one."""
        self._marks.come_back()
        if ask.kind == "load_part":
            self._split = int(ask.parameters["cut"])
        images = 0
        for reply in self._worker.answer(ask, run, upload):
            images += len(reply.values) if isinstance(reply, Activations) else 0
            yield reply
        if images and self._split is not None:
            self._marks.leave(self._split, images)


def stage_of(split: int, part: str = "") -> str:
    """The name under which the time away from a split, or a part of it, is counted."""
    return f"{part or 'away'} at split {split}"


@dataclass(frozen=True)
class Joined:
    """What a run was: its name and package, and of each stage and split what it cost and how many images it was."""

    run: str
    package_digest: str
    costs: dict[str, StageCost]
    images: dict[int, int]


async def join(config: DeviceConfig, say: Callable[[str], None]) -> Joined:
    """Take part in a run until the server needs this device no longer. Raises: CutlayerError of whatever failed."""
    signals, watch = StopSignals(say), SlowdownWatch()
    equipment = await in_worker(lambda: equip(config, "adapt", signals.thread_asked, say))
    try:
        if not isinstance(equipment.worker, PartWorker):
            raise PackageError("the package holds a frontend, and no step of it is trained here", "leave --server out")
        marks = AwayMarks(equipment.stages)
        worker = MarkedWorker(equipment.worker, marks)
        marked = replace(equipment, worker=cast("Worker | PartWorker", worker))
        report = await converse(config, marked, signals, True, say, watch, marks)
        return Joined(report.run or "", report.package_digest, equipment.stages.costs(), marks.images)
    finally:
        equipment.state.close()


def with_away(row: Row, joined: Joined) -> Row:
    """The row of a split with what the run told of it; unchanged where the run had another split."""
    cost, images = joined.costs.get(stage_of(row.point.split)), joined.images.get(row.point.split, 0)
    if cost is None or not images or joined.package_digest != row.point.package_digest:
        return row
    parts = tuple(
        AwayPart(name, *_per_image(joined.costs.get(stage_of(row.point.split, name)), images)) for name in AWAY_PARTS
    )
    away = Away(joined.run, images, *_per_image(cost, images), cost.reason, parts)
    of_link = [part for part in parts if part.name != "wait"]
    known_j = [part.energy_j for part in of_link if part.energy_j is not None]
    if row.energy is None or away.energy_j is None or len(known_j) < len(of_link):
        return replace(row, away=away)
    idle_w = (row.energy.idle_before_w + row.energy.idle_after_w) / 2.0
    reason = f"of run {away.run}, by this meter: the energy beyond idling while it went up and came down"
    return replace(
        row, away=away, communication_j=sum(known_j) - idle_w * sum(part.seconds for part in of_link),
        communication_reason=reason, total_j=row.energy.measured_j.mean + away.energy_j,
    )  # fmt: skip


def _per_image(cost: StageCost | None, images: int) -> tuple[float, float | None, float | None]:
    """Seconds, joules and their bound; a part that never was took no time and nothing."""
    if cost is None:
        return 0.0, 0.0, 0.0
    return (
        cost.seconds / images,
        None if cost.energy_j is None else cost.energy_j / images,
        None if cost.bound_j is None else cost.bound_j / images,
    )
