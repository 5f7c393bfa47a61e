"""One run of edge-run: equip on a thread, converse on the event loop, stop cleanly on a signal, report.

Signals: the first stops the run within seconds and it ends well; the second ends the program at once (DE-03).
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import secrets
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TypeVar

from contract.console import Progress, progress
from contract.errors import ConfigError
from edge_runtime.client import Client, Endpoint
from edge_runtime.conduct import Conduct, Outcome
from edge_runtime.config import DeviceConfig
from edge_runtime.delivery import THREAD_NAME, Delivery, Stopped
from edge_runtime.equip import Equipment, Purpose, equip, new_ask_id
from edge_runtime.predictions import Prediction, accuracy, predict
from edge_runtime.reconnect import Backoff
from edge_runtime.report import Report, peak_rss_mb
from edge_runtime.spool import Spool
from edge_runtime.unanswered import Unanswered

STOP_S = 8.0  # how long the worker may take to notice a stop, before the program leaves without it

Result = TypeVar("Result")


class StopSignals:
    """SIGTERM and SIGINT alike, for the event loop and for the worker's thread."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """Install the handlers; call from the running event loop."""
        self.asked, self.thread_asked = asyncio.Event(), threading.Event()
        self._say = say
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._take, number)

    def _take(self, number: int) -> None:
        if self.asked.is_set():
            os._exit(128 + number)
        self._say("stopping; a second signal ends edge-run at once")
        self.asked.set()
        self.thread_asked.set()


