"""A meter that plays a recorded trace of power: for tests, and to run a profile again on what was recorded.

The trace is CSV with a header `seconds,watts`, or JSON `{"seconds": [...], "watts": [...]}`: monotonic seconds from any
start, in order; watts empty or null where a read had failed.
"""

from __future__ import annotations

import bisect
import csv
import io
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from contract.errors import ConfigError, why
from edge_runtime.meters._pieces import Timing
from edge_runtime.meters._reading import Quality
from edge_runtime.meters._sampled import SampledMeter, Sampling

TRACE_BYTES_MOST = 64 << 20


@dataclass(frozen=True)
class Recording:
    """Moments, ascending, and the watts that were read then."""

    seconds: tuple[float, ...]
    watts: tuple[float | None, ...]


class ReplaySensor:
    """Shows what was recorded as long after the first moment as its first read is ago; straight between two moments."""

    name = "replay"
    quality: Quality = "replayed"

    def __init__(self, recording: Recording, scope: str, clock: Callable[[], float]) -> None:
        self.scope = scope
        self._recording, self._clock = recording, clock
        self._began_s: float | None = None

    def read_w(self) -> float:
        """Watts. Raises: OSError where a read had failed, and after the end."""
        now_s = self._clock()
        self._began_s = now_s if self._began_s is None else self._began_s
        seconds, watts = self._recording.seconds, self._recording.watts
        at_s = seconds[0] + now_s - self._began_s
        place = min(bisect.bisect_right(seconds, at_s), len(seconds) - 1)
        before_w, after_w = watts[place - 1], watts[place]
        if at_s > seconds[-1]:
            raise OSError("the recording has ended")
        if before_w is None or after_w is None:
            raise OSError("a read had failed in the recording")
        return before_w + (after_w - before_w) * (at_s - seconds[place - 1]) / (seconds[place] - seconds[place - 1])


def open_replay(
    path: Path, clock: Callable[[], float] = time.monotonic, start: Callable[[SampledMeter], None] | None = None
) -> SampledMeter:
    """A meter on the recording, sampled about as often as it was. Raises: ConfigError when it is no such file."""
    recording = read_recording(path)
    spacing_s = (recording.seconds[-1] - recording.seconds[0]) / (len(recording.seconds) - 1)
    timing = Timing(window_s=0.0, doubt_s=spacing_s)
    sampling = Sampling(interval_s=spacing_s, gap_most_s=max(2.0, 3.0 * spacing_s), timing=timing)
    sensor = ReplaySensor(recording, f"recording {path.name}", clock)
    return SampledMeter(sensor, sampling, clock, start, "replayed, not measured")


def read_recording(path: Path) -> Recording:
    """Raises: ConfigError."""
    try:
        if path.stat().st_size > TRACE_BYTES_MOST:
            raise ValueError(f"it has more than {TRACE_BYTES_MOST} bytes")
        text = path.read_text(encoding="utf-8")
        recording = _from_json(text) if path.suffix == ".json" else _from_csv(text)
        _check(recording)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no recording of power: {why(error, path)}",
            "give a CSV file with the header seconds,watts, or JSON",
        ) from error
    return recording


def _from_csv(text: str) -> Recording:
    rows = list(csv.DictReader(io.StringIO(text)))
    watts = tuple(float(row["watts"]) if row["watts"] else None for row in rows)
    return Recording(tuple(float(row["seconds"]) for row in rows), watts)


def _from_json(text: str) -> Recording:
    document = json.loads(text)
    watts = tuple(None if each is None else float(each) for each in document["watts"])
    return Recording(tuple(map(float, document["seconds"])), watts)


def _check(recording: Recording) -> None:
    seconds, watts = recording.seconds, recording.watts
    if len(seconds) < 2 or len(seconds) != len(watts):
        raise ValueError(f"{len(seconds)} moments and {len(watts)} powers, expected two or more of each")
    if any(after <= before for before, after in zip(seconds, seconds[1:], strict=False)):
        raise ValueError("its moments do not ascend")
    if not all(math.isfinite(each) for each in (*seconds, *(each for each in watts if each is not None))):
        raise ValueError("it has figures that are not finite")
