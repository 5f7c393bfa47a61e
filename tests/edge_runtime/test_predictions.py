from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from contract.errors import RemoteProtocolError
from edge_runtime.data import Dataset, Duplicate, Sample
from edge_runtime.head import new_head
from edge_runtime.predictions import accuracy, answers_of, logits_of, name_files, predict

CLASSES = ("ant", "bee", "cat")


def dataset(labels: list[int | None]) -> Dataset:
    samples = [
        Sample(Path("x"), f"{9 - row}.png", bytes([row]) * 16, bytes(32), label) for row, label in enumerate(labels)
    ]
    return Dataset(CLASSES, tuple(samples), (), (Duplicate("copy.png", "9.png"),), 0)


def test_scores_under_the_permutation_get_their_own_names() -> None:
    table = np.array([2, 0, 1])  # ant is called 2 on the wire, bee 0, cat 1
    scores = {1: np.array([[0, 9, 0]], np.float32), 0: np.array([[0, 0, 9], [9, 0, 0]], np.float32)}
    predictions = predict(scores, dataset([0, 1, 2]), table, None)
    assert [(each.file, each.class_name) for each in predictions] == [
        ("7.png", "cat"),
        ("8.png", "bee"),
        ("9.png", "ant"),
        ("copy.png", "ant"),
    ]
    assert all(each.probability > 0.99 for each in predictions)


def test_accuracy_counts_labelled_samples_once_and_is_absent_without_them() -> None:
    scores = {0: np.eye(3, dtype=np.float32)[[0, 0, 0]]}
    table = np.arange(3)
    assert accuracy(predict(scores, dataset([0, 1, None]), table, None), dataset([0, 1, None])) == 0.5
    assert accuracy(predict(scores, dataset([None] * 3), table, None), dataset([None] * 3)) is None


def test_the_own_head_turns_features_into_logits() -> None:
    head = new_head(3, 5, np.random.default_rng(0))
    features = np.random.default_rng(1).normal(size=(2, 5)).astype(np.float32)
    assert (logits_of(features, np.arange(3), head) == head.logits(features)).all()
    with pytest.raises(RemoteProtocolError, match="scores of 5 values, found 4"):
        logits_of(features[:, :4], np.arange(3), head)


def test_missing_scores_are_no_predictions() -> None:
    with pytest.raises(RemoteProtocolError, match="scores of 3 samples, found 1"):
        predict({0: np.zeros((1, 3), np.float32)}, dataset([0, 1, 2]), np.arange(3), None)


def test_a_server_that_ends_before_it_answered_all_is_told_of_not_crashed_on() -> None:
    shown = dataset([0, 1, 2])
    answers = answers_of([(1, np.eye(3, dtype=np.float32)[:1])], shown, np.arange(3), None)
    with pytest.raises(RemoteProtocolError, match="has not answered 2 of 3 images"):
        name_files(answers, shown)
