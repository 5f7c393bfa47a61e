"""The conductor where devices are passed over: who is away, who has lost a batch, and who sleeps."""

from __future__ import annotations

from contract.messages import Checkpoints, Settled
from server_runtime import pipe
from server_runtime.conductor import Conductor
from server_runtime.pipe import PipeFrame
from server_runtime.site_run import SiteRun
from server_runtime.strategies import Ask, Conduct, Record, Site
from tests.server_runtime.test_conductor import RULES, Memory, Scripted, clinic, conduct, finish, join

NUMBERS = {"batch": 1, "epoch": 1, "place": 1, "size": 4, "seed": 0, "rate": 0.1, "sigma": 0.5}


class Turns(Scripted):
    """The first device takes a turn in which something is asked, and the second one's follows."""

    def __init__(self, asked: Ask) -> None:
        super().__init__()
        self.asked = asked

    def run(self, site: Site) -> Conduct:
        self.seen.append((yield Ask("take-1", "take_turn", {"a": {}}, {"cut": 1}, step=1, quorum=0)))
        yield Record({"epoch": 1})
        self.seen.append((yield self.asked))
        self.seen.append((yield Ask("take-2", "take_turn", {"b": {}}, {"cut": 1}, step=2, quorum=0)))


def turns(asked: Ask) -> tuple[SiteRun, Conductor, Memory]:
    site = clinic(Turns(asked), classes=3)
    conductor, memory = conduct(site)
    for device in "ab":
        conductor.feed(join(device))
    finish(conductor)
    conductor.feed(pipe.carry("clinic", "a", Settled("run.take-1", 4)))
    finish(conductor)
    assert site.pending is not None and site.pending.id == f"run.{asked.name}"
    return site, conductor, memory


BATCH = Ask("noisy-1", "noisy_forward", {"a": {}}, NUMBERS, quorum=0)
SLEEP = Ask("sleep-1", "sleep", {"b": {}}, {"wake_s": 1000.0}, quorum=0)


def test_a_device_that_dies_in_its_turn_is_passed_over_after_a_while() -> None:
    site, conductor, memory = turns(BATCH)
    conductor.feed(PipeFrame(pipe.LEFT, "clinic", "a"))
    memory.now_s += RULES.absent_s
    conductor.work()
    assert site.pending is not None and site.pending.id == "run.noisy-1"  # it may be on its way back
    memory.now_s += 1.0
    conductor.work()
    finish(conductor)
    assert site.strategy.seen[-1] == {}  # type: ignore[attr-defined]
    assert site.pending is not None and site.pending.id == "run.take-2"
    assert memory.quorums == {"run.noisy-1": ()} and site.positions == {"a": 1}


def test_a_device_that_lost_a_batch_is_passed_over_at_once_and_takes_nobody_back() -> None:
    site, conductor, memory = turns(BATCH)
    conductor.feed(pipe.carry("clinic", "a", Checkpoints("run.noisy-1", (0, 1))))
    conductor.work()
    finish(conductor)
    assert site.pending is not None and site.pending.id == "run.take-2"
    assert memory.rewound == [] and site.failure is None


def test_a_device_that_sleeps_is_not_missed_before_it_was_to_wake_up() -> None:
    site, conductor, memory = turns(SLEEP)
    conductor.feed(pipe.carry("clinic", "b", Settled("run.sleep-1", 4)))
    conductor.feed(PipeFrame(pipe.LEFT, "clinic", "b"))
    finish(conductor)
    assert "b sleeps" in memory.statuses()[-1]
    memory.now_s += 1000.0 + RULES.absent_s
    conductor.work()
    assert site.pending is not None and site.pending.id == "run.take-2"
    memory.now_s += 1.0
    conductor.work()
    finish(conductor)
    assert site.ended and site.strategy.seen[-1] == {}  # type: ignore[attr-defined]  # it never woke up
