"""From scores to class names: un-permute or apply the own head, name the files, count what was right.

Pure. Names and labels never left the device; here they meet the scores again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contract.errors import RemoteProtocolError
from edge_runtime.data import Dataset
from edge_runtime.head import Head, softmax


@dataclass(frozen=True)
class Prediction:
    """The most likely class of one file."""

    file: str
    class_name: str
    probability: float


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
    scores: Mapping[int, NDArray[np.float32]], dataset: Dataset, wire_labels: NDArray[np.int64], head: Head | None
) -> list[Prediction]:
    """One prediction per good file, duplicates included, in the order of file names."""
    values = np.concatenate([scores[batch] for batch in sorted(scores)])
    if len(values) != len(dataset.samples):
        raise RemoteProtocolError(
            f"expected scores of {len(dataset.samples)} samples, found {len(values)}", "update the server"
        )
    probabilities = softmax(logits_of(values, wire_labels, head))
    best = probabilities.argmax(axis=1)
    of_file = {
        sample.relative: Prediction(sample.relative, dataset.classes[best[row]], float(probabilities[row, best[row]]))
        for row, sample in enumerate(dataset.samples)
    }
    for duplicate in dataset.duplicates:
        same = of_file[duplicate.same_as]
        of_file[duplicate.file] = Prediction(duplicate.file, same.class_name, same.probability)
    return [of_file[name] for name in sorted(of_file)]


def accuracy(predictions: list[Prediction], dataset: Dataset) -> float | None:
    """Share of labelled samples whose class was found, each image once; None where nothing is labelled."""
    found = {prediction.file: prediction.class_name for prediction in predictions}
    hits = [
        found[sample.relative] == dataset.classes[sample.label]
        for sample in dataset.samples
        if sample.label is not None
    ]
    return sum(hits) / len(hits) if hits else None
