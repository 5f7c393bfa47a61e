"""The conductor with scripted strategies and a list for a pipe: who is asked what, when, and what happens on a stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from contract.errors import TrainingError
from contract.messages import Activations, Bye, Checkpoints, Gradient, Message, Scores, Settled
from contract.messages import Ask as AskMessage
from server_runtime import pipe
from server_runtime.conductor import Conducting, Conductor
from server_runtime.pipe import PipeFrame
from server_runtime.site_run import Journal, Request, SiteRun
from server_runtime.store import Upload
from server_runtime.strategies import Ask, Conduct, Metric, Progress, Record, Replies, Site, State
from tests.server_runtime import tiny

FEATURES = {"kappa": 1.0, "seed": 7}


class Scripted:
    """A strategy of a few yields; `seen` holds what it was sent."""

    def __init__(self, steps: int = 2, asks: bool = False, fails: bool = False, quorum: int | None = None) -> None:
        self.steps, self.asks, self.fails, self.quorum = steps, asks, fails, quorum
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
                self.seen.append((yield Ask(name, "score_batch", question, {"split": "train"}, quorum=self.quorum)))
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
    quorums: dict[str, tuple[str, ...]] = field(default_factory=dict)
    rewound: list[State | None] = field(default_factory=list)
    now_s: float = 0.0

    def send(self, frame: PipeFrame) -> None:
        self.frames.append(frame)

    def upload(self, site: str, device: str, ask: str) -> Upload | None:
        return self.uploads.get((device, ask))

    def codes(self, site: str, request: Request) -> np.ndarray | None:
        return np.zeros((3, 2, 2), np.int8)

    def journal(self, site: str, device: str, reply: Gradient) -> None:
        self.replies[reply.ask, device] = reply

    def journal_quorum(self, site: str, ask: str, devices: tuple[str, ...]) -> None:
        self.quorums[ask] = devices

    def rewind(self, site: str, fits: Callable[[State], bool]) -> State | None:
        self.replies.clear()
        while self.kept and (self.kept[-1][1] is None or not fits(self.kept[-1][1])):
            self.kept.pop()
        self.rewound.append(self.kept[-1][1] if self.kept else None)
        return self.rewound[-1]

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
    scripted = strategy or Scripted()
    return SiteRun("clinic", devices or ("a", "b"), lambda: deepcopy(scripted), **more)  # type: ignore[arg-type]


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


class Forward(Scripted):
    """Trains with the devices, and has something for those that come when all is over."""

    def run(self, site: Site) -> Conduct:
        numbers = {"batch": 0, "epoch": 1, "place": 0, "size": 2, "seed": 0, "rate": 0.1}
        self.seen.append((yield Ask("forward-1", "forward", {d: {} for d in site.devices}, numbers)))

    def last_part(self, device: str) -> Ask:
        weights = {"w": np.ones(2, np.float32)}
        return Ask(f"last-{device}", "load_part", {device: weights}, {"cut": 2, "step": 7})


def activations(ask: str) -> Activations:
    return Activations(ask, 0, 2, "train", np.ones((2, 3), np.float32), None)


def reply(conductor: Conductor, device: str, message: Message) -> None:
    conductor.feed(pipe.carry("clinic", device, message))


def test_a_device_that_comes_back_after_the_end_is_given_what_was_trained() -> None:
    site = clinic(Forward(), "a", "b")
    conductor, memory = conduct(site)
    for device in ("a", "b"):
        conductor.feed(join(device))
        reply(conductor, device, activations("run.forward-1"))
    finish(conductor)
    assert site.ended
    memory.taken()
    conductor.feed(PipeFrame(pipe.LEFT, "clinic", "b"))
    conductor.feed(join("b"))
    ((device, ask),) = memory.taken()
    assert (device, ask.kind, ask.parameters) == ("b", "load_part", {"cut": 2, "step": 7, "after": 0, "base": 0})
    reply(conductor, "b", Settled("run.last-a", 3))  # another question's
    assert memory.taken() == []
    reply(conductor, "b", Settled("run.last-b", 3))
    assert [(device, message.reason) for device, message in memory.taken()] == [("b", "done")]


def test_a_device_that_comes_to_predict_in_the_midst_of_training_is_told_what_to_do() -> None:
    conductor, memory = conduct(clinic(Forward(), "a"))
    conductor.feed(join("a", "infer"))
    conductor.work()
    assert "run edge-run without --infer first" in memory.statuses()[-1]


def test_an_answer_to_a_question_that_is_closed_is_dropped() -> None:
    site = clinic(Forward(), "a", "b")
    conductor, _ = conduct(site)
    conductor.feed(join("a"))
    reply(conductor, "a", activations("run.forward-0"))
    reply(conductor, "c", activations("run.forward-1"))  # not asked
    assert site.pending is not None and site.pending.replies == {}


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

    again = clinic(Scripted(steps=2, asks=True), "a", "b", classes=3, journal=Journal(memory.replies))
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


class Moving(Scripted):
    """One step per epoch, which moves a head on each device; every second epoch is none of b's."""

    def __init__(self, steps: int = 6) -> None:
        super().__init__(steps)

    def run(self, site: Site) -> Conduct:
        yield Ask("features", "collect_features", {d: {} for d in site.devices}, FEATURES)
        while self.epoch < self.steps:
            step = self.epoch + 1
            asked = [device for device in site.devices if device != "b" or step % 2]
            question = {d: {"features": np.zeros((1, 2), np.float32), "sample_ids": np.zeros((1, 16), np.uint8)}
                        for d in asked}  # fmt: skip
            replies = yield Ask(f"step-{step}", "head_step", question, step=step)
            self.seen.append(replies)
            self.epoch = step
            yield Record({"epoch": step})


