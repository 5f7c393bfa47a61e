"""A day without a server: features are made and kept until `edge-run sync`, within a budget of energy, time and disk.

What is made is what an upload would hold, bit for bit, as noise is keyed by image and package and not by run; so what
is sent twice is counted once, and what the cap drops can be made again. Features are made with the least noise that
this device accepts; a server that asks for more gets nothing of them.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from contract.codec import prepare
from contract.errors import ConfigError, UsageError
from contract.messages import LIMITS, Ask
from edge_runtime.client import Traffic
from edge_runtime.config import DeviceConfig
from edge_runtime.delivery import Stopped, plan_upload
from edge_runtime.equip import Equipment, equip
from edge_runtime.identity import read_identity
from edge_runtime.reconnect import BUILT
from edge_runtime.report import Report
from edge_runtime.run_report import Talk, make_report
from edge_runtime.spool import Spool
from edge_runtime.stop_signals import StopSignals
from edge_runtime.stored import FOLDER, SESSION, Record, open_spool, read_record, write_record
from edge_runtime.threads import in_worker
from edge_runtime.throttle import SlowdownWatch
from edge_runtime.worker import Upload, Worker

WATCH_S = 0.5
_CLOCK, _DURATION = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)"), re.compile(r"\+(\d+(?:\.\d+)?)([smh])")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Bounds:
    """When to stop, and how much to keep; None: no such bound."""

    energy_j: float | None
    until_s: float | None  # of the monotonic clock
    spool_bytes: int


def parse_until(text: str, now: datetime) -> float:
    """Seconds from now: "18:30" is the next time that a clock on the wall shows it, "+8h" needs no clock.

    Raises: UsageError, also for a time of day on a device whose clock was never set.
    """
    duration = _DURATION.fullmatch(text)
    if duration:
        return float(duration[1]) * _SECONDS[duration[2]]
    clock = _CLOCK.fullmatch(text)
    if clock is None:
        raise UsageError(f"--until should be HH:MM or +N with s, m or h, found {text!r}", "such as 18:30 or +8h")
    if now.astimezone(timezone.utc) < BUILT:
        raise UsageError(
            f"--until {text} needs a clock, and this device's shows {now:%Y-%m-%d}", "give a duration, such as +8h"
        )
    then = now.replace(hour=int(clock[1]), minute=int(clock[2]), second=0, microsecond=0)
    return ((then if then > now else then + timedelta(days=1)) - now).total_seconds()


async def run_offline(config: DeviceConfig, bounds: Bounds, say: Callable[[str], None]) -> Report | None:
    """Work until all images are done, a bound is reached or a signal comes; None when stopped before it was ready.

    Raises: ConfigError where there is nothing to do without a server, or a budget and no meter; as `equip`.
    """
    read_identity(config.name, config.key)  # a key that is no use is told before a day is spent, not by `sync`
    signals, watch = StopSignals(say), SlowdownWatch()
    try:
        equipment = await in_worker(lambda: equip(config, "adapt", signals.thread_asked, say))
    except Stopped:
        return None
    try:
        worker = check(equipment, bounds)
        reason: list[str] = []
        watching = asyncio.create_task(_watch(equipment, bounds, signals.thread_asked, reason))
        watching.add_done_callback(lambda task: signals.thread_asked.set())  # also where the meter fails
        folder = equipment.state.root / FOLDER
        spool = open_spool(folder, say, bounds.spool_bytes)
        try:
            await in_worker(lambda: make(config.name, equipment, worker, spool, say))
            outcome = "made"
        except Stopped:
            outcome = reason[0] if reason else "stopped"
        if watching.done() and not watching.cancelled():
            watching.result()
        watching.cancel()
        equipment.stages.end("upload")
        equipment.remember_site()
        await asyncio.sleep(equipment.stages.settle_s)
        kept = spool.next_seq - 1 - spool.acknowledged
        batches = -(-len(worker.samples) // worker.batch_size(_upload(equipment)))
        say(
            f"{kept} of {batches} batches are kept in {folder} ({spool.pending_bytes / 1e6:.1f} MB)"
            + (f"; {spool.acknowledged} oldest ones were dropped to keep within the cap" if spool.acknowledged else "")
        )
        return make_report(equipment, outcome, None, Talk(Traffic()), watch)
    finally:
        equipment.state.close()


def check(equipment: Equipment, bounds: Bounds) -> Worker:
    """The worker, where it can do something by itself.

    Raises: ConfigError.
    """
    if not isinstance(equipment.worker, Worker):
        raise ConfigError(
            "this package has parts that train together with the server: there is nothing to do without one",
            "use --offline with a package whose frontend is frozen",
        )
    if equipment.config.noise == "fresh":
        raise ConfigError('noise = "fresh" names a draw for each run of a server', "use keyed noise with --offline")
    if bounds.energy_j is not None and (reason := equipment.stages.energy_now()[1]):
        raise ConfigError(
            f"--budget needs a meter, and energy is unknown here: {reason}",
            "see edge-doctor; --power-model IDLE:BUSY models it, --until bounds the time instead",
        )
    return equipment.worker


async def _watch(equipment: Equipment, bounds: Bounds, stop: threading.Event, reason: list[str]) -> None:
    """Set `stop` once a bound is reached, and say which. A meter that falls silent ends the work as well: a budget that
    nobody counts is none."""
    began_j, _ = equipment.stages.energy_now()
    while True:
        await asyncio.sleep(WATCH_S)
        if bounds.until_s is not None and time.monotonic() >= bounds.until_s:
            reason.append("until")
        if bounds.energy_j is not None:
            now_j, _ = equipment.stages.energy_now()
            if now_j is None or began_j is None:
                reason.append("meter-lost")
            elif now_j - began_j >= bounds.energy_j:
                reason.append("budget")
        if reason:
            stop.set()
            return


def _upload(equipment: Equipment) -> Upload:
    return Upload(SESSION, "train", equipment.terms.kappa_floor, LIMITS.frame_bytes)


def make(device: str, equipment: Equipment, worker: Worker, spool: Spool, say: Callable[[str], None]) -> None:
    """Every batch into the spool, going on where an earlier call was stopped; durable one by one.

    Raises: Stopped; DataError, EngineError, DeviceError.
    """
    upload = _upload(equipment)
    record = Record(
        device=device,
        package_digest=equipment.terms.package_digest,
        class_count=equipment.terms.class_count,
        class_list_hash=equipment.terms.class_list_hash,
        label_mode=equipment.terms.label_mode,
        kappa=upload.kappa,
        alpha=equipment.terms.alpha,
        images=len(worker.samples),
        batch_size=worker.batch_size(upload),
        fingerprint=worker.fingerprint(upload),
    )
    _begin_if_new(equipment, record, spool, say)
    ask = Ask(SESSION, "collect_features", {"kappa": upload.kappa, "seed": 0}, 60.0)
    upload = plan_upload(ask, LIMITS.frame_bytes, worker, spool, lambda: None)
    for message in worker.answer(ask, SESSION, upload):
        spool.append(prepare(message), durable=True)
        spool.drop_oldest_beyond_limit()
    equipment.stages.end("upload")


def _begin_if_new(equipment: Equipment, record: Record, spool: Spool, say: Callable[[str], None]) -> None:
    """Features of other images or settings make way: sent together they would be a mixture."""
    folder = equipment.state.root / FOLDER
    try:
        same = read_record(folder) == record
    except ConfigError:
        same = False
    if same and spool.head is not None:
        return
    if spool.head is not None and spool.next_seq > 1:
        say("images or settings are others than when features were kept: these make way, and all are made anew")
    spool.begin(SESSION, SESSION, 0)
    write_record(folder, record)
