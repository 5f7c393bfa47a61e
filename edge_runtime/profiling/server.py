"""A real run of training, joined as edge-run joins one: how long its steps keep the device from its work, at what cost.

Seen from the device a step has two parts. It works: from an ask to its answer. Then it is away: the answer goes up, the
server works, the gradient comes down. Where one of these ends and the next begins cannot be seen from here: answers are
acknowledged with the ask that follows, and a message is there when it is whole. So time is told of all three together;
what the link costs is the energy of that time beyond idling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from contract.errors import PackageError
from contract.messages import Activations, Ask, Message
from edge_runtime.config import DeviceConfig
from edge_runtime.equip import equip
from edge_runtime.part_worker import PartWorker
from edge_runtime.profiling.rows import Away, Row
from edge_runtime.run import StopSignals, converse
from edge_runtime.stages import StageCost, Stages
from edge_runtime.threads import in_worker
from edge_runtime.throttle import SlowdownWatch
from edge_runtime.worker import Upload, Worker


class MarkedWorker:
    """A worker that notes when it is away, and for which split: `stages` gets a stage "away from split N" for each."""

    def __init__(self, worker: PartWorker, stages: Stages) -> None:
        self.counters = worker.counters
        self.images: dict[int, int] = {}  # of each split, those whose time away has ended
        self._worker, self._stages = worker, stages
        self._split: int | None = None
        self._away: tuple[int, int] | None = None  # split, and images of the batch that was answered

    @property
    def samples(self) -> Sequence[object]:
        """As the worker's."""
        return self._worker.samples

    def answer(self, ask: Ask, run: str, upload: Upload) -> Iterator[Message]:
        """As the worker's; the device is away from the answer of one batch to the next ask, if there is one."""
        self._come_back()
        if ask.kind == "load_part":
            self._split = int(ask.parameters["cut"])
        images = 0
        for reply in self._worker.answer(ask, run, upload):
            images += len(reply.values) if isinstance(reply, Activations) else 0
            yield reply
        if images and self._split is not None:
            self._away = self._split, images
            self._stages.begin(stage_of(self._split))

    def _come_back(self) -> None:
        if self._away is not None:
            split, images = self._away
            self._stages.end(stage_of(split))
            self.images[split] = self.images.get(split, 0) + images
            self._away = None


def stage_of(split: int) -> str:
    """The name under which the time away from a split is counted."""
    return f"away from split {split}"


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
        worker = MarkedWorker(equipment.worker, equipment.stages)
        marked = replace(equipment, worker=cast("Worker | PartWorker", worker))
        report = await converse(marked, signals, True, say, watch)
        return Joined(report.run or "", report.package_digest, equipment.stages.costs(), worker.images)
    finally:
        equipment.state.close()


def with_away(row: Row, joined: Joined) -> Row:
    """The row of a split with what the run told of it; unchanged where the run had another split."""
    cost, images = joined.costs.get(stage_of(row.point.split)), joined.images.get(row.point.split, 0)
    if cost is None or not images or joined.package_digest != row.point.package_digest:
        return row
    energy_j, bound_j = (None if total_j is None else total_j / images for total_j in (cost.energy_j, cost.bound_j))
    away = Away(joined.run, images, cost.seconds / images, energy_j, bound_j, cost.reason)
    if row.energy is None or away.energy_j is None:
        return replace(row, away=away)
    idle_w = (row.energy.idle_before_w + row.energy.idle_after_w) / 2.0
    reason = f"of run {away.run}, by this meter: the energy beyond idling while the device was away"
    return replace(
        row, away=away, communication_j=away.energy_j - idle_w * away.seconds, communication_reason=reason,
        total_j=row.energy.measured_j.mean + away.energy_j,
    )  # fmt: skip