HEADS = replace(RULES, label_mode="client-head", checkpoint_s=0.0)
UPLOADED = {(device, "run.features"): tiny.upload(device, 2) for device in "ab"}


class Devices:
    """Answers the conductor's questions, each device from the steps that it holds."""

    def __init__(self, conductor: Conductor, memory: Memory, *names: str) -> None:
        self.conductor, self.memory = conductor, memory
        self.held: dict[str, set[int]] = {name: {0} for name in names}
        self.numbers: list[tuple[str, int, int, int]] = []  # device, step, after, base
        for name in names:
            conductor.feed(join(name))

    def answer(self, until_step: int = 99) -> None:
        """Answer all questions up to a step."""
        while True:
            finish(self.conductor)
            asks = [(device, message) for device, message in self.memory.taken() if isinstance(message, AskMessage)]
            if not asks:
                return
            for device, ask in asks:
                step, after, base = (int(ask.parameters[name]) for name in ("step", "after", "base"))
                if step > until_step:
                    continue
                self.numbers.append((device, step, after, base))
                if after in self.held[device]:
                    self.held[device].add(step)
                    self.conductor.feed(pipe.carry("clinic", device, gradient(ask.ask)))
                else:
                    held = Checkpoints(ask.ask, tuple(sorted(self.held[device])))
                    self.conductor.feed(pipe.carry("clinic", device, held))


def test_a_question_that_moves_a_head_says_from_where_and_where_both_could_go_back_to() -> None:
    conductor, memory = conduct(clinic(Moving(4), classes=3), rules=HEADS, memory=Memory(uploads=UPLOADED))
    devices = Devices(conductor, memory, "a", "b")
    devices.answer()
    assert devices.numbers == [
        ("a", 1, 0, 0), ("b", 1, 0, 0), ("a", 2, 1, 1), ("a", 3, 2, 2), ("b", 3, 1, 1), ("a", 4, 3, 3),
    ]  # fmt: skip


@pytest.mark.parametrize(("left", "common"), [({0, 3}, 3), ({0, 1}, 1), ({0}, 0)])
def test_a_device_that_lost_its_newest_head_takes_its_site_back_to_a_common_step(left: set[int], common: int) -> None:
    site = clinic(Moving(6), "a", classes=3)
    conductor, memory = conduct(site, rules=HEADS, memory=Memory(uploads=UPLOADED))
    devices = Devices(conductor, memory, "a")
    devices.answer(until_step=4)
    devices.held["a"] = set(left)
    conductor.feed(PipeFrame(pipe.LEFT, "clinic", "a"))
    conductor.feed(join("a"))
    devices.numbers.clear()
    devices.answer()
    assert site.ended
    refused, *replayed = devices.numbers
    assert refused[:3] == ("a", 5, 4)
    assert [step for _, step, _, _ in replayed] == list(range(common + 1, 7))
    assert any("goes back to the last step" in frame.text for frame in memory.frames if frame.kind == pipe.WARNING)


