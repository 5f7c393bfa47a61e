"""Seconds and joules of a real run as a fleet would have taken them: questions and answers pass through, and a clock of
the model's own moves on by what each device would have computed, sent and received.

It changes nothing of what is asked and answered. Laws and watts are `fleet`'s, a strategy may read the clock.
Devices that are asked together wait for the slowest of them; one that was told to sleep is away until it said it would
be back, and who needs it sooner waits for it. It powers down for that time where this saves anything, else it waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from contract.messages import Activations, tensors_of
from server_runtime.store import Upload
from server_runtime.strategies import Ask, Reply
from tools.fleet import Fleet, FleetDevice, Work, asleep_j, cost_of
from tools.simulation import Answering

COMPUTING = ("forward", "noisy_forward")


@dataclass
class Times:
    """One device's seconds by what it did, and bytes of tensors; `gaps_s` are the times when only others were asked."""

    computing_s: float = 0.0
    computing_j: float = 0.0
    link_s: float = 0.0
    waiting_s: float = 0.0  # awake: for the server, or for others that were asked with it
    gaps_s: list[float] = field(default_factory=list)
    asleep_s: float = 0.0
    waking_s: float = 0.0
    between_j: float = 0.0  # of the gaps, as it spent them: asleep, waking up, or waiting
    bytes_up: int = 0
    bytes_down: int = 0
    split: int = 0
    _rows: int = 0  # of the batch whose gradient is to come
    _ready_s: float = 0.0  # when its last answer was there
    _asleep_until_s: float | None = None


@dataclass(frozen=True)
class Spent:
    """A device's run. `work_j` computing and the link, `awake_j` with waiting in its turn, `whole_j` with all the time
    between turns as it was spent; `could_sleep_j` had it slept whenever that saves anything, `never_asleep_j` had it
    waited all the time."""

    seconds: float
    awake_s: float
    work_j: float
    awake_j: float
    whole_j: float
    could_sleep_j: float
    never_asleep_j: float
    bytes_up: int
    bytes_down: int


