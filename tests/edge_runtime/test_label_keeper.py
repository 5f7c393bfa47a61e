from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from contract.errors import RemoteProtocolError
from contract.messages import Ask, Checkpoints, Gradient
from edge_runtime.label_keeper import LabelKeeper

IDS = [bytes([number]) * 16 for number in range(6)]
LABELS = dict(zip(IDS, [0, 1, 2, 0, 1, None], strict=True))


def keeper(path: Path, said: list[str] | None = None) -> LabelKeeper:
    return LabelKeeper(LABELS, 3, path, (said if said is not None else []).append)


def ids(*rows: int) -> np.ndarray:
    return np.stack([np.frombuffer(IDS[row], np.uint8) for row in rows])


def scoring(logits: np.ndarray, rows: tuple[int, ...], ask: str = "a") -> Ask:
    return Ask(
        ask, "score_batch", {"split": "train"}, 1.0, {"logits": logits.astype(np.float32), "sample_ids": ids(*rows)}
    )


def stepping(
    rows: tuple[int, ...], step: int, after: int | None = None, base: int = 0, dim: int = 4, drawn: int = 0
) -> Ask:
    features = np.random.default_rng([step, drawn]).normal(size=(len(rows), dim)).astype(np.float32)
    numbers: dict[str, int | float | str] = {"step": step, "after": step - 1 if after is None else after, "base": base}
    return Ask(f"s{step}", "head_step", numbers, 1.0, {"features": features, "sample_ids": ids(*rows)})


def test_se_03_labels_are_joined_by_id_and_copies_may_repeat(tmp_path: Path) -> None:
    logits = np.zeros((4, 3))
    reply = keeper(tmp_path / "head.safetensors").score(scoring(logits, (2, 0, 2, 4)))
    assert reply.gradient.argmin(axis=1).tolist() == [2, 0, 2, 1] and reply.count == 4


@pytest.mark.parametrize("rows", [(5,), (0, 5)])
def test_samples_without_a_label_or_never_sent_are_an_error_of_the_server(
    tmp_path: Path, rows: tuple[int, ...]
) -> None:
    with pytest.raises(RemoteProtocolError, match="never sent"):
        keeper(tmp_path / "head.safetensors").score(scoring(np.zeros((len(rows), 3)), rows))


def test_logits_of_another_width_are_an_error_of_the_server(tmp_path: Path) -> None:
    with pytest.raises(RemoteProtocolError, match="logits of 3 classes, found 5"):
        keeper(tmp_path / "head.safetensors").score(scoring(np.zeros((1, 5)), (0,)))


def test_a_step_is_taken_once_even_over_a_restart(tmp_path: Path) -> None:
    first = keeper(tmp_path / "head.safetensors")
    answers = [first.step_head(stepping((0, 1), 1), "run-1"), first.step_head(stepping((0, 1), 1), "run-1")]
    again = keeper(tmp_path / "head.safetensors")
    answers.append(again.step_head(stepping((0, 1), 1), "run-1"))
    assert all((answer.gradient == answers[0].gradient).all() for answer in answers)
    head = again.head_of("run-1")
    assert head is not None and head.step == 1
    again.step_head(stepping((2, 3), 2), "run-1")
    assert again.head_of("run-1").step == 2  # type: ignore[union-attr]


def test_an_interrupted_training_equals_an_undisturbed_one(tmp_path: Path) -> None:
    whole, broken = keeper(tmp_path / "whole.safetensors"), keeper(tmp_path / "broken.safetensors")
    for number in range(6):
        ask = stepping((0, 1, 2), number + 1)
        whole.step_head(ask, "run-1")
        broken.step_head(ask, "run-1")
        broken = keeper(tmp_path / "broken.safetensors")
    assert (whole.head_of("run-1").weight == broken.head_of("run-1").weight).all()  # type: ignore[union-attr]


def weights(keeper: LabelKeeper) -> list[float]:
    head = keeper.head_of("run-1")
    assert head is not None
    return [*head.weight.ravel().tolist(), *head.bias.tolist(), *head.second_moment.ravel().tolist()]


def train(keeper: LabelKeeper, first: int, last: int, base: int, drawn: int = 0) -> None:
    for step in range(first, last + 1):
        assert isinstance(keeper.step_head(stepping((0, 1, 2), step, base=base, drawn=drawn), "run-1"), Gradient)


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("head.*.safetensors"))


def test_a_server_that_lost_its_newest_checkpoint_is_followed_back(tmp_path: Path) -> None:
    one, whole = keeper(tmp_path / "head.safetensors"), keeper(tmp_path / "whole.safetensors")
    train(whole, 1, 9, base=0)
    train(one, 1, 3, base=0)
    train(one, 4, 6, base=3)
    train(one, 7, 8, base=6)
    one = keeper(tmp_path / "head.safetensors")  # a restart does not forget the kept ones
    train(one, 4, 9, base=3)
    assert weights(one) == weights(whole)


