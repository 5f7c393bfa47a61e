"""What a leakage-gated export decides: which points are within the limits, which no other beats, which one is taken.

Pure. How the points were measured is exporter.gate's.

A point is one way to protect one cut: precision, which patches are sent, strength of the noise. It costs accuracy,
leakage, joules, bytes and time, of which accuracy is better the higher, the others the lower.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from contract.errors import UsageError, suggest
from contract.leakage import Figures
from contract.tokens import Kept

Metric = Literal["ssim", "psnr", "fsim"]
METRICS: dict[str, str] = {"ssim": "ssim", "psnr": "psnr_db", "fsim": "fsim"}  # to the field of Figures
_LIMIT_CURE = "write for example --max-leakage 'ssim<0.35', in quotes: to a shell < means a file"


@dataclass(frozen=True)
class Limit:
    """The strongest attack's mean figure must be less than `below`; of psnr in dB."""

    metric: Metric
    below: float

    def __str__(self) -> str:
        return f"{self.metric}<{self.below:g}"

    def of(self, leakage: Figures) -> float:
        """The figure that the limit is about."""
        value: float = getattr(leakage, METRICS[self.metric])
        return value


@dataclass(frozen=True)
class Energy:
    """Joules of one image on a device, None where unknown; `source` says by what, or why not."""

    joules: float | None
    kind: Literal["measured", "modelled", "unknown"]
    source: str


@dataclass(frozen=True)
class Point:
    """One point as measured; `accuracy` is top-1 under its noise, `refused` why an export of it would be refused.

    `unprotected` is what leaks at that cut without any noise, all patches sent; None: not measured.
    """

    split: int
    precision: Literal["int8", "float32"]
    sent: Kept
    kappa: float
    accuracy: float | None
    leakage: Figures
    unprotected: Figures | None
    energy: Energy
    sent_bytes: int
    ms: float
    refused: str | None = None

    @property
    def name(self) -> str:
        """In one breath."""
        return f"split {self.split}, {self.precision}, {self.sent} patches, kappa {self.kappa:g}"


@dataclass(frozen=True)
class Judged:
    """A point with what keeps it from being taken (nothing: it is within the limits), and whether no other beats it."""

    point: Point
    faults: tuple[str, ...]
    on_front: bool


def read_limits(texts: Sequence[str]) -> tuple[Limit, ...]:
    """Limits from texts such as `ssim<0.35`, one of each metric. Raises: UsageError."""
    limits: dict[str, Limit] = {}
    for text in texts:
        found = re.fullmatch(r"\s*(\w+)\s*<\s*(\d+(?:\.\d*)?|\.\d+)\s*", text, re.ASCII)
        if found is None:
            raise UsageError(f"--max-leakage should be a metric, < and a number, found {text!r}", _LIMIT_CURE)
        metric, below = found[1].lower(), float(found[2])
        if metric not in METRICS:
            raise UsageError(f"--max-leakage knows no metric {metric!r}{suggest(metric, METRICS)}", _LIMIT_CURE)
        if metric in limits:
            raise UsageError(f"--max-leakage limits {metric} more than once", "give each metric once")
        if below == 0 or (metric != "psnr" and below > 1):
            scale = "more than 0 dB" if metric == "psnr" else "more than 0 and at most 1"
            raise UsageError(f"--max-leakage {text.strip()}: the limit should be {scale}", _LIMIT_CURE)
        limits[metric] = Limit(metric, below)  # type: ignore[arg-type]
    return tuple(limits.values())


def judge(points: Sequence[Point], limits: Sequence[Limit], max_energy_j: float | None) -> tuple[Judged, ...]:
    """Every point with its faults and its place, in the order given."""
    return tuple(
        Judged(
            point, tuple(_faults(point, limits, max_energy_j)),
            not any(beats(other, point, limits) for other in points),
        )
        for point in points
    )  # fmt: skip


def _faults(point: Point, limits: Sequence[Limit], max_energy_j: float | None) -> list[str]:
    faults = [f"{limit.metric} {limit.of(point.leakage):.3f}, limit {limit}"
              for limit in limits if not limit.of(point.leakage) < limit.below]  # fmt: skip
    if max_energy_j is not None:
        joules = point.energy.joules
        if joules is None:
            faults.append(f"energy unknown, limit {max_energy_j:g} J: {point.energy.source}")
        elif not joules <= max_energy_j:
            faults.append(f"{joules:.3g} J, limit {max_energy_j:g} J")
    if point.accuracy is None:
        faults.append("accuracy unknown")
    if point.refused is not None:
        faults.append(point.refused)
    return faults


def beats(one: Point, other: Point, limits: Sequence[Limit]) -> bool:
    """Is `one` better somewhere and nowhere worse? Leakage counts by the limited metrics, by all where none is limited.

    What is unknown of one and known of the other cannot be compared: then neither beats the other.
    """
    better = False
    for mine, its in zip(_costs(one, limits), _costs(other, limits), strict=True):
        if mine is None and its is None:
            continue
        if mine is None or its is None or mine > its:
            return False
        better = better or mine < its
    return better


def _costs(point: Point, limits: Sequence[Limit]) -> list[float | None]:
    """All that is better the lower."""
    fields = [METRICS[limit.metric] for limit in limits] or list(METRICS.values())
    leakage = [getattr(point.leakage, field) for field in fields]
    accuracy = None if point.accuracy is None else -point.accuracy
    return [accuracy, *leakage, point.energy.joules, float(point.sent_bytes), point.ms]


def choose(judged: Sequence[Judged]) -> Point | None:
    """The most accurate point within the limits; of equals the one that leaks least (SSIM), then the one that sends
    least; None where there is none."""
    within = [each.point for each in judged if not each.faults]
    return min(within, key=_preference, default=None)


def _preference(point: Point) -> tuple[object, ...]:
    assert point.accuracy is not None  # an unknown accuracy is a fault
    return (-point.accuracy, point.leakage.ssim, point.sent_bytes, point.split, point.precision, point.kappa)


def nearest(judged: Sequence[Judged]) -> Judged | None:
    """The point with the fewest faults, then the least SSIM: what to tell who was refused."""
    return min(judged, key=lambda each: (len(each.faults), each.point.leakage.ssim), default=None)