def test_two_devices_that_hold_different_steps_meet_where_both_can() -> None:
    site = clinic(Moving(8), classes=3)
    conductor, memory = conduct(site, rules=HEADS, memory=Memory(uploads=UPLOADED))
    devices = Devices(conductor, memory, "a", "b")
    devices.answer(until_step=6)
    devices.held = {"a": {0, 2}, "b": {0, 5}}
    for name in "ab":
        conductor.feed(join(name))
    devices.answer()
    assert site.ended
    assert devices.held["a"] >= set(range(9))
    assert memory.rewound[-1] is None  # the only step of which both still held their heads


def test_a_device_that_refuses_a_step_it_could_take_fails_its_site_instead_of_for_ever() -> None:
    site = clinic(Moving(4), "a", classes=3)
    conductor, memory = conduct(site, rules=HEADS, memory=Memory(uploads=UPLOADED))
    conductor.feed(join("a"))
    finish(conductor)
    conductor.feed(pipe.carry("clinic", "a", Checkpoints("run.step-1", (0, 7))))
    assert site.failure is not None and "refuses the step after 0" in site.failure.cause


class Losing(Scripted):
    """A step whose loss the device is asked for: of the first batch, which is in its memory only."""

    def run(self, site: Site) -> Conduct:
        yield Ask("load-0-1", "load_part", {d: {} for d in site.devices}, {"cut": 1}, step=1)
        self.epoch = 1
        yield Record({"epoch": 1})
        values = {"values": np.zeros((1, 3), np.float32)}
        yield Ask("batch-1-1", "batch_loss", dict.fromkeys(site.devices, values), {"batch": 0})


def test_a_device_that_died_with_the_first_batch_after_a_settled_step_begins_that_step_again() -> None:
    site = clinic(Losing(), "a", classes=3)
    conductor, memory = conduct(site, rules=replace(HEADS, trains_with_devices=True))
    conductor.feed(join("a"))
    finish(conductor)
    conductor.feed(pipe.carry("clinic", "a", Settled("run.load-0-1", 4)))
    finish(conductor)
    assert site.pending is not None and site.pending.id == "run.batch-1-1"
    conductor.feed(pipe.carry("clinic", "a", Checkpoints("run.batch-1-1", (0, 1))))
    assert site.failure is None and site.conduct is not None
    assert memory.rewound == [memory.kept[-1][1]] != [None]


def test_positions_come_back_with_the_checkpoint() -> None:
    first = clinic(Moving(6), classes=3)
    conductor, memory = conduct(first, rules=HEADS, memory=Memory(uploads=UPLOADED))
    Devices(conductor, memory, "a", "b").answer(until_step=4)
    kept = [state for _, state, _ in memory.kept if state is not None][-1]
    again = clinic(Moving(6), classes=3, resumed=(kept, False))
    conductor, memory = conduct(again, rules=HEADS, memory=Memory(uploads=UPLOADED))
    devices = Devices(conductor, memory, "a", "b")
    devices.held = {"a": {4}, "b": {3}}
    devices.answer()
    assert devices.numbers == [("a", 5, 4, 4), ("b", 5, 3, 3), ("a", 6, 5, 5)]


def test_without_a_quorum_a_site_waits_however_long() -> None:
    site = clinic(Moving(2), classes=3)
    conductor, memory = conduct(site, rules=HEADS, memory=Memory(uploads=UPLOADED))
    Devices(conductor, memory, "a").answer()
    memory.now_s += 1e6
    conductor.work()
    assert site.pending is not None and site.pending.missing == ["b"]


def test_a_question_with_a_step_and_a_quorum_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="'step-3' has step 3 and quorum 1.*must wait for all"):
        Ask("step-3", "head_step", {}, step=3, quorum=1)
    Ask("step-3", "head_step", {}, step=3)
    Ask("step-3", "score_batch", {}, quorum=1)


