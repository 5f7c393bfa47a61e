"""Answers that no server hears of: of the whole model that this device holds, or of the head that it learned."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from contract.errors import ConfigError
from edge_runtime.answering import make_answers, told, without_head
from edge_runtime.client import Traffic
from edge_runtime.config import LocalConfig
from edge_runtime.delivery import Stopped
from edge_runtime.equip import Equipment, equip_unless_stopped
from edge_runtime.local_answers import LEARN
from edge_runtime.part_worker import PartWorker
from edge_runtime.predictions import accuracy, predict
from edge_runtime.report import Report
from edge_runtime.run_report import Talk, make_report
from edge_runtime.stop_signals import StopSignals
from edge_runtime.threads import in_worker
from edge_runtime.throttle import SlowdownWatch


async def run_alone(config: LocalConfig, say: Callable[[str], None]) -> Report | None:
    """Predict without a server; None when stopped before it was ready.

    Raises: ConfigError when there is nothing here that answers; as `equip`.
    """
    signals, watch = StopSignals(say), SlowdownWatch()
    equipment = await equip_unless_stopped(config, "infer", signals, say)
    if equipment is None:
        return None
    answer = predict_alone if equipment.predicts_alone else answer_alone
    try:
        return await in_worker(lambda: answer(equipment, watch))
    finally:
        equipment.state.close()


def predict_alone(equipment: Equipment, watch: SlowdownWatch) -> Report:
    """Predictions by the whole model that this device holds: no server hears of them.

    Raises: ConfigError when it holds none.
    """
    assert isinstance(equipment.worker, PartWorker)
    try:
        scores = equipment.worker.predict_alone()
    except Stopped:
        return make_report(equipment, "stopped", None, Talk(Traffic()), watch)
    equipment.stages.end("predict")
    time.sleep(equipment.stages.settle_s)
    head = equipment.head_of("") if equipment.terms.label_mode == "client-head" else None
    predictions = predict(scores, equipment.dataset, equipment.wire_labels, head, "local")
    report = make_report(equipment, "done", None, Talk(Traffic()), watch)
    return replace(report, predictions=tuple(predictions), accuracy=accuracy(predictions, equipment.dataset))


def answer_alone(equipment: Equipment, watch: SlowdownWatch) -> Report:
    """Answers of the head that this device learned: no server hears of the images.

    Raises: ConfigError when it has none.
    """
    if equipment.answerer is None:
        raise ConfigError(without_head(equipment), LEARN)
    try:
        answers = make_answers(equipment, {})
    except Stopped:
        return make_report(equipment, "stopped", None, Talk(Traffic()), watch)
    time.sleep(equipment.stages.settle_s)
    return told(equipment, answers, make_report(equipment, "done", None, Talk(Traffic()), watch))
