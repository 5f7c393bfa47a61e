from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from contract.console import progress
from contract.errors import ConfigError
from contract.images import normalise
from contract.messages import Activations, Ask, Settled
from edge_runtime.meters.none import NoMeter
from edge_runtime.part_keeper import PartKeeper, PartRules
from edge_runtime.part_store import PartStore
from edge_runtime.part_worker import PREDICTED_AT_ONCE, PartWorker, Pictures
from edge_runtime.pipeline import FRAME_MARGIN_BYTES
from edge_runtime.stages import Stages
from edge_runtime.worker import Counters, Surroundings, Upload
from tests.edge_runtime.fake_trainer import IMAGE, FakeTrainer, picture, plan, samples, training_set

COUNT, RUN = 70, "run-1"


class Killed(Exception):
    """The device is stopped."""


class Bench:
    """A worker on a folder, and what it tells."""

    def __init__(self, folder: Path, activations: str = "float32", stop_at: int | None = None) -> None:
        self.checks, self.stop_at = 0, stop_at
        counters = Counters()

        def tick(images: int) -> None:
            counters.steps += images

        rules = PartRules(plan(activations=activations), "raw-label", np.arange(3))
        self.keeper = PartKeeper(
            rules, training_set(COUNT), FakeTrainer, None, PartStore(folder, lambda text: None), tick  # type: ignore[arg-type]
        )  # fmt: skip
        self.now_s = 0.0
        self.stages = Stages(NoMeter("none in tests"), self._clock)
        around = Surroundings(lambda *facts: progress(total=facts[0], description=facts[1], unit=facts[2]), self._check)
        self.worker = PartWorker(self.keeper, Pictures(samples(COUNT), IMAGE, picture), self.stages, around, counters)

    def _clock(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def _check(self) -> None:
        self.checks += 1
        if self.checks == self.stop_at:
            raise Killed

    def answer(self, kind: str, run: str = RUN, **numbers: int | float) -> list[object]:
        return list(self.worker.answer(Ask(kind, kind, dict(numbers), 1.0), run, upload()))

    def load(self) -> list[object]:
        return self.answer("load_part", step=1, after=0, base=0, cut=2)


def upload(frame_bytes: int = 1 << 20, run: str = RUN) -> Upload:
    return Upload("infer-1", "infer", 1.0, frame_bytes, run=run)


def test_an_ask_has_one_answer_and_its_images_and_bytes_are_counted(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.load() == [Settled("load_part", COUNT)]
    numbers = {"after": 1, "batch": 0, "epoch": 1, "place": 0, "size": 16, "seed": 7, "rate": 0.1}
    (reply,) = bench.answer("forward", **numbers)
    assert isinstance(reply, Activations)
    counters = bench.worker.counters
    assert (counters.steps, counters.images, counters.payload_bytes) == (16, 16, 16 * 3 * 4)
    assert bench.stages.costs()["train"].seconds > 0


@pytest.mark.parametrize("activations", ["float32", "float16"])
def test_predictions_are_the_evaluated_part_of_every_image_in_order(tmp_path: Path, activations: str) -> None:
    bench = Bench(tmp_path, activations)
    bench.load()
    found = list(bench.worker.infer(upload()))
    assert [(each.ask, each.batch, each.total, each.split) for each in found] == [
        ("infer-1", number, COUNT, "infer") for number in range(3)
    ]
    assert [len(each.values) for each in found] == [PREDICTED_AT_ONCE, PREDICTED_AT_ONCE, 6]
    assert all(each.labels is None and each.values.dtype == activations for each in found)
    images = normalise(np.stack([picture(sample) for sample in bench.worker.samples]), IMAGE)
    expected = FakeTrainer(plan().cuts[1]).evaluate(images).reshape(COUNT, -1).astype(activations)
    assert np.concatenate([each.values for each in found]).tobytes() == expected.tobytes()
    counters = bench.worker.counters
    assert (counters.steps, counters.images) == (COUNT, COUNT) and counters.payload_bytes == expected.nbytes


@pytest.mark.parametrize(
    ("room_bytes", "activations", "size"),
    [(3 * 4 * 5, "float32", 5), (3 * 4 * 5, "float16", 10), (3 * 4 * 6 - 1, "float32", 5), (0, "float32", 1)],
)
def test_a_message_is_as_large_as_a_frame_allows(tmp_path: Path, room_bytes: int, activations: str, size: int) -> None:
    bench = Bench(tmp_path, activations)
    bench.load()
    found = list(bench.worker.infer(upload(FRAME_MARGIN_BYTES + room_bytes)))
    assert [len(each.values) for each in found][0] == size and sum(len(each.values) for each in found) == COUNT


def test_without_a_part_of_the_run_there_are_no_predictions(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with pytest.raises(ConfigError, match="no trained part of run run-1") as error:
        list(bench.worker.infer(upload()))
    assert "--state" in error.value.cure
    bench.load()
    with pytest.raises(ConfigError, match="run-2"):
        list(bench.worker.infer(upload(run="run-2")))


def test_predicting_can_be_stopped_at_every_message(tmp_path: Path) -> None:
    bench = Bench(tmp_path, stop_at=2)
    bench.load()
    found = bench.worker.infer(upload())
    assert len(next(found).values) == PREDICTED_AT_ONCE
    with pytest.raises(Killed):
        next(found)