def test_a_head_that_is_not_held_is_told_with_those_that_are(tmp_path: Path) -> None:
    one = keeper(tmp_path / "head.safetensors")
    train(one, 1, 2, base=0)
    train(one, 3, 4, base=2)
    (tmp_path / "head.safetensors").write_bytes(b"torn")
    one = keeper(tmp_path / "head.safetensors")
    assert one.step_head(stepping((0,), 5, base=2), "run-1") == Checkpoints("s5", (0, 2))
    train(one, 3, 5, base=2)
    whole = keeper(tmp_path / "whole.safetensors")
    train(whole, 1, 5, base=0)
    assert weights(one) == weights(whole)


def test_a_device_that_has_lost_every_head_goes_back_to_the_same_beginning(tmp_path: Path) -> None:
    one, whole = keeper(tmp_path / "head.safetensors"), keeper(tmp_path / "whole.safetensors")
    train(whole, 1, 3, base=0)
    assert one.step_head(stepping((0,), 3), "run-1") == Checkpoints("s3", (0,))
    train(one, 1, 3, base=0)
    assert weights(one) == weights(whole)


def test_steps_without_a_sample_of_this_device_do_not_count_for_it(tmp_path: Path) -> None:
    one = keeper(tmp_path / "head.safetensors")
    one.step_head(stepping((0,), 2, after=0), "run-1")
    assert isinstance(one.step_head(stepping((0,), 9, after=2, base=2), "run-1"), Gradient)
    assert one.head_of("run-1").step == 2  # type: ignore[union-attr]


def test_two_kept_heads_are_enough_and_none_is_of_an_abandoned_future(tmp_path: Path) -> None:
    one = keeper(tmp_path / "head.safetensors")
    for step in range(1, 8):
        one.step_head(stepping((0,), step, base=step - 1), "run-1")
    assert kept(tmp_path) == ["head.5.safetensors", "head.6.safetensors"]
    train(one, 6, 6, base=5)  # the server went back to 5 and has its next checkpoint elsewhere
    train(one, 7, 7, base=5)
    train(one, 8, 8, base=7)
    assert kept(tmp_path) == ["head.5.safetensors", "head.7.safetensors"]


def test_going_back_drops_what_was_kept_beyond_before_anything_is_kept_anew(tmp_path: Path) -> None:
    one = keeper(tmp_path / "head.safetensors")
    train(one, 1, 3, base=0)
    train(one, 4, 6, base=3)
    train(one, 7, 7, base=6)
    assert kept(tmp_path) == ["head.3.safetensors", "head.6.safetensors"]
    train(one, 4, 4, base=3)  # the server has gone back to 3
    assert kept(tmp_path) == ["head.3.safetensors"]


def test_a_step_taken_again_that_ended_elsewhere_is_the_one_that_is_kept(tmp_path: Path) -> None:
    """On a GPU a replay gives other features; the head of the first time was kept at that step and stayed."""
    one, whole = keeper(tmp_path / "head.safetensors"), keeper(tmp_path / "whole.safetensors")
    train(one, 1, 3, base=0)
    train(one, 4, 4, base=3)
    for each in (one, whole):
        train(each, 1, 3, base=0, drawn=1)
        train(each, 4, 4, base=3, drawn=1)
    (tmp_path / "head.safetensors").write_bytes(b"torn")
    one = keeper(tmp_path / "head.safetensors")
    train(one, 4, 4, base=3, drawn=1)
    assert weights(one) == weights(whole)


def test_a_kept_head_is_replaced_by_another_of_the_same_step(tmp_path: Path) -> None:
    one, other = keeper(tmp_path / "head.safetensors"), keeper(tmp_path / "other.safetensors")
    train(one, 1, 3, base=0, drawn=1)
    train(other, 1, 3, base=0)
    train(other, 4, 4, base=3)
    (tmp_path / "other.3.safetensors").rename(tmp_path / "head.3.safetensors")  # as after a power cut
    one = keeper(tmp_path / "head.safetensors")
    train(one, 4, 4, base=3, drawn=1)
    expected = weights(one)
    (tmp_path / "head.safetensors").write_bytes(b"torn")
    one = keeper(tmp_path / "head.safetensors")
    train(one, 4, 4, base=3, drawn=1)
    assert weights(one) == expected


def test_the_same_ask_from_another_step_is_another_step(tmp_path: Path) -> None:
    one, whole = keeper(tmp_path / "head.safetensors"), keeper(tmp_path / "whole.safetensors")
    train(one, 1, 2, base=0)
    for each in (
        one,
        whole,
    ):  # back at 0, the server takes step 1 without this device
        answer = each.step_head(stepping((0, 1, 2), 2, after=0), "run-1")
        assert isinstance(answer, Gradient)
    assert weights(one) == weights(whole)
    assert weights(keeper(tmp_path / "head.safetensors")) == weights(whole)


def test_another_run_starts_another_head(tmp_path: Path) -> None:
    one = keeper(tmp_path / "head.safetensors")
    one.step_head(stepping((0,), 1), "run-1")
    one.step_head(stepping((0,), 1, dim=7), "run-2")
    assert one.head_of("run-1") is None and one.head_of("run-2").step == 1  # type: ignore[union-attr]


def test_de_04_a_spoiled_head_is_set_aside_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "head.safetensors").write_bytes(b"torn")
    said: list[str] = []
    one = keeper(tmp_path / "head.safetensors", said)
    assert "unreadable" in said[0] and one.step_head(stepping((0,), 1), "run-1").count == 1
