"""Which faults a campaign has, and when each strikes: drawn from a seed, before anything runs. Pure.

How a fault is done to running programs is left to `chaos_strikes`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.make_package import DEVICES

SERVER, BOTH = "server", "both devices"

# Kind -> how often beside the others. What each does: `chaos_strikes`.
LINK_KINDS = {
    "partition": 2,
    "half-open": 2,
    "slow link": 2,
    "reset": 3,
    "close": 1,
    "cut handshake": 2,
    "refused": 1,
}
MESSAGE_KINDS = {"duplicated message": 2, "reordered message": 2, "spoiled message": 2}
DEVICE_KINDS = {"kill device": 4, "freeze device": 1, "full disk of device": 2, "rotten file of device": 2}
SERVER_KINDS = {
    "kill server": 5,
    "kill torch": 3,
    "freeze server": 1,
    "full disk of server": 2,
    "rotten file of server": 2,
    "rotten ledger": 1,
}
ALL_AT_ONCE = {"kill all": 2}
KINDS = {**LINK_KINDS, **MESSAGE_KINDS, **DEVICE_KINDS, **SERVER_KINDS, **ALL_AT_ONCE}
HASTY_SHARE = 0.15  # of the faults are followed by the next before work went on
MESSAGES_MOST = 10


@dataclass(frozen=True)
class Fault:
    """One fault. It strikes when the server has so many `messages` more on record than when the one before was over."""

    number: int
    kind: str
    target: str  # a device, BOTH or SERVER
    messages: int
    hasty: bool  # the next fault strikes without waiting for work to go on
    draw: float  # from 0 to 1: whatever the kind leaves open


def draw_faults(count: int, seed: int, kinds: Sequence[str] = tuple(KINDS)) -> list[Fault]:
    """So many faults in the order in which they strike; every kind comes about as often as its weight says."""
    rng = random.Random(seed)
    drawn = _spread(count, {kind: KINDS[kind] for kind in kinds}, rng)
    return [
        Fault(number, kind, _target(kind, rng), rng.randint(1, MESSAGES_MOST), rng.random() < HASTY_SHARE, rng.random())
        for number, kind in enumerate(drawn, start=1)
    ]


def _spread(count: int, weights: dict[str, int], rng: random.Random) -> list[str]:
    """So many kinds in random order; each as often as its weight says, rounded up or down."""
    total = sum(weights.values())
    counts = Counter({kind: count * weight // total for kind, weight in weights.items()})
    names = list(weights)
    rng.shuffle(names)
    counts.update(names[: count - counts.total()])
    drawn = list(counts.elements())
    rng.shuffle(drawn)
    return drawn


def _target(kind: str, rng: random.Random) -> str:
    if kind in SERVER_KINDS or kind in ALL_AT_ONCE:
        return SERVER
    if kind in MESSAGE_KINDS:
        return rng.choice(DEVICES)
    return rng.choice((*DEVICES, BOTH))
