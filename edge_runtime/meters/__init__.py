"""Energy meters: one file each, and the door that finds the one that works here.

A meter counts joules since it was opened, so a stage is a subtraction; attributing them to stages is left to `stages`.
Unknown is None with a reason, never 0 (PW-01). The file's name is the meter's name. `replay` and `modelled` measure
nothing: the one is opened by its own name, the other only where the caller hands a model in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from contract.errors import ConfigError, why
from edge_runtime.meters._pieces import Piece, Timing
from edge_runtime.meters._reading import Quality, Reading
from edge_runtime.meters._trace import COVERED_LEAST, Powers, PowerTrace, Window
from edge_runtime.meters.battery import open_battery
from edge_runtime.meters.ina import open_ina
from edge_runtime.meters.kasa import Plug, open_kasa, read_plug
from edge_runtime.meters.modelled import PowerModel, open_modelled, read_model
from edge_runtime.meters.none import NoMeter
from edge_runtime.meters.nvml import open_nvml
from edge_runtime.meters.pi_pmic import open_pi_pmic
from edge_runtime.meters.rapl import open_rapl
from edge_runtime.meters.replay import open_replay

__all__ = [
    "COVERED_LEAST", "Meter", "Piece", "Plug", "PowerModel", "PowerTrace", "Powers", "Probe", "Reading", "Timing",
    "Window", "open_plug", "open_replay", "probe", "read_model", "recording",
]  # fmt: skip


class Meter(Protocol):
    """Cumulative energy of a declared scope."""

    @property
    def name(self) -> str:
        """Its file's."""

    @property
    def scope(self) -> str:
        """What is inside the figure, e.g. "cpu packages and dram"."""

    @property
    def quality(self) -> Quality:
        """Whether it measures."""

    @property
    def timing(self) -> Timing:
        """When its figures were true, and how exact they are."""

    @property
    def settle_s(self) -> float:
        """How long after a moment it has told of it."""

    @property
    def failure(self) -> str | None:
        """Why its newest sample failed, None where it did not."""

    @property
    def note(self) -> str | None:
        """What is to be said beside every figure."""

    def read(self, now_s: float) -> Reading:
        """Joules since the meter was opened. Never raises for a transient fault."""

    def watch(self, sink: Callable[[Piece], None], fine: bool = False) -> Callable[[], None]:
        """Hand pieces of power to `sink`, on a thread of its own, until the returned function is called."""


@dataclass(frozen=True)
class Probe:
    """The meter to use, and one line for each that was not usable or only in part."""

    meter: Meter
    reasons: tuple[str, ...]


def probe(root: Path = Path("/"), plug: Plug | None = None, model: PowerModel | None = None) -> Probe:
    """Try each meter in the order of preference: what sees more of the machine comes first; none always answers.

    `root` is the file system to look in, so that a test can give a made-up one; a GPU is asked only in the real one.
    A smart plug is asked only where one is named, and a model only where it is given, after all that measures.

    Raises: ConfigError when the plug refuses the account of its file, or is a strip and has no such outlet.
    """
    opened: list[tuple[str, Callable[[], tuple[Meter | None, list[str]]]]] = [
        *([("kasa", lambda: open_kasa(plug))] if plug is not None else []),
        ("ina", lambda: open_ina(root)), ("pi_pmic", lambda: open_pi_pmic(root)), ("rapl", lambda: open_rapl(root)),
        ("battery", lambda: open_battery(root)),
    ]  # fmt: skip
    if root == Path("/"):
        opened.append(("nvml", open_nvml))
    if model is not None:
        opened.append(("modelled", lambda: open_modelled(model, root)))
    reasons: list[str] = []
    for name, open_meter in opened:
        try:
            meter, missing = open_meter()
        except OSError as error:  # a file system in a state that the meter's own file does not expect
            meter, missing = None, [f"{name}: {why(error)}"]
        reasons.extend(missing)
        if meter is not None:
            return Probe(meter, tuple(reasons))
    return Probe(NoMeter("; ".join(reasons)), tuple(reasons))


def open_plug(address: str | None, account: Path | None) -> Plug | None:
    """The plug of a configuration, None where there is none. Raises: ConfigError; also for an account of no plug."""
    if address is None and account is not None:
        raise ConfigError(
            "plug_account is given, and plug is not: the account opens no plug",
            "name the plug with --plug, or leave out --plug-account",
        )
    return None if address is None else read_plug(address, account)


@contextmanager
def recording(meter: Meter) -> Iterator[PowerTrace]:
    """Keep what the meter shows, sampled finely, from now to the end of the block.

    Of the last `settle_s` of it the meter has not told yet: wait that long before the block ends.
    """
    trace = PowerTrace(meter.timing)
    stop = meter.watch(trace.add, fine=True)
    try:
        yield trace
    finally:
        stop()
