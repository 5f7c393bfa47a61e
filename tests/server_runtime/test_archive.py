"""A run's backup: whole, checked, never over another run, and made while the server writes."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from contract.errors import ConfigError
from server_runtime.archive import back_up, restore
from server_runtime.store import Store
from tests.server_runtime import tiny
from tests.server_runtime.test_erasure import make_run, names


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / "r1")


def test_a_run_comes_back_as_it_was_although_its_server_worked(root: Path, tmp_path: Path) -> None:
    store = Store(root)  # it is open, and its write-ahead log is not empty
    late = tiny.batches(tiny.upload("late", 4), "run.features", 4)[0]
    store.open_session("late", "s", "adapt")
    store.keep("clinic", "late", "s", 1, late)
    count = back_up(root, tmp_path / "r1.tar")
    back = restore(tmp_path / "r1.tar", tmp_path / "elsewhere")
    assert back == tmp_path / "elsewhere" / "r1"
    assert len(names(back)) == count
    ignored = {"state.sqlite-wal", "state.sqlite-shm", "lock"}
    assert names(back) == names(root) - ignored
    again = Store(back)
    assert again.records("clinic", "train") == store.records("clinic", "train")
    assert all(again.read(record) is not None for record in again.records("clinic", "train"))
    assert again.received_seq("late", "s") == 1
    store.close()
    again.close()


def test_a_run_is_never_replaced(root: Path, tmp_path: Path) -> None:
    back_up(root, tmp_path / "r1.tar")
    with pytest.raises(ConfigError, match="is there already"):
        restore(tmp_path / "r1.tar", root.parent)


def test_damage_is_found_and_nothing_is_left_half(root: Path, tmp_path: Path) -> None:
    back_up(root, tmp_path / "r1.tar")
    whole = (tmp_path / "r1.tar").read_bytes()
    for bad in (
        whole[: len(whole) // 2],
        whole[: whole.index(b'{"format"')],
        whole.replace(b"x" * 10, b"y" * 10),
        b"no archive",
    ):
        (tmp_path / "bad.tar").write_bytes(bad)
        with pytest.raises(ConfigError, match="backup"):
            restore(tmp_path / "bad.tar", tmp_path / "new")
        assert not list((tmp_path / "new").glob("*"))


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/../../evil", ".hidden/x"])
def test_no_name_leads_out_of_the_run(name: str, tmp_path: Path) -> None:
    manifest = json.dumps({"format": 1, "run": "r1", "files": {name: "00"}}).encode()
    with tarfile.open(tmp_path / "bad.tar", "w") as archive:
        entry = tarfile.TarInfo("manifest.json")
        entry.size = len(manifest)
        archive.addfile(entry, io.BytesIO(manifest))
    with pytest.raises(ConfigError, match="not whole"):
        restore(tmp_path / "bad.tar", tmp_path / "runs")


def test_a_target_that_cannot_be_written_is_said(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be backed up"):
        back_up(root, tmp_path / "nowhere" / "r1.tar")
    assert not list(tmp_path.glob("*.part*"))
