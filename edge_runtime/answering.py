"""Who answers which image: the server what its scores came of, the head here the rest; and how right both were.

Pure but for the frontend, which runs for images that only the head here can answer. The conversation with the server is
`run`'s part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from edge_runtime.equip import Equipment
from edge_runtime.local_answers import LEARN
from edge_runtime.local_record import Compared
from edge_runtime.predictions import Answer, accuracy, name_files, share_right
from edge_runtime.report import LocalFigures, Report
from edge_runtime.worker import Worker


@dataclass(frozen=True)
class Answers:
    """By wire id: the server's, as far as they came, and those of the head here, as far as it has seen the images."""

    server: Mapping[bytes, Answer]
    local: Mapping[bytes, Answer]


def make_answers(equipment: Equipment, server: Mapping[bytes, Answer]) -> Answers:
    """Let the head here answer what the server has not. Raises: Stopped; DataError, EngineError."""
    answerer, worker = equipment.answerer, equipment.worker
    if answerer is None or not isinstance(worker, Worker):
        return Answers(server, {})
    samples = equipment.dataset.samples
    worker.look_at(answerer.missing(sample for sample in samples if sample.sample_id not in server))
    local: dict[bytes, Answer] = {}
    for sample in samples:
        logits = answerer.logits(sample)
        if logits is not None:
            local[sample.sample_id] = Answer(logits, answerer.record.facts.classes, "local")
    return Answers(server, local)


def told(equipment: Equipment, answers: Answers, report: Report) -> Report:
    """The report with every answer, and with both accuracies where images are labelled. Raises: DeviceError."""
    dataset = equipment.dataset
    predictions = name_files({**answers.local, **answers.server}, dataset)
    compared = compare(equipment, answers)
    if compared is not None and equipment.answerer is not None:
        equipment.answerer.remember(compared)
    return replace(
        report,
        predictions=tuple(predictions),
        accuracy=accuracy(predictions, dataset),
        local=local_figures(equipment),
    )


def compare(equipment: Equipment, answers: Answers) -> Compared | None:
    """Both on the labelled images that both answered and that the head here did not learn from; None without any."""
    answerer, dataset = equipment.answerer, equipment.dataset
    if answerer is None:
        return None
    both = [
        sample
        for sample in dataset.samples
        if sample.label is not None
        and not answerer.has_learned(sample)
        and sample.sample_id in answers.server
        and sample.sample_id in answers.local
    ]
    shares = [
        share_right([given[sample.sample_id].class_name for sample in both], both, dataset.classes)
        for given in (answers.server, answers.local)
    ]
    if shares[0] is None or shares[1] is None:
        return None
    return Compared(len(both), shares[0], shares[1])


def local_figures(equipment: Equipment) -> LocalFigures:
    """What is known of the head here, or why there is none."""
    holder = equipment.answerer or equipment.learner
    record = None if holder is None else holder.record
    if record is None:
        return LocalFigures(reason=without_head(equipment))
    facts = record.facts
    return LocalFigures(
        images=len(record.sample_ids),
        classes=len(facts.classes),
        held_out_accuracy=facts.held_out_accuracy,
        held_out_images=facts.held_out_images,
        compared=facts.compared,
    )


def without_head(equipment: Equipment) -> str:
    """Why nothing is answered here without a server."""
    if not equipment.installed.manifest.cuts:
        return "the parts of this package train with the server, and none of them answers alone"
    return f"this device has learned no head for this package ({LEARN})"
