"""Checkpoints, the journal and metrics come back whole, or the one before does."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from contract.messages import Gradient  # noqa: E402
from server_runtime import files, run_directory  # noqa: E402
from server_runtime.run_directory import RunDirectory  # noqa: E402
from server_runtime.site_run import Journal  # noqa: E402
from server_runtime.strategies import State  # noqa: E402

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "noise behind": lambda data: data + b"noise" * 50,
    "one bit": lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
}


def state(epoch: int) -> State:
    return State(
        {"backend.w": torch.full((3, 4), float(epoch)), "head.b": torch.arange(3.0), "adam.0.step": torch.tensor(2.0)},
        {"epoch": epoch, "text": "x", "unknown": None},
    )


def epoch_of(directory: RunDirectory) -> int | None:
    found = directory.resume("clinic")
    return None if found is None else int(found[0].values["epoch"] or 0)


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    RunDirectory(tmp_path).keep("clinic", state(3), ended=False)
    found = RunDirectory(tmp_path).resume("clinic")
    assert found is not None
    assert not found[1]
    assert found[0].values == {"epoch": 3, "text": "x", "unknown": None}
    assert all(torch.equal(tensor, state(3).tensors[name]) for name, tensor in found[0].tensors.items())
    assert found[0].tensors["adam.0.step"].shape == ()


@pytest.mark.parametrize("damage", DAMAGE)
def test_de_04_a_damaged_checkpoint_gives_way_to_the_one_before(damage: str, tmp_path: Path) -> None:
    said: list[str] = []
    directory = RunDirectory(tmp_path, said.append)
    directory.keep("clinic", state(1), ended=False)
    directory.keep("clinic", state(2), ended=False)
    path = tmp_path / "checkpoints" / "clinic.safetensors"
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert epoch_of(directory) == 1
    assert "unreadable" in said[0]
    previous = tmp_path / "checkpoints" / "clinic.previous.safetensors"
    previous.write_bytes(b"")
    assert epoch_of(directory) is None


def test_a_kill_between_two_renames_leaves_the_one_before(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.keep("clinic", state(1), ended=False)
    path = tmp_path / "checkpoints" / "clinic.safetensors"
    path.rename(path.with_suffix(".previous.safetensors"))
    assert epoch_of(directory) == 1


def reply(step: int) -> Gradient:
    return Gradient(f"run.step-{step}", 0.5, 1, 2, np.full((2, 3), step, np.float32))


def test_the_journal_holds_replies_since_the_checkpoint(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.journal("clinic", "a", reply(1))
    directory.keep("clinic", state(1), ended=False)
    for device in "ab":
        directory.journal("clinic", device, reply(2))
    found = RunDirectory(tmp_path).journalled("clinic")
    assert sorted(found.replies) == [("run.step-2", "a"), ("run.step-2", "b")]
    assert np.array_equal(found.replies["run.step-2", "a"].gradient, reply(2).gradient)


def test_the_journal_holds_which_devices_a_question_went_on_with(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.journal("clinic", "a", reply(1))
    directory.journal_quorum("clinic", "run.step-1", ("a", "c"))
    directory.journal("clinic", "a", reply(2))
    found = RunDirectory(tmp_path).journalled("clinic")
    assert found.quorums == {"run.step-1": ("a", "c")}
    assert sorted(found.replies) == [("run.step-1", "a"), ("run.step-2", "a")]


@pytest.mark.parametrize("damage", ["empty", "half", "noise behind"])
def test_de_04_a_torn_journal_is_cut_and_goes_on(damage: str, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for step in (1, 2):
        directory.journal("clinic", "a", reply(step))
    path = tmp_path / "journal" / "clinic"
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    kept = directory.journalled("clinic").replies
    assert len(kept) == {"empty": 0, "half": 1, "noise behind": 2}[damage] or len(kept) == 0
    directory.journal("clinic", "a", reply(9))
    assert set(directory.journalled("clinic").replies) == {*kept, ("run.step-9", "a")}


def test_going_back_takes_the_newest_checkpoint_that_fits(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.keep("clinic", state(1), ended=False)
    directory.keep("clinic", state(2), ended=False)
    directory.journal("clinic", "a", reply(3))
    found = directory.rewind("clinic", lambda found: found.values["epoch"] == 1)
    assert found is not None and found.values == {"epoch": 1, "text": "x", "unknown": None}
    assert directory.journalled("clinic") == Journal()
    assert epoch_of(directory) == 1  # the newer one is gone: its steps are taken again
    assert directory.rewind("clinic", lambda found: False) is None
    assert epoch_of(directory) is None


@pytest.mark.parametrize("damage", DAMAGE)
def test_de_04_going_back_sets_a_damaged_checkpoint_aside(damage: str, tmp_path: Path) -> None:
    said: list[str] = []
    directory = RunDirectory(tmp_path, said.append)
    directory.keep("clinic", state(1), ended=False)
    directory.keep("clinic", state(2), ended=False)
    path = tmp_path / "checkpoints" / "clinic.safetensors"
    spoiled = DAMAGE[damage](path.read_bytes())
    path.write_bytes(spoiled)
    found = directory.rewind("clinic", lambda found: True)
    assert found is not None and found.values["epoch"] == 1
    assert path.with_name("clinic.safetensors.damaged-1").read_bytes() == spoiled
    assert "unreadable" in said[0]


def test_what_going_back_drops_stays_away_after_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(tmp_path)
    directory.keep("clinic", state(1), ended=False)
    directory.keep("clinic", state(2), ended=False)
    directory.journal("clinic", "a", reply(3))
    durable = {folder: set(folder.iterdir()) for folder in (tmp_path / "checkpoints", tmp_path / "journal")}
    assert [len(names) for names in durable.values()] == [2, 1]
    monkeypatch.setattr(files, "sync_directory", lambda folder: durable.update({folder: set(folder.iterdir())}))
    directory.rewind("clinic", lambda found: False)
    assert list(durable.values()) == [set(), set()]


def test_a_checkpoint_that_does_not_count_its_metrics_keeps_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(tmp_path)
    for epoch in (1, 2):
        directory.record({"site": "clinic", "epoch": epoch})
    dumps = json.dumps

    def without_lines(values: dict[str, object], **options: object) -> str:
        return dumps({name: value for name, value in values.items() if name != "lines"}, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(run_directory.json, "dumps", without_lines)
    directory.keep("clinic", state(2), ended=False)
    assert epoch_of(directory) == 2
    assert directory.rewind("clinic", lambda found: True) is not None
    assert [line["epoch"] for line in directory.metrics()] == [1, 2]


def test_what_is_recorded_again_after_a_stop_stands_once(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for epoch in (1, 2, 3):
        directory.record({"site": "clinic", "epoch": epoch})
        directory.record({"site": "farm", "epoch": epoch})
        if epoch == 2:
            directory.keep("clinic", state(2), ended=False)
    again = RunDirectory(tmp_path)
    again.resume("clinic")
    lines = [(line["site"], line["epoch"]) for line in again.metrics()]
    assert lines == [("clinic", 1), ("farm", 1), ("clinic", 2), ("farm", 2), ("farm", 3)]
    again.rewind("clinic", lambda found: False)
    assert {line["site"] for line in again.metrics()} == {"farm"}


def test_a_checkpoint_counts_the_lines_without_reading_a_long_file_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for epoch in (1, 2):
        RunDirectory(tmp_path).record({"site": "clinic", "epoch": epoch})
    directory = RunDirectory(tmp_path)
    directory.record({"site": "farm", "epoch": 1})
    directory.record({"site": "clinic", "epoch": 3})
    monkeypatch.setattr(directory, "metrics", lambda: pytest.fail("the whole file was read for a checkpoint"))
    directory.keep("clinic", state(3), ended=False)
    monkeypatch.undo()
    directory.record({"site": "clinic", "epoch": 4})
    directory.rewind("clinic", lambda found: True)
    assert [line["epoch"] for line in directory.metrics()] == [1, 2, 1, 3]
    directory.keep("clinic", state(3), ended=False)  # as many lines as before
    directory.record({"site": "clinic", "epoch": 4})
    RunDirectory(tmp_path).resume("clinic")
    assert [line["epoch"] for line in directory.metrics()] == [1, 2, 1, 3]


def test_metrics_append_and_a_torn_line_is_cut(tmp_path: Path) -> None:
    said: list[str] = []
    RunDirectory(tmp_path).record({"site": "clinic", "epoch": 1, "loss": None})
    with open(tmp_path / "metrics.jsonl", "a") as stream:
        stream.write('{"site": "clinic", "ep')
    directory = RunDirectory(tmp_path, said.append)
    directory.record({"site": "clinic", "epoch": 2, "loss": 0.5})
    assert [line["epoch"] for line in directory.metrics()] == [1, 2]
    assert directory.metrics()[0]["loss"] is None
    assert "cut off" in said[0]


def test_metrics_refuse_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        RunDirectory(tmp_path).record({"loss": float("nan")})


def test_what_was_trained_is_published_under_its_own_names(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    RunDirectory(tmp_path).publish("clinic", state(1))
    assert list(load_file(tmp_path / "models" / "clinic" / "backend.safetensors")) == ["w"]
    assert list(load_file(tmp_path / "models" / "clinic" / "head.safetensors")) == ["b"]


def test_a_disk_that_refuses_a_file_is_told_of_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("server_runtime.files.os.fsync", refuse)
    with pytest.raises(OSError, match="No space left on device: '.*receipt.json'"):
        files.write_atomic(tmp_path / "receipt.json", b"{}")
    assert not list(tmp_path.iterdir())
