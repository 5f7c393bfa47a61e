from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from contract.errors import RemoteProtocolError
from contract.messages import Ask
from edge_runtime.label_keeper import LabelKeeper

IDS = [bytes([number]) * 16 for number in range(6)]
LABELS = dict(zip(IDS, [0, 1, 2, 0, 1, None], strict=True))


def keeper(path: Path, said: list[str] | None = None) -> LabelKeeper:
    return LabelKeeper(LABELS, 3, bytes(32), path, (said if said is not None else []).append)


def ids(*rows: int) -> np.ndarray:
    return np.stack([np.frombuffer(IDS[row], np.uint8) for row in rows])


def scoring(logits: np.ndarray, rows: tuple[int, ...], ask: str = "a") -> Ask:
    return Ask(
        ask, "score_batch", {"split": "train"}, 1.0, {"logits": logits.astype(np.float32), "sample_ids": ids(*rows)}
    )


def stepping(rows: tuple[int, ...], ask: str, dim: int = 4) -> Ask:
    features = np.random.default_rng(len(ask)).normal(size=(len(rows), dim)).astype(np.float32)
    return Ask(ask, "head_step", {}, 1.0, {"features": features, "sample_ids": ids(*rows)})


def test_se_03_labels_are_joined_by_id_and_copies_may_repeat(tmp_path: Path) -> None:
    logits = np.zeros((4, 3))
    reply = keeper(tmp_path / "head").score(scoring(logits, (2, 0, 2, 4)))
    assert reply.gradient.argmin(axis=1).tolist() == [2, 0, 2, 1] and reply.count == 4


@pytest.mark.parametrize("rows", [(5,), (0, 5)])
def test_samples_without_a_label_or_never_sent_are_an_error_of_the_server(
    tmp_path: Path, rows: tuple[int, ...]
) -> None:
    with pytest.raises(RemoteProtocolError, match="never sent"):
        keeper(tmp_path / "head").score(scoring(np.zeros((len(rows), 3)), rows))


def test_logits_of_another_width_are_an_error_of_the_server(tmp_path: Path) -> None:
    with pytest.raises(RemoteProtocolError, match="logits of 3 classes, found 5"):
        keeper(tmp_path / "head").score(scoring(np.zeros((1, 5)), (0,)))


def test_a_step_is_taken_once_even_over_a_restart(tmp_path: Path) -> None:
    first = keeper(tmp_path / "head")
    answers = [first.step_head(stepping((0, 1), "s1"), "run-1"), first.step_head(stepping((0, 1), "s1"), "run-1")]
    again = keeper(tmp_path / "head")
    answers.append(again.step_head(stepping((0, 1), "s1"), "run-1"))
    assert all((answer.gradient == answers[0].gradient).all() for answer in answers)
    head = again.head_of("run-1")
    assert head is not None and head.step == 1
    again.step_head(stepping((2, 3), "s2"), "run-1")
    assert again.head_of("run-1").step == 2  # type: ignore[union-attr]


def test_an_interrupted_training_equals_an_undisturbed_one(tmp_path: Path) -> None:
    whole, broken = keeper(tmp_path / "whole"), keeper(tmp_path / "broken")
    for number in range(6):
        ask = stepping((0, 1, 2), "s" * (number + 1))
        whole.step_head(ask, "run-1")
        broken.step_head(ask, "run-1")
        broken = keeper(tmp_path / "broken")
    assert (whole.head_of("run-1").weight == broken.head_of("run-1").weight).all()  # type: ignore[union-attr]


def test_another_run_starts_another_head(tmp_path: Path) -> None:
    one = keeper(tmp_path / "head")
    one.step_head(stepping((0,), "s1"), "run-1")
    one.step_head(stepping((0,), "s1", dim=7), "run-2")
    assert one.head_of("run-1") is None and one.head_of("run-2").step == 1  # type: ignore[union-attr]


def test_de_04_a_spoiled_head_is_set_aside_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "head").write_bytes(b"torn")
    said: list[str] = []
    one = keeper(tmp_path / "head", said)
    assert "unreadable" in said[0] and one.step_head(stepping((0,), "s1"), "run-1").count == 1
