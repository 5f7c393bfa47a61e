"""One site's place in a run: its strategy, the question it waits on, and the inference requests it owes.

Advancing sites and talking to devices is left to `conductor`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from contract.errors import TrainingError
from contract.messages import Activations, Gradient

from .strategies import Ask, Conduct, Metric, Reply, Site, State, Strategy

_AT = "at/"  # prefix of a checkpoint's values that hold device positions


@dataclass(frozen=True)
class Request:
    """One batch that waits for scores."""

    device: str
    ask: str
    batch: int


@dataclass
class Pending:
    """An Ask whose answers are being gathered; `id` is what devices know it by."""

    id: str
    ask: Ask
    expected: tuple[str, ...]  # devices whose answers are waited for, in the order of asking
    replies: dict[str, Reply] = field(default_factory=dict)
    progress_s: dict[str, float] = field(default_factory=dict)  # device -> when it last got on, came or went
    lost: set[str] = field(default_factory=set)  # devices that cannot answer, where they are passed over

    @property
    def missing(self) -> list[str]:
        """Devices without an answer, in the order of asking."""
        return [device for device in self.expected if device not in self.replies]


@dataclass(frozen=True)
class Journal:
    """What happened since the checkpoint that a site goes on from."""

    replies: Mapping[tuple[str, str], Gradient] = field(default_factory=dict)  # (ask, device) -> reply
    quorums: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # ask -> devices that it went on with


@dataclass
class SiteRun:
    """All that changes while a site is adapted."""

    name: str
    devices: tuple[str, ...]  # sorted
    build: Callable[[], Strategy]  # a strategy at its beginning
    classes: int | None = None  # None before the first device joined
    resumed: tuple[State, bool] | None = None  # newest checkpoint, and whether the strategy had ended
    journal: Journal = field(default_factory=lambda: Journal())

    strategy: Strategy = field(init=False)  # from `load` on
    positions: dict[str, int] = field(default_factory=dict)  # device -> step of the last question that moved it
    base: dict[str, int] = field(default_factory=dict)  # the same at the newest checkpoint
    conduct: Conduct | None = None
    pending: Pending | None = None
    ready: dict[str, Reply] | bool | None = None  # what to hand in with the next advance: replies, or "settle now"
    ended: bool = False
    failure: TrainingError | None = None
    last_record: dict[str, Metric] = field(default_factory=dict)
    kept_s: float = float("-inf")  # when the last checkpoint was kept
    late: dict[str, str] = field(default_factory=dict)  # device -> the question that hands it what was trained
    status: str = "waiting for devices"
    told: str = ""  # the status that was sent last
    # In order of coming; the activations, where the batch did not go to the store.
    requests: dict[Request, Activations | None] = field(default_factory=dict)

    def checkpoint(self) -> State:
        """All that is needed to go on from here, devices' positions included."""
        state = self.strategy.state()
        return State(state.tensors, {**state.values, **{_AT + name: step for name, step in self.positions.items()}})

    def load(self, facts: Site, state: State | None) -> None:
        """Be where the checkpoint was taken; None is the beginning."""
        self.strategy = self.build()
        self.positions = positions_of(state)
        self.base = dict(self.positions)
        if state is not None:
            own = {name: value for name, value in state.values.items() if not name.startswith(_AT)}
            self.strategy.load(facts, State(state.tensors, own))

    @property
    def over(self) -> bool:
        """Whether the strategy will not go on, one way or the other."""
        return self.ended or self.failure is not None

    @property
    def reply_count(self) -> str:
        """How far gathering is, in words."""
        if self.pending is None:
            return ""
        return f"{len(self.pending.replies)} of {len(self.pending.ask.tensors)} devices answered"


def positions_of(state: State | None) -> dict[str, int]:
    """Where a checkpoint's devices stand; those that were never moved are at 0 and not named."""
    values = {} if state is None else state.values
    return {name.removeprefix(_AT): int(step or 0) for name, step in values.items() if name.startswith(_AT)}
