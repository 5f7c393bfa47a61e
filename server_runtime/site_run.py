"""One site's place in a run: its strategy, the question it waits on, and the inference requests it owes.

Advancing sites and talking to devices is left to `conductor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from contract.errors import TrainingError
from contract.messages import Gradient

from .strategies import Ask, Conduct, Metric, Reply, State, Strategy


@dataclass(frozen=True)
class Request:
    """One stored batch that waits for scores."""

    device: str
    ask: str
    batch: int


@dataclass
class Pending:
    """An Ask whose answers are being gathered; `id` is what devices know it by."""

    id: str
    ask: Ask
    replies: dict[str, Reply] = field(default_factory=dict)
    progress_s: dict[str, float] = field(default_factory=dict)  # device -> when it last got on

    @property
    def missing(self) -> list[str]:
        """Asked devices without an answer, in the order of asking."""
        return [device for device in self.ask.tensors if device not in self.replies]


@dataclass
class SiteRun:
    """All that changes while a site is adapted."""

    name: str
    devices: tuple[str, ...]  # sorted
    strategy: Strategy
    classes: int | None = None  # None before the first device joined
    resumed: tuple[State, bool] | None = None  # newest checkpoint, and whether the strategy had ended
    journal: Mapping[tuple[str, str], Gradient] = field(default_factory=dict)  # replies since that checkpoint

    conduct: Conduct | None = None
    pending: Pending | None = None
    ready: dict[str, Reply] | None = None  # replies to hand in with the next advance
    ended: bool = False
    failure: TrainingError | None = None
    last_record: dict[str, Metric] = field(default_factory=dict)
    kept_s: float = float("-inf")  # when the last checkpoint was kept
    status: str = "waiting for devices"
    told: str = ""  # the status that was sent last
    requests: dict[Request, None] = field(default_factory=dict)  # an ordered set

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