def on_thread(function: Callable[[], Result]) -> asyncio.Future[Result]:
    """Run a function on a thread that cannot keep the program from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: Exception | None) -> None:
        if not future.done():
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        try:
            outcome: tuple[Result | None, Exception | None] = (function(), None)
        except Exception as error:
            outcome = (None, error)
        loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, name=THREAD_NAME, daemon=True).start()
    return future


async def run_device(config: DeviceConfig, purpose: Purpose, once: bool, say: Callable[[str], None]) -> Report | None:
    """Run until the server needs this device no longer or a signal stops it; None when stopped before it was ready.

    Raises: CutlayerError of whatever failed.
    """
    signals = StopSignals(say)
    ready = on_thread(lambda: equip(config, purpose, signals.thread_asked, say))
    asked = asyncio.create_task(signals.asked.wait())
    await asyncio.wait((ready, asked), return_when=asyncio.FIRST_COMPLETED)
    if not ready.done():
        await asyncio.wait((ready,), timeout=STOP_S)
    asked.cancel()
    try:
        equipment = ready.result() if ready.done() else None
    except Stopped:
        return None
    if equipment is None:
        return None
    try:
        return await converse(equipment, signals, once, say)
    finally:
        equipment.state.close()


async def converse(equipment: Equipment, signals: StopSignals, once: bool, say: Callable[[str], None]) -> Report:
    """The conversation with the server, and the report of it."""
    spool = Spool(equipment.state.spool / equipment.purpose, say)
    window = Unanswered(new_ask_id(), spool) if equipment.purpose == "infer" else None
    conduct = Conduct(equipment.identity, equipment.terms, equipment.purpose, spool, window)
    config = equipment.config
    delivery = Delivery(
        equipment.worker,
        spool,
        lambda: secrets.token_hex(8) if config.noise == "fresh" else None,
        window,
        signals.thread_asked,
    )
    endpoint = Endpoint(config.server, config.ca, equipment.clock_floor)
    with ExitStack() as stack:
        bar = UploadBar(delivery, len(equipment.dataset.samples), stack)

        def on_tick() -> None:
            equipment.stages.sample()
            bar.draw()

        client = Client(endpoint, conduct, delivery, Backoff(random.Random()), say, on_tick)
        try:
            outcome = await client.run(signals.asked, once)
        finally:
            delivery.close()
        bar.draw()
    for stage in ("upload", "predict"):
        equipment.stages.end(stage)
    predictions = None
    if outcome.reason == "collected":
        say("the server has everything: this device may be switched off while it trains")
    if outcome.reason != "stopped" and window is not None:
        predictions = name_classes(equipment, conduct, window)
    elif outcome.reason != "stopped":
        equipment.remember_site()
    await settle_worker(delivery)
    return make_report(equipment, conduct, client, outcome, predictions)


async def settle_worker(delivery: Delivery) -> None:
    """Give the worker time to notice a stop; one that is deep in native code is left behind."""
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(poll(lambda: not delivery.busy), STOP_S)


async def poll(condition: Callable[[], bool]) -> None:
    """Wait until it holds."""
    while not condition():
        await asyncio.sleep(0.02)


class UploadBar:
    """Draws how many images the server has acknowledged, from the first one on."""

    def __init__(self, delivery: Delivery, total: int, stack: ExitStack) -> None:
        self._delivery, self._total, self._stack = delivery, total, stack
        self._bar: Progress[None] | None = None
        self._drawn = 0

    def draw(self) -> None:
        """Catch up with what was acknowledged."""
        done = self._delivery.images_acknowledged()
        if not done:
            return
        if self._bar is None:
            self._bar = self._stack.enter_context(progress(total=self._total, description="upload", unit="images"))
        self._bar.update(done - self._drawn)
        self._drawn = done


def name_classes(equipment: Equipment, conduct: Conduct, window: Unanswered) -> list[Prediction]:
    """Predictions from the scores that came. Raises: ConfigError when the head that they need is not here."""
    head = None
    if equipment.terms.label_mode == "client-head":
        run = conduct.welcome.run if conduct.welcome else ""
        head = equipment.keeper.head_of(run)
        if head is None:
            raise ConfigError(
                f"this device has no head of run {run}", "predict with the --state that took part in the adaptation"
            )
    return predict(window.scores, equipment.dataset, equipment.wire_labels, head)


def make_report(
    equipment: Equipment, conduct: Conduct, client: Client, outcome: Outcome, predictions: list[Prediction] | None
) -> Report:
    """Everything that is known at the end."""
    counters, costs, manifest = equipment.worker.counters, equipment.stages.costs(), equipment.installed.manifest
    energies = [cost.energy_j for cost in costs.values()]
    known = [energy_j for energy_j in energies if energy_j is not None]
    dataset, welcome = equipment.dataset, conduct.welcome
    return Report(
        outcome=outcome.reason,
        run=welcome.run if welcome else None,
        images=len(dataset.samples),
        classes=len(dataset.classes),
        class_counts=dataset.class_counts(),
        skipped=tuple({"file": entry.file, "reason": entry.reason} for entry in dataset.skipped),
        duplicates=tuple({"file": entry.file, "same_as": entry.same_as} for entry in dataset.duplicates),
        ignored=dataset.ignored,
        bytes_sent_payload=counters.payload_bytes,
        bytes_per_image=counters.payload_bytes / counters.images if counters.images else None,
        bytes_on_wire=client.traffic.sent_bytes,
        codes_changed=equipment.codes_changed,
        saturated=counters.saturated / counters.codes if counters.codes else None,
        stages_s={name: cost.seconds for name, cost in costs.items()},
        stages_energy_j={name: cost.energy_j for name, cost in costs.items()},
        energy_j=sum(known) if known and len(known) == len(energies) else None,
        energy_reason=equipment.stages.energy_reason() or (None if known else "no stage was run"),
        engine=f"{equipment.engine.name} {equipment.engine.version}",
        engine_fallback=equipment.choice.fallback_reason,
        threads=equipment.engine.threads,
        int8_layers=equipment.engine.int8_layers,
        linear_layers=len(equipment.installed.cut.weights) + len(manifest.quantization.float_weights),
        golden_snr_db=equipment.installed.golden_snr_db if math.isfinite(equipment.installed.golden_snr_db) else None,
        label_mode=equipment.terms.label_mode,
        kappa=welcome.kappa if welcome else None,
        alpha=equipment.terms.alpha,
        noise=equipment.config.noise,
        package=manifest.name,
        package_version=manifest.version,
        package_digest=equipment.installed.digest.hex(),
        peak_rss_mb=peak_rss_mb(),
        predictions=None if predictions is None else tuple(predictions),
        accuracy=None if predictions is None else accuracy(predictions, dataset),
    )
