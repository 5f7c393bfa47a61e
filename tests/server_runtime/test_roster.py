"""Who is enrolled, and what no roster may hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract import signature
from contract.errors import ConfigError
from contract.names import check_name
from server_runtime.roster import read_roster
from tests.server_runtime import tiny


def test_sites_and_devices_are_sorted(tmp_path: Path) -> None:
    for site, device in (("b", "z"), ("a", "y"), ("b", "x")):
        tiny.enrol(tmp_path, site, device)
    roster = read_roster(tmp_path)
    assert list(roster.sites.items()) == [("a", ("y",)), ("b", ("x", "z"))]
    assert roster.devices["x"].site == "b"


def test_the_key_id_is_the_keys(tmp_path: Path) -> None:
    private = tiny.enrol(tmp_path, "a", "pi")
    assert read_roster(tmp_path).devices["pi"].key_id == signature.key_id(private.public_key())


def test_hidden_files_and_strange_ones_are_no_devices(tmp_path: Path) -> None:
    tiny.enrol(tmp_path, "a", "pi")
    (tmp_path / "a" / "._pi.pub").write_bytes(b"\0")
    (tmp_path / "a" / "notes.txt").write_text("hello")
    assert list(read_roster(tmp_path).devices) == ["pi"]


@pytest.mark.parametrize("content", [b"", b"not a key", b"\xff\xfe"])
def test_a_file_that_is_no_key_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "pi.pub").write_bytes(content)
    with pytest.raises(ConfigError, match=r"pi\.pub"):
        read_roster(tmp_path)


def test_a_device_at_two_sites_is_refused(tmp_path: Path) -> None:
    tiny.enrol(tmp_path, "a", "pi")
    tiny.enrol(tmp_path, "b", "pi")
    with pytest.raises(ConfigError, match="two sites"):
        read_roster(tmp_path)


def test_an_empty_or_missing_roster_says_what_belongs_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no device"):
        read_roster(tmp_path)
    with pytest.raises(ConfigError, match="not a folder"):
        read_roster(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/b", "-x", ".hidden", "a" * 65, "ä", "a\0b", "a\n", "a b"])
def test_names_that_could_leave_a_folder_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        check_name(name, "device")


@pytest.mark.parametrize("name", ["pi-4", "jetson.nano_2", "A", "0", "a" * 64])
def test_plain_names_pass(name: str) -> None:
    assert check_name(name, "device") == name
