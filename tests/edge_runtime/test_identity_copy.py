"""A device's identity as one file and back, and what may be shown of it to a stranger."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from contract import signature
from contract.console import run_command
from contract.errors import ConfigError, DeviceError
from edge_runtime import cli
from edge_runtime.identity_copy import put_back, read_copy, write_copy
from edge_runtime.redaction import HIDDEN, redact, redact_all
from edge_runtime.standing import Recorder
from edge_runtime.state import State, open_secret, open_state


@pytest.fixture
def state(tmp_path: Path) -> State:
    made = open_state(tmp_path / "state")
    open_secret(made.device_secret, "device secret")
    made.ledger.write_bytes(b"a line\n")
    signature.save_private(tmp_path / "device.key", signature.generate())
    return made


def test_the_copy_brings_back_secret_key_and_ledger(state: State, tmp_path: Path) -> None:
    assert write_copy(state, tmp_path / "device.key", "pi", tmp_path / "copy") == 3
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o600
    other = open_state(tmp_path / "other")
    put_back(read_copy(tmp_path / "copy"), other, tmp_path / "other.key")
    assert other.device_secret.read_bytes() == state.device_secret.read_bytes()
    assert other.ledger.read_bytes() == b"a line\n"
    assert (tmp_path / "other.key").read_bytes() == (tmp_path / "device.key").read_bytes()
    with pytest.raises(DeviceError, match="has an identity"):
        put_back(read_copy(tmp_path / "copy"), other, tmp_path / "third.key")
    assert not (tmp_path / "third.key").exists()


@pytest.mark.parametrize("change", [lambda data: data[:-30], lambda data: data.replace(b"release_ledger", b"../../x"),
                                    lambda data: b"{}"])  # fmt: skip
def test_a_damaged_copy_is_refused(change: object, state: State, tmp_path: Path) -> None:
    write_copy(state, tmp_path / "device.key", "pi", tmp_path / "copy")
    (tmp_path / "copy").write_bytes(change((tmp_path / "copy").read_bytes()))  # type: ignore[operator]
    with pytest.raises(ConfigError, match="cannot be used"):
        read_copy(tmp_path / "copy")


def test_the_commands_warn_of_a_second_copy(state: State, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state.close()
    words = ["--state", str(state.root), "--key", str(tmp_path / "device.key")]
    copy = str(tmp_path / "copy")
    assert run_command(lambda: cli.edge_run_or_command(["backup", *words, "--name", "pi", "-o", copy])) == 0
    assert "a new secret draws other noise" in capsys.readouterr().err
    assert run_command(lambda: cli.edge_run_or_command(["backup", *words, "--name", "pi", "-o", copy])) == 2
    words = ["--state", str(tmp_path / "new"), "--key", str(tmp_path / "new.key")]
    assert run_command(lambda: cli.edge_run_or_command(["restore", *words, copy])) == 0
    assert "stop the machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    ["skipped cats/tom 1.png: broken", "wss://h.example:8443 is away", "key 'pi-3' is", "at 10.1.2.3:8443 now",
     "/home/me/x is full", 'class "owl" again', "server.clinic.local is away", "photo.JPG was moved",
     "{!r}: a new class".format("it's an \"x\" owl of tom")],
)  # fmt: skip
def test_names_are_hidden(text: str) -> None:
    found = redact(text, ["pi-3"])
    assert HIDDEN in found
    for word in ("tom", "h.example", "pi-3", "10.1.2.3", "/home", "owl", "clinic", "photo"):
        assert word not in found


def test_what_is_no_name_stays() -> None:
    text = "trying again in 4 s; 12 of 20 images, kappa 0.25"
    assert redact(text, []) == text
    assert redact_all({"a": ["pi", 1, None], "b": ("x",)}, ["pi"]) == {"a": [HIDDEN, 1, None], "b": ["x"]}


def test_a_report_names_nobody(state: State, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = {"device": "pi-of-ward-7", "server": "wss://clinic.example:1", "boot": "", "taken_s": 1.0,
            "link": {"since_s": 0.0, "cause": "clinic.example refused"}, "run": "r1",
            "recent": [[1.0, "skipped patients/ann.png: broken"]]}  # fmt: skip
    (state.root / "status.json").write_text(json.dumps(told))
    assert run_command(lambda: cli.edge_run_or_command(["report", "--state", str(state.root)])) == 0
    text = capsys.readouterr().out
    for word in ("ward", "clinic", "ann", "patients", str(tmp_path)):
        assert word not in text
    assert json.loads(text)["versions"]["numpy"]


def test_the_recorder_keeps_the_last_lines() -> None:
    said: list[str] = []
    recorder = Recorder(said.append, lambda: 1.0, lines=2)
    for text in "abc":
        recorder(text)
    assert said == ["a", "b", "c"] and recorder.recent == ((1.0, "b"), (1.0, "c"))
