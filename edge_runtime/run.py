"""One run of edge-run: equip on a thread, converse on the event loop, stop cleanly on a signal, report.

A device that takes packages leaves the run for an offer when it has nothing to do, and goes on afterwards: to the run
it is as if the device had been restarted.

Signals: the first stops the run within seconds and it ends well; the second ends the program at once (DE-03).
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, TypeVar

import psutil

from contract.console import Progress, progress
from contract.errors import ConfigError, RefusedError, UnreachableError
from edge_runtime.allowance import Allowance, open_allowance
from edge_runtime.alone import predict_alone
from edge_runtime.answering import Answers, make_answers, told
from edge_runtime.client import Client
from edge_runtime.conduct import FINAL_REASONS, UPDATE, Conduct, Offers, Outcome
from edge_runtime.config import DeviceConfig, LocalConfig, check_metrics, read_sleep_command
from edge_runtime.delivery import Delivery, Stopped, is_outdated
from edge_runtime.dialling import Endpoint, tls_context
from edge_runtime.equip import Equipment, equip_unless_stopped, new_ask_id
from edge_runtime.equip_images import Purpose
from edge_runtime.identity import read_identity
from edge_runtime.line_marks import LineMarks
from edge_runtime.predictions import Answer, answers_of
from edge_runtime.reconnect import Backoff
from edge_runtime.report import Report
from edge_runtime.run_report import Talk, make_report
from edge_runtime.service import Notifier
from edge_runtime.sleeping import Sleeper
from edge_runtime.spool import Spool
from edge_runtime.standing import NEXT_DAY, Recorder, Standing
from edge_runtime.status_file import boot_id
from edge_runtime.stop_signals import STOP_S, StopSignals
from edge_runtime.taking import Taken, take, takes_packages
from edge_runtime.threads import in_worker
from edge_runtime.throttle import SlowdownWatch
from edge_runtime.unanswered import Unanswered
from edge_runtime.witness import Witness
from edge_runtime.worker import Worker

OTHER_PACKAGE = "package"  # the server's code for a device whose package is not its run's
AGAIN_S, LATER_S = 600.0, 60.0  # until a call that failed is made again; until it may be this device's turn
BEAT_S = 30.0
T = TypeVar("T")


async def run_device(config: DeviceConfig, purpose: Purpose, once: bool, say: Callable[[str], None]) -> Report | None:
    """Run until the server needs this device no longer or a signal stops it; None when stopped before it was ready.

    Raises: CutlayerError of whatever failed.
    """
    # Files that cannot be used are told before an hour is spent.
    tls_context(config.server, config.ca, config.certificate, config.certificate_key)
    read_identity(config.name, config.key)
    say = Recorder(say, time.monotonic)
    signals = StopSignals(say)
    offers = Offers() if purpose == "adapt" and takes_packages(config) else None
    while True:
        refused: RefusedError | None = None
        report: Report | None = None
        try:
            report = await run_once(config, purpose, once, say, signals, offers)
        except RefusedError as error:
            if offers is None or error.code != OTHER_PACKAGE:
                raise
            refused = error  # the package that the server wants may be here, or to be had
        if offers is None or signals.asked.is_set() or not (offers.heard or refused):
            return report
        taken = await unless_stopped(take(config, say), signals)
        if refused is not None and taken in (Taken.NOTHING, Taken.READY):
            raise refused
        if taken is None or (report is not None and report.outcome != UPDATE):
            return report
        if refused is not None and taken in (Taken.FAILED, Taken.LATER):
            if once:
                raise refused
            wait_s = AGAIN_S if taken is Taken.FAILED else LATER_S
            say(f"{refused.cause}; asking again in {wait_s / 60:.0f} min")
            await rest(wait_s, signals)
            if signals.asked.is_set():
                return None
        offers = Offers(time.monotonic() + AGAIN_S if taken is Taken.FAILED else 0.0)


async def rest(seconds: float, signals: StopSignals) -> None:
    """Wait, or until a signal comes. A service manager hears that nothing is to be done, else it would end a hang."""
    notifier, ends_s = Notifier(), time.monotonic() + seconds
    while not signals.asked.is_set() and (left_s := ends_s - time.monotonic()) > 0.0:
        notifier.tell("WATCHDOG=1")
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(signals.asked.wait(), min(BEAT_S, left_s))


async def unless_stopped(work: Coroutine[Any, Any, T], signals: StopSignals) -> T | None:
    """Its result; None when a signal came first, and it was cancelled."""
    task, stopping = asyncio.ensure_future(work), asyncio.create_task(signals.asked.wait())
    await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not task.done():
        task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return None


async def run_once(
    config: DeviceConfig,
    purpose: Purpose,
    once: bool,
    say: Callable[[str], None],
    signals: StopSignals,
    offers: Offers | None,
) -> Report | None:
    """A run with the package that is current; None when stopped before it was ready.

    Raises: CutlayerError of whatever failed.
    """
    watch = SlowdownWatch()
    equipment = await equip_unless_stopped(config, purpose, signals, say)
    if equipment is None:
        return None
    try:
        if equipment.predicts_alone:
            return await in_worker(lambda: predict_alone(equipment, watch))
        return await converse(config, equipment, signals, once, say, watch, offers=offers)
    finally:
        equipment.state.close()


async def converse(
    config: DeviceConfig,
    equipment: Equipment,
    signals: StopSignals,
    once: bool,
    say: Callable[[str], None],
    watch: SlowdownWatch,
    marks: LineMarks | None = None,
    offers: Offers | None = None,
) -> Report:
    """The conversation with the server, and the report of it; `marks` is told of moments of the line."""
    stages = equipment.stages
    spool = Spool(equipment.state.spool / equipment.purpose, say)
    window = Unanswered(new_ask_id(), spool) if equipment.purpose == "infer" else None
    assert equipment.purpose != "learn"
    conduct = Conduct(read_identity(config.name, config.key), equipment.terms, equipment.purpose, spool, window, offers)
    delivery = Delivery(equipment.worker, spool, draws_of(config), window, signals.thread_asked)
    link_down: str | None = None
    with UploadBar(delivery, len(equipment.dataset.samples)) as bar:

        def on_tick() -> None:
            stages.sample()
            watch.look()
            if bar.draw():
                stages.end("upload")

        endpoint = Endpoint(
            config.server, config.ca, equipment.clock_floor, config.certificate, config.certificate_key
        )  # fmt: skip
        allowance = open_allowance(equipment.state.root, config.max_mb_per_day, equipment.clock_floor, say)

        def on_rest(begins: bool) -> None:
            (stages.begin if begins else stages.end)("sleep")

        sleeper = Sleeper(read_sleep_command(config.sleep_command), say)
        client = Client(
            endpoint, conduct, delivery, Backoff(random.Random()), say, on_tick, marks=marks, on_rest=on_rest,
            sleeper=sleeper,
            allowance=allowance,
            can_do_without=equipment.answerer is not None,
        )  # fmt: skip
        witness = Witness(
            equipment.state.root, standing_of(config, equipment, client, conduct, delivery, spool, say, allowance)
        )
        async with witness.shown(check_metrics(config.metrics), say):
            watching = asyncio.create_task(witness.keep())
            try:
                outcome = await client.run(signals.asked, once)
            except UnreachableError as error:
                if equipment.answerer is None:
                    raise
                outcome, link_down = Outcome("link-down", True), error.cause
                say(f"{error.cause} ({error.cure}); the head on this device answers instead")
                delivery.give_up()
            finally:
                watching.cancel()
                witness.write()  # its last words, for edge-run status and report
                delivery.close()
                if allowance is not None:
                    allowance.close()
        on_tick()
    for stage in ("upload", "predict"):
        stages.end(stage)
    if link_down is not None:  # what the worker has in hand comes first, for there is one engine
        await poll(lambda: not delivery.busy or signals.asked.is_set())
    await settle_worker(delivery)
    answers: Answers | None = None
    if window is not None and outcome.reason != "stopped":
        came = server_answers(equipment, conduct, window)
        try:
            answers = await in_worker(lambda: make_answers(equipment, came))
        except Stopped:
            outcome = Outcome("stopped", True)
    await asyncio.sleep(stages.settle_s)  # until the meter has told of the last stage
    talk = Talk(client.traffic, conduct.sent_again, conduct.sent_again_most, delivery.round_trips)
    report = make_report(equipment, outcome.reason, conduct.welcome, talk, watch)
    if outcome.reason == "collected":
        say("the server has everything: this device may be switched off while it trains")
    welcome = conduct.welcome if window is None and outcome.reason in FINAL_REASONS else None
    worker = equipment.worker
    if welcome is not None and isinstance(worker, Worker) and is_outdated(welcome, worker, spool):
        raise RefusedError(
            f"run {welcome.run} has another upload under this device's name: the images or settings here are not the "
            "same, or this state has no record of it",
            "for these images start a new run on the server; give every machine a name and key of its own",
            "upload-mismatch",
        )
    if answers is not None:
        return told(equipment, answers, replace(report, link_down=link_down))
    if outcome.reason != "stopped":
        equipment.remember_site()
    return report


def standing_of(
    config: DeviceConfig,
    equipment: Equipment,
    client: Client,
    conduct: Conduct,
    delivery: Delivery,
    spool: Spool,
    say: Callable[[str], None],
    allowance: Allowance | None,
) -> Callable[[], Standing]:
    """Looks at a conversation, whenever it is called."""
    began_s, boot, process = time.monotonic(), boot_id(), psutil.Process()

    def look() -> Standing:
        now_s = time.monotonic()
        says, (energy_j, energy_reason) = delivery.status(now_s), equipment.stages.energy_now()
        return Standing(
            device=config.name,
            purpose=equipment.purpose,
            server=config.server,
            boot=boot,
            pid=os.getpid(),
            taken_s=now_s,
            began_s=began_s,
            link=client.link,
            run=conduct.welcome.run if conduct.welcome else None,
            server_says=conduct.server_status,
            busy=says.busy,
            step=says.step,
            waiting_for=NEXT_DAY if client.link.budget_spent and not says.busy else says.waiting_for,
            waiting_s=says.since_s,
            images=len(equipment.dataset.samples),
            images_acknowledged=delivery.images_acknowledged(),
            spool_frames=spool.pending,
            spool_bytes=spool.pending_bytes,
            sent_bytes=client.traffic.sent_bytes,
            received_bytes=client.traffic.received_bytes,
            connections=client.traffic.connections,
            energy_j=energy_j,
            energy_reason=energy_reason,
            rss_bytes=process.memory_info().rss,
            package_digest=equipment.terms.package_digest,
            label_mode=equipment.terms.label_mode,
            budget_bytes=None if allowance is None else allowance.limit_bytes,
            budget_spent_bytes=None if allowance is None else allowance.spent_bytes,
            recent=say.recent if isinstance(say, Recorder) else (),
        )

    return look


def draws_of(config: LocalConfig) -> Callable[[], str | None]:
    """Names a new upload's draw of noise: none for keyed noise, a name of its own for fresh noise."""
    return lambda: secrets.token_hex(8) if config.noise == "fresh" else None


