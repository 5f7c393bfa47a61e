from __future__ import annotations

from edge_runtime.meters import Reading
from edge_runtime.stages import StageCost, Stages


class Clockwork:
    """A clock and a meter that move when told."""

    name, scope, quality = "clockwork", "a made-up device", "measured"

    def __init__(self) -> None:
        self.now_s, self.energy_j = 0.0, 0.0
        self.reason: str | None = None

    def read(self, now_s: float) -> Reading:
        return Reading(None if self.reason else self.energy_j, self.reason)

    def spend(self, seconds: float, energy_j: float) -> None:
        self.now_s += seconds
        self.energy_j += energy_j


def test_stages_are_differences_and_add_up() -> None:
    world = Clockwork()
    assert Stages(world, lambda: 0.0).scope == "clockwork: a made-up device"  # type: ignore[arg-type]
    stages = Stages(world, lambda: world.now_s)
    with stages.measure("extract"):
        world.spend(2.0, 10.0)
    world.spend(5.0, 1.0)
    with stages.measure("extract"):
        world.spend(1.0, 4.0)
    assert stages.costs() == {"extract": StageCost(3.0, 14.0)}


def test_a_stage_that_ends_by_an_error_counts() -> None:
    world = Clockwork()
    stages = Stages(world, lambda: world.now_s)
    try:
        with stages.measure("extract"):
            world.spend(2.0, 3.0)
            raise KeyError
    except KeyError:
        pass
    assert stages.costs()["extract"].seconds == 2.0


def test_a_stage_begun_twice_goes_on_and_one_never_begun_is_absent() -> None:
    world = Clockwork()
    stages = Stages(world, lambda: world.now_s)
    stages.begin("upload")
    world.spend(1.0, 1.0)
    stages.begin("upload")
    world.spend(1.0, 1.0)
    stages.end("upload")
    stages.end("upload")
    stages.end("other")
    assert stages.costs() == {"upload": StageCost(2.0, 2.0)}


def test_energy_that_was_lost_once_stays_unknown() -> None:
    world = Clockwork()
    stages = Stages(world, lambda: world.now_s)
    with stages.measure("extract"):
        world.reason = "counter lost"
    world.reason = None
    with stages.measure("extract"):
        world.spend(1.0, 1.0)
    assert stages.costs()["extract"].energy_j is None
