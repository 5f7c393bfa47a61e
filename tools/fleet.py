"""A fleet of unlike devices as a model says it: seconds, watts and joules of each split, for each device. Pure.

What a device of one's own takes, edge-profile measures there: where a device has such a table, computing is `Recorded`
and only the link, waiting and sleep are modelled; without one nothing is measured. Reading fleet files is left to
`fleet_file`, counting a run's time and energy to `fleet_ledger`, a part's work to `fleet_work`.

Laws, for one image of a training step at one split:

- computing takes MACs / macs_per_s and, for layers without products (norms, activations, pools: bound by memory),
  values / values_per_s, at `busy_w`;
- the link takes bytes / bytes_per_s each way, one after the other, at `link_w`: packing and sending use a CPU, too;
- the highest power that a meter of window `window_s` shows rises from `link_w` to `busy_w` with the time that a batch
  computes at a stretch;
- a chip is warmer than the air by `rise_c_per_w` per watt (less with a fan), so that `limit_c` caps its watts; a device
  that would pass its cap slows down until it stays below;
- a device that waits takes `idle_w`, one asleep `sleep_w`; waking up takes `wake_s` at `link_w`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SLOWEST = 0.1  # of its full speed: below, a device is not one that anybody trains on


@dataclass(frozen=True)
class Kind:
    """One kind of device; `source` says where each figure comes from, and which are assumed."""

    name: str
    macs_per_s: float
    values_per_s: float
    idle_w: float
    link_w: float
    busy_w: float
    sleep_w: float
    wake_s: float
    sent_bytes_per_s: float
    received_bytes_per_s: float
    window_s: float
    limit_c: float
    rise_c_per_w: float
    fan_rise_c_per_w: float
    source: str


@dataclass(frozen=True)
class Recorded:
    """One image of a training step at a split, as edge-profile measured it; watts are None where no meter was."""

    forward_s: float
    backward_s: float  # with the optimiser
    compute_w: float | None
    peak_w: float | None


@dataclass(frozen=True)
class FleetDevice:
    """One device in its place; `alpha` is how much it cares for privacy, from 0 to 1. `recorded` by split."""

    name: str
    kind: Kind
    ambient_c: float
    has_fan: bool
    alpha: float
    recorded: Mapping[int, Recorded] = field(default_factory=dict)

    @property
    def cap_w(self) -> float:
        """Watts at which it stays below its limit for ever."""
        rise = self.kind.fan_rise_c_per_w if self.has_fan else self.kind.rise_c_per_w
        return (self.kind.limit_c - self.ambient_c) / rise


@dataclass(frozen=True)
class Fleet:
    """Devices that train together, with a server that does `server_macs_per_s`."""

    name: str
    devices: tuple[FleetDevice, ...]
    server_macs_per_s: float
    note: str


@dataclass(frozen=True)
class Work:
    """What one image of a training step takes at a split: products there and back, values of layers without any."""

    split: int
    forward_macs: int
    backward_macs: int
    values: int
    sent_bytes: int
    received_bytes: int
    rest_macs: int  # the server's, there and back


@dataclass(frozen=True)
class Cost:
    """One image at one split on one device, nobody waited for."""

    forward_s: float
    backward_s: float
    compute_w: float
    sent_s: float
    received_s: float
    link_w: float
    peak_w: float
    is_slowed: bool

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s + self.sent_s + self.received_s

    @property
    def energy_j(self) -> float:
        """Computing and the link, as P3SL counts: without waiting and sleeping."""
        return (self.forward_s + self.backward_s) * self.compute_w + (self.sent_s + self.received_s) * self.link_w


def cost_of(device: FleetDevice, work: Work, batch: int) -> Cost:
    """Of one image in batches of so many."""
    kind = device.kind
    sent_s, received_s = work.sent_bytes / kind.sent_bytes_per_s, work.received_bytes / kind.received_bytes_per_s
    known = device.recorded.get(work.split)
    if known is not None:
        busy_w = kind.busy_w if known.compute_w is None else known.compute_w
        peak_w = busy_w if known.peak_w is None else known.peak_w
        return Cost(known.forward_s, known.backward_s, busy_w, sent_s, received_s, kind.link_w, peak_w, False)
    values_s = work.values / kind.values_per_s / 2  # there, and as long back
    forward_s, backward_s = (macs / kind.macs_per_s + values_s for macs in (work.forward_macs, work.backward_macs))
    share = min(1.0, batch * (forward_s + backward_s) / kind.window_s)
    peak_w = kind.link_w + (kind.busy_w - kind.link_w) * share
    speed = 1.0
    if peak_w > device.cap_w:
        speed = max(SLOWEST, (device.cap_w - kind.idle_w) / (peak_w - kind.idle_w))
    return Cost(
        forward_s=forward_s / speed,
        backward_s=backward_s / speed,
        compute_w=kind.idle_w + speed * (kind.busy_w - kind.idle_w),
        sent_s=sent_s,
        received_s=received_s,
        link_w=kind.link_w,
        peak_w=peak_w,
        is_slowed=speed < 1.0,
    )


def asleep_j(kind: Kind, gap_s: float) -> float:
    """Joules between two turns of a device that knows when it is wanted: asleep but for waking up where that saves
    anything, else waiting."""
    waiting_j = kind.idle_w * gap_s
    if gap_s <= kind.wake_s:
        return waiting_j
    return min(waiting_j, kind.sleep_w * (gap_s - kind.wake_s) + kind.link_w * kind.wake_s)


def within_cap(device: FleetDevice, works: Sequence[Work], batch: int) -> list[int]:
    """Splits whose highest power the device can hold."""
    return [work.split for work in works if cost_of(device, work, batch).peak_w <= device.cap_w]