async def settle_worker(delivery: Delivery) -> None:
    """Give the worker time to notice a stop; one that is deep in native code is left behind."""
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(poll(lambda: not delivery.busy), STOP_S)


async def poll(condition: Callable[[], bool]) -> None:
    """Wait until it holds."""
    while not condition():
        await asyncio.sleep(0.02)


class UploadBar:
    """Draws how many images the server has acknowledged, from the first one to the last."""

    def __init__(self, delivery: Delivery, total: int) -> None:
        self._delivery, self._total = delivery, total
        self._bar = ExitStack()
        self._open: Progress[None] | None = None
        self._drawn = 0

    def __enter__(self) -> UploadBar:
        return self

    def __exit__(self, *raised: object) -> None:
        self._bar.close()

    def draw(self) -> bool:
        """Catch up with what was acknowledged; True once that is everything."""
        done = self._delivery.images_acknowledged() or 0
        if done > self._drawn:
            if self._open is None:
                bar: Progress[None] = progress(total=self._total, description="upload", unit="images")
                self._open = self._bar.enter_context(bar)
            self._open.update(done - self._drawn)
            self._drawn = done
        if done == self._total:
            self._bar.close()
        return done == self._total


def server_answers(equipment: Equipment, conduct: Conduct, window: Unanswered) -> dict[bytes, Answer]:
    """Answers from the scores that came. Raises: ConfigError when the head that they need is not here."""
    rows = window.rows()
    head = None
    if equipment.terms.label_mode == "client-head" and rows:
        run = conduct.welcome.run if conduct.welcome else ""
        head = equipment.head_of(run)
        if head is None:
            raise ConfigError(
                f"this device has no head of run {run}", "predict with the --state that took part in the adaptation"
            )
    return answers_of(rows, equipment.dataset, equipment.wire_labels, head)