class Ledger:
    """Between a strategy and its devices."""

    def __init__(
        self, answers: Answering, fleet: Fleet, works: Mapping[int, Work], batch: int, stands_for: int = 1
    ) -> None:
        """`works` by split; `batch` is the usual one, by which a device's highest power is reckoned. Each image counts
        for so many, in all but the bytes that are told."""
        self._answers, self._works, self._batch, self._stands_for = answers, works, batch, stands_for
        self._fleet = {device.name: device for device in fleet.devices}
        self._server_macs_per_s = fleet.server_macs_per_s
        self._now_s, self._server_s = 0.0, 0.0
        self._asked: frozenset[str] = frozenset()  # with the last question
        self.times = {device.name: Times() for device in fleet.devices}

    def clock(self) -> float:
        """Seconds since the run began, by the model."""
        return self._now_s

    def note_checkpoint(self) -> None:
        self._answers.note_checkpoint()

    def answer(self, ask: Ask) -> Mapping[str, Reply]:
        """The devices' answers, after the time that they would have taken."""
        replies = self._answers.answer(ask)
        self._now_s += self._server_s
        self._begin(ask)
        took_s = {name: self._take(name, ask, reply) for name, reply in replies.items()}
        longest_s = max(took_s.values(), default=0.0)
        for name, own_s in took_s.items():
            self.times[name].waiting_s += longest_s - own_s
        self._now_s += longest_s
        self._asked = frozenset(took_s)
        for name in took_s:
            self.times[name]._ready_s = self._now_s
            if ask.kind == "sleep":
                told_s = float({**ask.parameters, **ask.own.get(name, {})}["wake_s"])
                self.times[name]._asleep_until_s = self._now_s + told_s
        self._server_s = self._rest_s(replies)
        return replies

    def _begin(self, ask: Ask) -> None:
        """Who sleeps is waited for; the time since each one's last answer is accounted for."""
        wake = [self.times[name]._asleep_until_s for name in ask.tensors]
        self._now_s = max([self._now_s, *(each for each in wake if each is not None)])
        for name in ask.tensors:
            times = self.times[name]
            if name in self._asked and times._asleep_until_s is None:
                times.waiting_s += self._now_s - times._ready_s
            else:
                self._close_gap(name)

    def _close_gap(self, name: str) -> None:
        times, kind = self.times[name], self._fleet[name].kind
        gap_s = self._now_s - times._ready_s
        asleep_s = waking_s = 0.0
        if times._asleep_until_s is not None:
            down_s = max(0.0, min(times._asleep_until_s, self._now_s) - times._ready_s)
            if asleep_j(kind, down_s) < kind.idle_w * down_s:
                asleep_s, waking_s = down_s - kind.wake_s, kind.wake_s
        times.asleep_s += asleep_s
        times.waking_s += waking_s
        times.between_j += (
            asleep_s * kind.sleep_w + waking_s * kind.link_w + (gap_s - asleep_s - waking_s) * kind.idle_w
        )
        times.gaps_s.append(gap_s)
        times._asleep_until_s = None

    def _take(self, name: str, ask: Ask, reply: Reply) -> float:
        """Seconds that a device computes, sends and receives for one question."""
        times, device = self.times[name], self._fleet[name]
        down, up = _bytes(ask.tensors[name]), 0 if isinstance(reply, Upload) else _bytes(tensors_of(reply))
        link_s = self._stands_for * (down / device.kind.received_bytes_per_s + up / device.kind.sent_bytes_per_s)
        times.split = int({**ask.parameters, **ask.own.get(name, {})}.get("cut", times.split))
        computing_s = self._compute(times, device, ask, reply) if times.split in self._works else 0.0
        times.link_s += link_s
        times.bytes_down += down
        times.bytes_up += up
        return link_s + computing_s

    def _compute(self, times: Times, device: FleetDevice, ask: Ask, reply: Reply) -> float:
        cost, computing_s = cost_of(device, self._works[times.split], self._batch), 0.0
        if "gradient" in ask.tensors[device.name]:
            computing_s += times._rows * cost.backward_s
            times._rows = 0
        if ask.kind in COMPUTING and isinstance(reply, Activations):
            times._rows = self._stands_for * len(reply.values)
            computing_s += times._rows * cost.forward_s
        times.computing_s += computing_s
        times.computing_j += computing_s * cost.compute_w
        return computing_s

    def _rest_s(self, replies: Mapping[str, Reply]) -> float:
        """The server's time for what came."""
        macs = sum(
            len(reply.values) * self._works[self.times[name].split].rest_macs
            for name, reply in replies.items()
            if isinstance(reply, Activations) and self.times[name].split in self._works
        )
        return self._stands_for * macs / self._server_macs_per_s

    def spent(self) -> dict[str, Spent]:
        """Every device's run so far, to its end."""
        found = {}
        for name, times in self.times.items():
            self._close_gap(name)
            times._ready_s = self._now_s
            kind = self._fleet[name].kind
            work_j = times.computing_j + times.link_s * kind.link_w
            awake_j = work_j + times.waiting_s * kind.idle_w
            found[name] = Spent(
                seconds=self._now_s,
                awake_s=self._now_s - times.asleep_s,
                work_j=work_j,
                awake_j=awake_j,
                whole_j=awake_j + times.between_j,
                could_sleep_j=awake_j + sum(asleep_j(kind, gap_s) for gap_s in times.gaps_s),
                never_asleep_j=awake_j + sum(times.gaps_s) * kind.idle_w,
                bytes_up=times.bytes_up,
                bytes_down=times.bytes_down,
            )
        return found


def _bytes(tensors: Mapping[str, np.ndarray]) -> int:
    return sum(each.nbytes for each in tensors.values())
