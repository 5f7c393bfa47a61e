"""The conductor with scripted strategies and a list for a pipe: who is asked what, when, and what happens on a stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from contract.errors import TrainingError
from contract.messages import Ask as AskMessage
from contract.messages import Bye, Gradient, Message, Scores
from server_runtime import pipe
from server_runtime.conductor import Conducting, Conductor
from server_runtime.pipe import PipeFrame
from server_runtime.site_run import Request, SiteRun
from server_runtime.store import Upload
from server_runtime.strategies import Ask, Conduct, Metric, Progress, Record, Replies, Site, State
from tests.server_runtime import tiny

FEATURES = {"kappa": 1.0, "seed": 7}


class Scripted:
    """A strategy of a few yields; `seen` holds what it was sent."""

    def __init__(self, steps: int = 2, asks: bool = False, fails: bool = False) -> None:
        self.steps, self.asks, self.fails = steps, asks, fails
        self.epoch = 0
        self.seen: list[Replies] = []

    def run(self, site: Site) -> Conduct:
        self.seen.append((yield Ask("features", "collect_features", {d: {} for d in site.devices}, FEATURES)))
        while self.epoch < self.steps:
            if self.fails:
                raise TrainingError("the loss is nan in epoch 1", "lower it")
            if self.asks:
                question = {d: {"logits": np.zeros((1, 2), np.float32), "sample_ids": np.zeros((1, 16), np.uint8)}
                            for d in site.devices}  # fmt: skip
                name = f"step-{self.epoch + 1}"
                self.seen.append((yield Ask(name, "score_batch", question, {"split": "train"})))
            self.epoch += 1
            yield Progress(f"training, epoch {self.epoch} of {self.steps}", self.epoch)
            yield Record({"epoch": self.epoch, "loss": 1.0 / self.epoch})

    def state(self) -> State:
        return State({}, {"epoch": self.epoch})

    def load(self, site: Site, state: State) -> None:
        self.epoch = int(state.values["epoch"] or 0)

    def predict(self, codes: np.ndarray) -> np.ndarray:
        return np.full((len(codes), 2), self.epoch, np.float32)


@dataclass
class Memory:
    """A post and records that keep everything in lists."""

    uploads: dict[tuple[str, str], Upload] = field(default_factory=dict)  # (device, ask)
    frames: list[PipeFrame] = field(default_factory=list)
    kept: list[tuple[Mapping[str, Metric], State | None, bool]] = field(default_factory=list)
    replies: dict[tuple[str, str], Gradient] = field(default_factory=dict)
    now_s: float = 0.0

    def send(self, frame: PipeFrame) -> None:
        self.frames.append(frame)

    def upload(self, site: str, device: str, ask: str) -> Upload | None:
        return self.uploads.get((device, ask))

    def codes(self, site: str, request: Request) -> np.ndarray | None:
        return np.zeros((3, 2, 2), np.int8)

    def journal(self, site: str, device: str, reply: Gradient) -> None:
        self.replies[reply.ask, device] = reply

    def keep(self, site: str, record: Mapping[str, Metric], state: State | None, ended: bool) -> None:
        self.kept.append((record, state, ended))

    def taken(self) -> list[tuple[str, Message]]:
        """(device, message) sent since the last call."""
        sent = [(frame.device, pipe.carried(frame)) for frame in self.frames if frame.kind == pipe.MESSAGE]
        self.frames = [frame for frame in self.frames if frame.kind != pipe.MESSAGE]
        return sent

    def statuses(self) -> list[str]:
        return [frame.text for frame in self.frames if frame.kind == pipe.STATUS]


RULES = Conducting("run", "permuted-label", idle_progress_s=60.0, checkpoint_s=10.0)


def conduct(*sites: SiteRun, rules: Conducting = RULES, memory: Memory | None = None) -> tuple[Conductor, Memory]:
    memory = memory or Memory()
    conductor = Conductor(sites, rules, memory, memory, lambda: memory.now_s)
    conductor.start()
    return conductor, memory


def clinic(strategy: Scripted | None = None, *devices: str, **more: object) -> SiteRun:
    return SiteRun("clinic", devices or ("a", "b"), strategy or Scripted(), **more)  # type: ignore[arg-type]


def join(device: str, purpose: str = "adapt", site: str = "clinic") -> PipeFrame:
    return PipeFrame(pipe.JOINED, site, device, values={"purpose": purpose, "class_count": 3})


def stored(device: str, ask: str = "run.features", split: str = "train", batch: int = 0) -> PipeFrame:
    values: dict[str, pipe.Value] = {"ask": ask, "batch": batch, "split": split, "complete": True}
    return PipeFrame(pipe.STORED, "clinic", device, values=values)


def upload_from(conductor: Conductor, memory: Memory, device: str) -> None:
    memory.uploads[device, "run.features"] = tiny.upload(device, 2)
    conductor.feed(stored(device))


def finish(conductor: Conductor, limit: int = 100) -> None:
    for _ in range(limit):
        if not conductor.runnable:
            return
        conductor.work()
    raise AssertionError("the conductor does not come to rest")


def gradient(ask: str) -> Gradient:
    return Gradient(ask, 0.5, 1, 1, np.ones((1, 2), np.float32))


def test_each_device_is_asked_once_it_is_there_and_let_go_once_it_has_answered() -> None:
    site = clinic()
    conductor, memory = conduct(site)
    conductor.feed(join("a"))
    device, ask = memory.taken()[0]
    assert (device, ask.ask, ask.kind) == ("a", "run.features", "collect_features")
    assert ask.parameters == FEATURES
    upload_from(conductor, memory, "a")
    assert [(device, message.reason) for device, message in memory.taken()] == [("a", "collected")]
    assert not conductor.runnable  # quorum all: b is missing
    conductor.feed(join("b"))
    assert [device for device, _ in memory.taken()] == ["b"]
    upload_from(conductor, memory, "b")
    finish(conductor)
    assert site.ended
    assert sorted(site.strategy.seen[0]) == ["a", "b"]  # type: ignore[attr-defined]
    assert [frame.kind for frame in memory.frames if frame.kind == pipe.ENDED] == [pipe.ENDED]


def test_se_02_a_missing_device_pauses_the_site_with_a_reason_and_may_come_back() -> None:
    conductor, memory = conduct(clinic())
    conductor.feed(join("a"))
    conductor.feed(join("b"))
    upload_from(conductor, memory, "a")
    conductor.feed(PipeFrame(pipe.LEFT, "clinic", "b"))
    conductor.work()
    assert memory.statuses()[-1] == "paused: b is not connected (1 of 2 devices answered)"
    memory.taken()
    conductor.feed(join("b"))
    assert [(device, message.ask) for device, message in memory.taken()] == [("b", "run.features")]
    conductor.work()
    assert memory.statuses()[-1] == "collecting features, 1 of 2 devices answered"


def test_se_02_a_device_without_progress_pauses_the_site_and_progress_ends_the_pause() -> None:
    conductor, memory = conduct(clinic(None, "a"))
    conductor.feed(join("a"))
    memory.now_s = 61.0
    conductor.work()
    assert "a has made no progress for 60 s" in memory.statuses()[-1]
    conductor.feed(PipeFrame(pipe.PROGRESS, "clinic", "a"))
    conductor.work()
    assert memory.statuses()[-1].startswith("collecting features")


def test_a_restart_goes_on_without_the_devices_when_their_uploads_are_whole() -> None:
    site = clinic(None, "a", classes=3)
    memory = Memory(uploads={("a", "run.features"): tiny.upload("a", 2)})
    conductor, _ = conduct(site, memory=memory)
    finish(conductor)
    assert site.ended


def test_devices_that_come_back_are_told_that_they_are_not_needed() -> None:
    site = clinic(None, "a", classes=3)
    conductor, memory = conduct(site, memory=Memory(uploads={("a", "run.features"): tiny.upload("a", 2)}))
    conductor.feed(join("a"))
    assert memory.taken() == [("a", Bye("collected", True))]
    finish(conductor)
    assert memory.taken() == [("a", Bye("done", True))]
    conductor.feed(join("a"))
    assert memory.taken() == [("a", Bye("done", True))]


def test_checkpoints_are_kept_at_records_and_not_too_often() -> None:
    site = clinic(Scripted(steps=4), "a", classes=3)
    conductor, memory = conduct(site, memory=Memory(uploads={("a", "run.features"): tiny.upload("a", 2)}))
    while conductor.runnable:
        conductor.work()
        memory.now_s += 3.0  # two works an epoch
    epochs = [(record.get("epoch"), state and state.values["epoch"], ended) for record, state, ended in memory.kept]
    assert epochs == [(1, 1, False), (2, None, False), (3, 3, False), (4, None, False), (None, 4, True)]


def test_a_resumed_site_goes_on_from_its_checkpoint() -> None:
    site = clinic(Scripted(steps=3), "a", classes=3, resumed=(State({}, {"epoch": 2}), False))
    conductor, memory = conduct(site, memory=Memory(uploads={("a", "run.features"): tiny.upload("a", 2)}))
    finish(conductor)
    assert [record["epoch"] for record, _, _ in memory.kept if "epoch" in record] == [3]


def test_a_site_that_had_ended_is_not_trained_again() -> None:
    site = clinic(Scripted(steps=3), "a", classes=3, resumed=(State({}, {"epoch": 3}), True), last_record={"epoch": 3})
    conductor, memory = conduct(site)
    assert site.ended
    assert not conductor.runnable
    assert [frame.values for frame in memory.frames if frame.kind == pipe.ENDED] == [{"epoch": 3}]


LOGITS = replace(RULES, label_mode="logit-gradient")


def test_gradients_are_asked_for_step_by_step_and_come_from_the_journal_after_a_restart() -> None:
    site = clinic(Scripted(steps=2, asks=True), "a", "b", classes=3)
    uploads = {(device, "run.features"): tiny.upload(device, 2) for device in "ab"}
    conductor, memory = conduct(site, rules=LOGITS, memory=Memory(uploads=uploads))
    conductor.feed(join("a"))
    conductor.feed(join("b"))
    conductor.work()
    assert [(device, message.ask) for device, message in memory.taken()] == [("a", "run.step-1"), ("b", "run.step-1")]
    conductor.feed(pipe.carry("clinic", "a", gradient("run.step-1")))
    conductor.feed(pipe.carry("clinic", "a", gradient("run.step-1")))  # again: WI-04
    assert not conductor.runnable
    assert list(memory.replies) == [("run.step-1", "a")]

    again = clinic(Scripted(steps=2, asks=True), "a", "b", classes=3, journal=memory.replies)
    restarted, memory = conduct(again, rules=LOGITS, memory=Memory(uploads=uploads))
    restarted.feed(join("a"))
    restarted.feed(join("b"))
    restarted.work()
    assert [(device, message.ask) for device, message in memory.taken()] == [("b", "run.step-1")]
    restarted.feed(pipe.carry("clinic", "b", gradient("run.step-1")))
    finish(restarted)
    assert [device for device, message in memory.taken() if isinstance(message, AskMessage)] == ["a", "b"]
    for device in "ab":
        restarted.feed(pipe.carry("clinic", device, gradient("run.step-2")))
    finish(restarted)
    assert again.ended
    assert memory.taken() == [("a", Bye("done", True)), ("b", Bye("done", True))]


def test_a_stale_gradient_is_passed_over() -> None:
    conductor, memory = conduct(clinic(Scripted(asks=True), "a", classes=3), rules=LOGITS)
    conductor.feed(join("a"))
    conductor.feed(pipe.carry("clinic", "a", gradient("run.step-9")))
    assert memory.replies == {}


def test_inference_is_held_until_the_backend_is_ready_and_then_answered() -> None:
    site = clinic(None, "a", classes=3)
    conductor, memory = conduct(site)
    conductor.feed(join("a", "infer"))
    conductor.feed(stored("a", "infer-1", "infer", batch=4))
    assert not conductor.runnable
    assert memory.taken() == []  # a device that came to infer is asked nothing
    conductor.feed(PipeFrame(pipe.LEFT, "clinic", "a"))
    conductor.feed(join("a"))
    upload_from(conductor, memory, "a")
    memory.taken()
    conductor.feed(join("a", "infer"))
    conductor.feed(stored("a", "infer-2", "infer", batch=0))
    finish(conductor)
    scores = [message for _, message in memory.taken() if isinstance(message, Scores)]
    # The first request went with its session: the device would have sent it again.
    assert [(message.ask, message.batch, message.values.shape) for message in scores] == [("infer-2", 0, (3, 2))]


def test_inference_of_one_site_is_answered_while_another_trains() -> None:
    farm = SiteRun("farm", ("f",), Scripted(steps=50), classes=3)  # type: ignore[arg-type]
    site = clinic(None, "a", classes=3, resumed=(State({}, {"epoch": 2}), True))
    conductor, memory = conduct(farm, site, memory=Memory(uploads={("f", "run.features"): tiny.upload("f", 2)}))
    conductor.feed(join("a", "infer"))
    conductor.feed(stored("a", "infer-1", "infer"))
    conductor.work()
    assert isinstance(memory.taken()[0][1], Scores)
    assert not farm.ended


def test_a_site_that_fails_is_told_and_the_others_go_on() -> None:
    farm = SiteRun("farm", ("f",), Scripted(), classes=3)  # type: ignore[arg-type]
    site = clinic(Scripted(fails=True), "a", classes=3)
    uploads = {(device, "run.features"): tiny.upload(device, 2) for device in "af"}
    conductor, memory = conduct(farm, site, memory=Memory(uploads=uploads))
    conductor.feed(join("a"))
    finish(conductor)
    assert farm.ended
    assert not site.ended
    failed = [frame for frame in memory.frames if frame.kind == pipe.FAILED]
    assert [(frame.site, frame.values["cause"]) for frame in failed] == [("clinic", "the loss is nan in epoch 1")]
    assert ("a", Bye("failed", False)) in memory.taken()
    conductor.feed(join("a", "infer"))  # one that comes to predict later would wait for ever
    assert ("a", Bye("failed", False)) in memory.taken()


def test_a_stop_is_noticed() -> None:
    conductor, _ = conduct(clinic())
    conductor.feed(PipeFrame(pipe.STOP))
    assert conductor.stopped


@pytest.mark.parametrize("scenario", [join, lambda device: PipeFrame(pipe.LEFT, "clinic", device)])
def test_waiting_for_names_who_is_missing(scenario: Callable[[str], PipeFrame]) -> None:
    conductor, memory = conduct(clinic())
    conductor.feed(join("a"))
    conductor.feed(scenario("a"))
    conductor.work()
    assert "b is not connected" in memory.statuses()[-1]