def voting(*present: str, quorum: int = 1, memory: Memory | None = None) -> tuple[SiteRun, Conductor, Memory]:
    """A site that goes on with a quorum, waiting for the answers to its first step, and what was asked left aside."""
    site = clinic(Scripted(steps=2, asks=True, quorum=quorum), classes=3)
    conductor, memory = conduct(site, rules=LOGITS, memory=memory or Memory(uploads=UPLOADED))
    for device in present:
        conductor.feed(join(device))
    finish(conductor)
    memory.taken()
    return site, conductor, memory


def test_with_a_quorum_a_site_goes_on_without_who_is_away_but_not_at_once() -> None:
    site, conductor, memory = voting("a", "b")
    conductor.feed(PipeFrame(pipe.LEFT, "clinic", "b"))
    conductor.feed(pipe.carry("clinic", "a", gradient("run.step-1")))
    memory.now_s += RULES.absent_s
    conductor.work()
    assert site.pending is not None and site.pending.id == "run.step-1"  # b may be on its way back
    memory.now_s += 1.0
    conductor.work()
    assert memory.quorums == {"run.step-1": ("a",)}
    assert list(site.strategy.seen[-1]) == ["a"]  # type: ignore[attr-defined]
    conductor.feed(pipe.carry("clinic", "b", gradient("run.step-1")))  # too late: passed over
    assert list(memory.replies) == [("run.step-1", "a")]


def test_with_a_quorum_a_connected_device_is_given_its_time_and_too_few_answers_are_not_enough() -> None:
    for quorum, closes in ((1, True), (2, False)):
        _, conductor, memory = voting("a", "b", quorum=quorum)
        conductor.feed(pipe.carry("clinic", "a", gradient("run.step-1")))
        memory.now_s += RULES.idle_progress_s
        conductor.work()
        assert memory.quorums == {}
        memory.now_s += 1.0
        conductor.work()
        assert bool(memory.quorums) is closes


def test_a_restarted_server_goes_on_with_the_same_devices_as_before_the_stop() -> None:
    _, conductor, memory = voting("a")
    conductor.feed(pipe.carry("clinic", "a", gradient("run.step-1")))
    memory.now_s += RULES.absent_s + 1.0
    conductor.work()
    again = clinic(Scripted(2, asks=True, quorum=1), classes=3, journal=Journal(memory.replies, memory.quorums))
    conductor, memory = conduct(again, rules=LOGITS, memory=Memory(uploads=UPLOADED))
    conductor.feed(join("a"))
    conductor.feed(join("b"))
    finish(conductor)
    # Step 1 is not asked again, although b is here now.
    assert [(device, ask.ask) for device, ask in memory.taken()] == [("a", "run.step-2"), ("b", "run.step-2")]
    for device in "ab":
        conductor.feed(pipe.carry("clinic", device, gradient("run.step-2")))
    finish(conductor)
    assert again.ended and [list(replies) for replies in again.strategy.seen[1:]] == [["a"], ["a", "b"]]  # type: ignore[attr-defined]


def test_held_steps_are_no_answer_to_a_question_that_moves_nothing() -> None:
    site, conductor, memory = voting("a", "b")
    conductor.feed(pipe.carry("clinic", "a", Checkpoints("run.step-1", (0, 7))))
    assert memory.rewound == [] and site.failure is None
    assert site.pending is not None and site.pending.missing == ["a", "b"]


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
    farm = SiteRun("farm", ("f",), lambda: Scripted(steps=50), classes=3)
    site = clinic(None, "a", classes=3, resumed=(State({}, {"epoch": 2}), True))
    conductor, memory = conduct(farm, site, memory=Memory(uploads={("f", "run.features"): tiny.upload("f", 2)}))
    conductor.feed(join("a", "infer"))
    conductor.feed(stored("a", "infer-1", "infer"))
    conductor.work()
    assert isinstance(memory.taken()[0][1], Scores)
    assert not farm.ended


def test_a_site_that_fails_is_told_and_the_others_go_on() -> None:
    farm = SiteRun("farm", ("f",), Scripted, classes=3)
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
