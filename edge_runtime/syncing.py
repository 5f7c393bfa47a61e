"""`edge-run sync`: the conversation of a run, with stored features in the place of a worker that makes them.

What the features are is `stored`'s part; what is said, kept and repeated is that of any run (`conduct`, `client`).
"""

from __future__ import annotations

import asyncio
import random
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from contract.errors import ConfigError, DeviceError
from edge_runtime.allowance import Allowance, open_allowance
from edge_runtime.client import Client
from edge_runtime.conduct import Conduct
from edge_runtime.delivery import Delivery
from edge_runtime.dialling import Endpoint
from edge_runtime.identity import Identity, read_identity
from edge_runtime.reconnect import BUILT, Backoff
from edge_runtime.spool import Spool
from edge_runtime.state import open_state
from edge_runtime.stop_signals import StopSignals
from edge_runtime.stored import FOLDER, RECORD_FILE, StoredWorker, open_spool, read_record


@dataclass(frozen=True)
class Errand:
    """Whose features go where; `spool` None: those of this device's own state."""

    server: str
    ca: Path | None
    device: str
    key: Path
    state: Path | None
    spool: Path | None
    once: bool
    max_mb_per_day: float | None = None  # of this device's own state
    certificate: Path | None = None
    certificate_key: Path | None = None


def is_empty(state: Path) -> bool:
    """Whether this state has no features to send. Raises: ConfigError where it is no state."""
    if not (state / "identity").is_dir():
        raise ConfigError(f"{state} is no state of a device", "give --state the directory that edge-run uses")
    return not (state / FOLDER / RECORD_FILE).exists()


def nothing_sent() -> dict[str, object]:
    """What `sync` would say of a state that has nothing to send, and asks no server for."""
    return {
        "outcome": "nothing to send", "run": None, "images": 0, "batches": 0, "bytes_on_wire": 0, "connections": 0,
    }  # fmt: skip


async def sync(errand: Errand, say: Callable[[str], None]) -> dict[str, object]:
    """Send, and say what came of it. Features of this device's own state are deleted once the server has them all.

    Raises: ConfigError; DeviceError where batches are missing, after the others were sent; as `Client.run`.
    """
    identity = read_identity(errand.device, errand.key)
    if errand.spool is not None:
        return await _send(errand, identity, errand.spool, errand.spool / "outbox", say)
    assert errand.state is not None  # the command asks for one of the two
    state = open_state(errand.state)
    allowance = open_allowance(state.root, errand.max_mb_per_day, BUILT, say)
    try:
        done = await _send(errand, identity, state.root / FOLDER, state.spool / "adapt", say, allowance)
        if done["outcome"] == "collected":
            shutil.rmtree(state.root / FOLDER)
        return done
    finally:
        if allowance is not None:
            allowance.close()
        state.close()


async def _send(
    errand: Errand,
    identity: Identity,
    folder: Path,
    outbox: Path,
    say: Callable[[str], None],
    allowance: Allowance | None = None,
) -> dict[str, object]:
    record = read_record(folder)
    if record.device != errand.device:
        raise ConfigError(
            f"these features are of device {record.device!r}, not {errand.device!r}",
            "give --name and --key of that one",
        )
    signals, threads_stop = StopSignals(say), threading.Event()
    worker = StoredWorker(record, open_spool(folder, say, limit_bytes=1 << 62))
    missing = worker.missing
    spool = Spool(outbox, say)
    conduct = Conduct(identity, record.terms, "adapt", spool)
    delivery = Delivery(worker, spool, lambda: None, None, threads_stop)
    ended = asyncio.Event()
    is_all_there = False

    def on_tick() -> None:
        """The server says goodbye when it has all; where batches are missing it waits, and this end leaves."""
        nonlocal is_all_there
        if missing and delivery.round_trips and spool.acknowledged + 1 >= spool.next_seq:
            is_all_there = True
            ended.set()

    async def stop_either() -> None:
        await signals.asked.wait()
        threads_stop.set()
        ended.set()

    watching = asyncio.create_task(stop_either())
    endpoint = Endpoint(errand.server, errand.ca, BUILT, errand.certificate, errand.certificate_key)
    client = Client(endpoint, conduct, delivery, Backoff(random.Random()), say, on_tick, allowance=allowance)
    try:
        outcome = await client.run(ended, errand.once)
    finally:
        watching.cancel()
        delivery.close()
    if is_all_there:
        spool.annotate("")  # this upload is over: the next one begins at its first batch
        raise DeviceError(
            f"{missing} of {record.batches} batches are not here: dropped to keep within the cap, or not made yet; "
            "the others were sent",
            "run edge-run with the images while the server can be reached: it makes them again, and none counts twice",
        )
    return {
        "outcome": outcome.reason,
        "run": conduct.welcome.run if conduct.welcome else None,
        "images": worker.counters.images,
        "batches": record.batches,
        "bytes_on_wire": client.traffic.sent_bytes,
        "connections": client.traffic.connections,
    }
