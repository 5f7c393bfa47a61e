"""From scores to class names: un-permute or apply the own head, name the files, count what was right.

Pure. Names and labels never left the device; here they meet the scores again. Each answer says who gave it: the server,
or this device by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from contract.errors import RemoteProtocolError
from edge_runtime.data import Dataset, Sample
from edge_runtime.head import Floats, Head, softmax

AnsweredBy: TypeAlias = Literal["server", "local"]


@dataclass(frozen=True)
class Prediction:
    """The most likely class of one file."""

    file: str
    class_name: str
    probability: float
    answered_by: AnsweredBy = "server"


@dataclass(frozen=True)
class Answer:
    """Logits (C,) of one image, in the order of these classes."""

    logits: Floats
    classes: Sequence[str]
    answered_by: AnsweredBy

    @property
    def class_name(self) -> str:
        return self.classes[int(self.logits.argmax())]


def logits_of(values: NDArray[np.float32], wire_labels: NDArray[np.int64], head: Head | None) -> NDArray[np.float32]:
    """Logits (n, C) in the device's class order: of the own head from features (n, d), or the server's, un-permuted.

    Raises: RemoteProtocolError when the scores have another width.
    """
    width = len(wire_labels) if head is None else head.weight.shape[1]
    if values.shape[1] != width:
        raise RemoteProtocolError(
            f"expected scores of {width} values, found {values.shape[1]}",
            "let the server run the strategy that trained this device's head",
        )
    return values[:, wire_labels] if head is None else head.logits(values)


def predict(
    scores: Mapping[int, NDArray[np.float32]],
    dataset: Dataset,
    wire_labels: NDArray[np.int64],
    head: Head | None,
    answered_by: AnsweredBy = "server",
) -> list[Prediction]:
    """One prediction per good file, duplicates included, in the order of file names."""
    values = np.concatenate([scores[batch] for batch in sorted(scores)])
    if len(values) != len(dataset.samples):
        raise RemoteProtocolError(
            f"expected scores of {len(dataset.samples)} samples, found {len(values)}", "update the server"
        )
    return name_files(answers_of([(0, values)], dataset, wire_labels, head, answered_by), dataset)


def answers_of(
    rows: Iterable[tuple[int, NDArray[np.float32]]],
    dataset: Dataset,
    wire_labels: NDArray[np.int64],
    head: Head | None,
    answered_by: AnsweredBy = "server",
) -> dict[bytes, Answer]:
    """Answers by wire id, from scores with the place of their first sample.

    Raises: RemoteProtocolError as `logits_of`, and when a batch goes beyond the samples.
    """
    found: dict[bytes, Answer] = {}
    for start, values in rows:
        samples = dataset.samples[start : start + len(values)]
        if len(samples) != len(values):
            raise RemoteProtocolError(
                f"expected scores of {len(samples)} samples, found {len(values)}", "update the server"
            )
        for sample, logits in zip(samples, logits_of(values, wire_labels, head), strict=True):
            found[sample.sample_id] = Answer(logits, dataset.classes, answered_by)
    return found


def name_files(answers: Mapping[bytes, Answer], dataset: Dataset) -> list[Prediction]:
    """One prediction per good file, duplicates included, in the order of file names.

    Raises: RemoteProtocolError where the server ended before it had answered all.
    """
    missing = sum(sample.sample_id not in answers for sample in dataset.samples)
    if missing:
        raise RemoteProtocolError(
            f"the server let this device go, and has not answered {missing} of {len(dataset.samples)} images",
            "look at the server's log, and predict again",
        )
    of_file: dict[str, Prediction] = {}
    for sample in dataset.samples:
        answer = answers[sample.sample_id]
        probability = float(softmax(answer.logits[None]).max())
        of_file[sample.relative] = Prediction(sample.relative, answer.class_name, probability, answer.answered_by)
    for duplicate in dataset.duplicates:
        of_file[duplicate.file] = replace(of_file[duplicate.same_as], file=duplicate.file)
    return [of_file[name] for name in sorted(of_file)]


def accuracy(predictions: list[Prediction], dataset: Dataset) -> float | None:
    """Share of labelled samples whose class was found, each image once; None where nothing is labelled."""
    found = {prediction.file: prediction.class_name for prediction in predictions}
    return share_right([found[sample.relative] for sample in dataset.samples], dataset.samples, dataset.classes)


def share_right(names: Sequence[str], samples: Sequence[Sample], classes: Sequence[str]) -> float | None:
    """Share of the labelled samples that were given their class; None where none is labelled."""
    hits = [
        name == classes[sample.label] for name, sample in zip(names, samples, strict=True) if sample.label is not None
    ]
    return sum(hits) / len(hits) if hits else None
