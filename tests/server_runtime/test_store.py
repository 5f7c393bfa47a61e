"""What devices sent survives, is counted once, and damage to any file costs at most itself."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from contract.errors import RefusedError, RemoteProtocolError
from server_runtime.store import Store, Upload
from tests.server_runtime import tiny


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, said: list[str]) -> Iterator[Store]:
    opened = Store(tmp_path, said.append)
    opened.open_session("pi", "s1", "adapt")
    yield opened
    opened.close()


def fill(store: Store, whole: Upload, order: Callable[[int], list[int]] = lambda n: list(range(n))) -> None:
    messages = tiny.batches(whole, "run.features", 4)
    for number in order(len(messages)):
        store.keep("clinic", "pi", "s1", number + 1, messages[number])


def same(left: Upload | None, right: Upload) -> bool:
    names = ("sample_ids", "codes", "sources", "labels")
    return left is not None and all(np.array_equal(getattr(left, name), getattr(right, name)) for name in names)


def test_batches_come_back_as_the_upload_whatever_their_order(store: Store) -> None:
    whole = tiny.upload("pi", 10)
    fill(store, whole, lambda n: [2, 0, 1])
    assert same(store.upload("clinic", "pi", "run.features"), whole)
    assert store.received_seq("pi", "s1") == 3


def test_an_upload_is_none_until_it_is_whole(store: Store) -> None:
    messages = tiny.batches(tiny.upload("pi", 10), "run.features", 4)
    for number in (0, 2):
        store.keep("clinic", "pi", "s1", number + 1, messages[number])
        assert not store.complete("pi", "run.features")
        assert store.upload("clinic", "pi", "run.features") is None


def test_an_upload_is_never_a_mixture_of_two_machines(store: Store, tmp_path: Path) -> None:
    whole, other = tiny.upload("pi", 10), tiny.upload("pi", 10, seed=1)
    first, second = (tiny.batches(each, "run.features", 4) for each in (whole, other))
    store.keep("clinic", "pi", "s1", 1, first[0])
    store.open_session("pi", "s2", "adapt")
    with pytest.raises(RefusedError, match="batch 0 of 'run.features' is stored with other samples") as raised:
        store.keep("clinic", "pi", "s2", 1, second[0])
    assert raised.value.code == "upload-mismatch" and raised.value.retry_after_s is None
    for number in (1, 2):
        store.keep("clinic", "pi", "s1", number + 1, first[number])
    assert same(store.upload("clinic", "pi", "run.features"), whole)


def test_wi_04_a_replayed_batch_counts_once_under_any_seq(store: Store, tmp_path: Path) -> None:
    whole = tiny.upload("pi", 10)
    fill(store, whole)
    store.open_session("pi", "s2", "adapt")
    assert not store.keep("clinic", "pi", "s2", 1, tiny.batches(whole, "run.features", 4)[0])
    assert same(store.upload("clinic", "pi", "run.features"), whole)
    assert store.received_seq("pi", "s2") == 1
    assert len(list(tmp_path.glob("tensors/*/*/*"))) == 3


def test_a_batch_that_disagrees_with_its_ask_is_refused(store: Store) -> None:
    messages = tiny.batches(tiny.upload("pi", 10), "run.features", 4)
    store.keep("clinic", "pi", "s1", 1, messages[0])
    with pytest.raises(RemoteProtocolError, match="11 samples"):
        store.keep("clinic", "pi", "s1", 2, replace(messages[1], total=11))
    store.keep("clinic", "pi", "s1", 2, messages[1])
    with pytest.raises(RemoteProtocolError, match="more samples"):
        store.keep("clinic", "pi", "s1", 3, replace(messages[1], batch=2))


def test_the_first_joiner_fixes_the_class_list(store: Store) -> None:
    assert store.classes("clinic") is None
    assert store.fix_classes("clinic", 10, "aa") == (10, "aa")
    assert store.fix_classes("clinic", 9, "bb") == (10, "aa")
    assert store.classes("clinic") == (10, "aa")


def test_receipts_of_replayable_messages_count_up_only(store: Store) -> None:
    store.note_received("pi", "s1", 5)
    store.note_received("pi", "s1", 4)
    assert store.received_seq("pi", "s1") == 5
    assert store.received_seq("pi", "other") is None


def test_answered_requests_are_gone_and_a_new_copy_counts_anew(store: Store, tmp_path: Path) -> None:
    message = tiny.batches(tiny.upload("pi", 4), "infer-1", 4, "infer")[0]
    store.open_session("pi", "s2", "infer")
    store.keep("clinic", "pi", "s2", 1, message)
    assert len(store.records("clinic", "infer", unanswered=True)) == 1
    store.answer("pi", "infer-1", 0)
    assert store.records("clinic", "infer", unanswered=True) == []
    assert list(tmp_path.glob("tensors/*/*/*")) == []
    store.open_session("pi", "s3", "infer")
    assert store.keep("clinic", "pi", "s3", 1, message)
    assert len(store.records("clinic", "infer", unanswered=True)) == 1
    store.forget_requests("pi", "s4")
    assert store.records("clinic", "infer", unanswered=True) == []


def test_a_second_store_on_the_run_sees_what_the_first_wrote(store: Store, tmp_path: Path) -> None:
    whole = tiny.upload("pi", 10)
    reader = Store(tmp_path)
    fill(store, whole)
    assert same(reader.upload("clinic", "pi", "run.features"), whole)
    reader.close()


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "noise behind": lambda data: data + b"noise" * 50,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_de_04_a_damaged_batch_is_set_aside_and_asked_again(
    damage: str, store: Store, tmp_path: Path, said: list[str]
) -> None:
    whole = tiny.upload("pi", 10)
    fill(store, whole)
    victim = sorted(tmp_path.glob("tensors/*/*/*"))[1]
    victim.write_bytes(DAMAGE[damage](victim.read_bytes()))
    assert store.upload("clinic", "pi", "run.features") is None
    assert "damaged" in said[0]
    assert not store.complete("pi", "run.features")
    store.keep("clinic", "pi", "s1", 4, tiny.batches(whole, "run.features", 4)[1])
    assert same(store.upload("clinic", "pi", "run.features"), whole)


def flip_in_sample_ids(path: Path) -> None:
    """One bit of the first wire id: the file still parses."""
    data = bytearray(path.read_bytes())
    sample_id = load_file(path)["sample_ids"][0].tobytes()
    data[data.index(sample_id)] ^= 1
    path.write_bytes(data)


def lose(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("harm", [flip_in_sample_ids, lose])
def test_de_04_a_batch_that_was_damaged_is_repaired_by_its_own_copy(
    harm: Callable[[Path], None], store: Store, tmp_path: Path, said: list[str]
) -> None:
    whole = tiny.upload("pi", 10)
    fill(store, whole)
    harm(sorted(tmp_path.glob("tensors/*/*/*"))[1])
    store.open_session("pi", "s2", "adapt")
    assert store.keep("clinic", "pi", "s2", 1, tiny.batches(whole, "run.features", 4)[1])
    assert same(store.upload("clinic", "pi", "run.features"), whole)
    assert len(said) == 1 and "damaged" in said[0]


@pytest.mark.parametrize("damage", ["empty", "half", "noise in front"])
def test_de_04_a_damaged_ledger_is_rebuilt_from_the_files(damage: str, tmp_path: Path) -> None:
    whole = tiny.upload("pi", 10)
    first = Store(tmp_path)
    first.fix_classes("clinic", 3, "aa")
    first.open_session("pi", "s1", "adapt")
    fill(first, whole)
    first.close()
    ledger = tmp_path / "state.sqlite"
    data = ledger.read_bytes()
    ledger.write_bytes({"empty": b"", "half": data[: len(data) // 2], "noise in front": b"noise" + data}[damage])
    said: list[str] = []
    again = Store(tmp_path, said.append)
    assert same(again.upload("clinic", "pi", "run.features"), whole)
    assert again.received_seq("pi", "s1") == 3
    assert again.classes("clinic") == (3, "aa")
    assert "rebuilt" in said[0]
    again.close()


def test_nothing_is_acknowledged_that_a_killed_writer_left_half(store: Store, tmp_path: Path) -> None:
    """A file without a row (killed between the two) does no harm: the batch is written again."""
    whole = tiny.upload("pi", 10)
    fill(store, whole)
    connection = sqlite3.connect(tmp_path / "state.sqlite")
    with connection:
        connection.execute("DELETE FROM uploads WHERE batch = 2")
    connection.close()
    assert not store.complete("pi", "run.features")
    store.keep("clinic", "pi", "s1", 3, tiny.batches(whole, "run.features", 4)[2])
    assert same(store.upload("clinic", "pi", "run.features"), whole)
