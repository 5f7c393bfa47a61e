from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from contract.errors import DeviceError
from edge_runtime.part_store import PartCheckpoint, PartStore, from_bytes, to_bytes

RUN = "run.1-a"


def checkpoint(step: int, run: str = RUN, drawn: int = 0) -> PartCheckpoint:
    rng = np.random.default_rng([step, drawn])
    part = {
        "tensor:w.0": rng.normal(size=(2, 3)).astype(np.float32).T,  # not contiguous
        "tensor:scale": np.asarray(rng.normal(), np.float32),  # without axes
        "steps": np.array([step], np.int64),
    }
    return PartCheckpoint(run, step, 2, (0.1 * step, step, 2 * step), part, {"weight": np.ones((2, 2), np.float32)})


def store(folder: Path, said: list[str] | None = None) -> PartStore:
    return PartStore(folder, (said if said is not None else []).append)


def same(one: PartCheckpoint | None, other: PartCheckpoint) -> bool:
    assert one is not None
    arrays = [(one.part, other.part), (one.head, other.head)]
    return (one.run, one.step, one.cut, one.sums) == (other.run, other.step, other.cut, other.sums) and all(
        mine.keys() == theirs.keys()
        and all((mine[name].shape, mine[name].dtype) == (theirs[name].shape, theirs[name].dtype) for name in mine)
        and all((mine[name] == theirs[name]).all() for name in mine)
        for mine, theirs in arrays
    )


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    found, ask = from_bytes(to_bytes(checkpoint(3), "run-1.round"))
    assert same(found, checkpoint(3)) and ask == "run-1.round"
    store(tmp_path).keep(checkpoint(3), 0)
    assert same(store(tmp_path).read(RUN, 3), checkpoint(3))


@pytest.mark.parametrize(
    "data", [b"", b"noise" * 9, bytes(100), to_bytes(checkpoint(1))[:-1], to_bytes(checkpoint(1))[1:]]
)
def test_a_spoiled_checkpoint_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a part"):
        from_bytes(data)


def test_nothing_is_held_but_the_beginning(tmp_path: Path) -> None:
    assert store(tmp_path).steps(RUN) == (0,)
    assert store(tmp_path).read(RUN, 1) is None and store(tmp_path).read_round(RUN, "a") is None


@pytest.mark.parametrize("restarts", [False, True])
def test_the_newest_and_the_server_s_last_two_checkpoints_are_kept(tmp_path: Path, restarts: bool) -> None:
    one, kept = store(tmp_path), []
    for step, base in [(1, 0), (2, 0), (3, 2), (4, 2), (5, 4), (6, 4), (7, 4), (9, 7), (10, 9)]:
        one = store(tmp_path) if restarts else one
        one.keep(checkpoint(step), base)
        kept.append(one.steps(RUN))
    assert kept == [
        *((0, 1), (0, 2), (0, 2, 3), (0, 2, 4), (0, 2, 4, 5), (0, 2, 4, 6), (0, 2, 4, 7), (0, 4, 7, 9)),
        (0, 7, 9, 10),
    ]


@pytest.mark.parametrize("restarts", [False, True])
def test_what_the_server_has_gone_back_from_is_dropped(tmp_path: Path, restarts: bool) -> None:
    one = store(tmp_path)
    for step, base in [(2, 0), (3, 2), (4, 2), (5, 4), (6, 4), (7, 6)]:
        one.keep(checkpoint(step), base)
    assert one.steps(RUN) == (0, 4, 6, 7)
    one = store(tmp_path) if restarts else one
    one.keep(checkpoint(5, drawn=1), 4)
    assert one.steps(RUN) == (0, 4, 5) and same(one.read(RUN, 5), checkpoint(5, drawn=1))
    one.keep(checkpoint(1, drawn=1), 0)  # to the beginning
    assert one.steps(RUN) == (0, 1)


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    one = store(tmp_path)
    one.keep(checkpoint(1), 0)
    one.keep(checkpoint(1, drawn=1), 0)
    assert same(one.read(RUN, 1), checkpoint(1, drawn=1))


def test_only_one_run_is_kept_and_runs_are_told_apart(tmp_path: Path) -> None:
    one = store(tmp_path)
    one.keep(checkpoint(5, "run.1"), 0)
    one.keep(checkpoint(7), 5)
    assert (one.steps("run.1"), one.steps(RUN), one.steps("run")) == ((0,), (0, 7), (0,))


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    others = ["notes", "part.x.safetensors", "part.run.x.safetensors", "part.run.1.safetensors.bad"]
    for name in others:
        (tmp_path / name).touch()
    store(tmp_path).keep(checkpoint(1), 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, f"part.{RUN}.1.safetensors"])


def test_de_04_what_is_torn_is_set_aside_once_and_no_longer_offered(tmp_path: Path) -> None:
    said: list[str] = []
    one = store(tmp_path, said)
    one.keep(checkpoint(1), 0)
    one.keep(checkpoint(2), 1)
    (tmp_path / f"part.{RUN}.2.safetensors").write_bytes(b"torn")
    assert one.read(RUN, 2) is None and one.read(RUN, 2) is None and len(said) == 1
    assert one.steps(RUN) == (0, 1) and same(one.read(RUN, 1), checkpoint(1))


def test_a_file_under_another_s_name_is_not_taken_for_it(tmp_path: Path) -> None:
    (tmp_path / f"part.{RUN}.4.safetensors").write_bytes(to_bytes(checkpoint(3)))
    assert store(tmp_path).read(RUN, 4) is None


def test_a_round_is_that_of_its_run_and_ask(tmp_path: Path) -> None:
    one = store(tmp_path)
    one.keep_round("ask-1", checkpoint(1))
    one.keep_round("ask-1", checkpoint(2))
    again = store(tmp_path)
    assert same(again.read_round(RUN, "ask-1"), checkpoint(2))
    assert again.read_round(RUN, "ask-2") is None and again.read_round("run-2", "ask-1") is None
    assert again.steps(RUN) == (0,)


def test_de_04_a_torn_round_begins_anew(tmp_path: Path) -> None:
    said: list[str] = []
    one = store(tmp_path, said)
    one.keep_round("ask-1", checkpoint(1))
    (tmp_path / "round.safetensors").write_bytes(b"torn")
    assert one.read_round(RUN, "ask-1") is None and "unreadable" in said[0]


def test_a_disk_that_refuses_is_an_error_of_the_device(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="cannot be written"):
        store(tmp_path / "missing").keep(checkpoint(1), 0)
