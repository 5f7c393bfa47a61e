from __future__ import annotations

import os
from pathlib import Path

import pytest

from contract.errors import DeviceError
from edge_runtime.state import open_secret, open_state, read_or_set_aside, read_secret, write_durably


def test_a_second_run_on_the_same_state_is_refused(tmp_path: Path) -> None:
    state = open_state(tmp_path / "state")
    with pytest.raises(DeviceError, match="in use by another edge-run"):
        open_state(tmp_path / "state")
    state.close()
    open_state(tmp_path / "state").close()


def test_what_a_killed_run_left_is_dropped(tmp_path: Path) -> None:
    state = open_state(tmp_path / "state")
    (state.engines / "x.onnx.partial").write_bytes(b"half")
    (state.features / "clean.f16").write_bytes(b"features")
    state.close()
    state = open_state(tmp_path / "state")
    assert not list(state.engines.iterdir()) and not list(state.features.iterdir())
    state.close()


def test_the_device_secret_is_made_once_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    secret, made = open_secret(path, "device secret")
    assert made and len(secret) == 32 and os.stat(path).st_mode & 0o777 == 0o600
    assert open_secret(path, "device secret") == (secret, False)


@pytest.mark.parametrize("content", [b"", bytes(31), bytes(33)])
def test_a_spoiled_secret_is_never_replaced_in_silence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(DeviceError, match=f"found {len(content)}"):
        open_secret(path, "device secret")
    assert path.read_bytes() == content


def test_a_missing_site_secret_is_named(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="site secret .*nowhere"):
        read_secret(tmp_path / "nowhere", "site secret (--site-secret)")


def test_de_04_an_unreadable_state_file_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "head"
    path.write_bytes(b"\xff\xff")
    said: list[str] = []
    assert read_or_set_aside(path, lambda data: data.decode(), said.append) is None
    assert not path.exists() and (tmp_path / "head.bad").read_bytes() == b"\xff\xff" and "unreadable" in said[0]
    assert read_or_set_aside(path, lambda data: data.decode(), said.append) is None and len(said) == 1


def test_a_failed_write_leaves_the_old_content_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_durably(path, b"old")
    (tmp_path / "file.partial").mkdir()  # the temporary file cannot be made
    with pytest.raises(DeviceError, match="cannot be written"):
        write_durably(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_stray_folder_among_the_leftovers_does_not_stop_the_start(tmp_path: Path) -> None:
    open_state(tmp_path).close()
    (tmp_path / "features" / "stray").mkdir()
    (tmp_path / "identity" / "d.partial").mkdir()
    open_state(tmp_path).close()
    assert not (tmp_path / "features" / "stray").exists()
