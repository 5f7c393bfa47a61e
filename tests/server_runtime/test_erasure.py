"""Forgetting: nothing of the subject is left on the disk, the others keep everything, and the receipt is signed."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from contract import signature
from contract.console import run_command
from contract.errors import ConfigError
from server_runtime.erasure import Subject, forget
from server_runtime.runs import lock_run
from server_runtime.store import Store
from tests.server_runtime import tiny


def make_run(root: Path) -> Path:
    """A run of two sites: pi and jetson at the clinic, nano at the farm."""
    store = Store(root)
    for site, device in (("clinic", "pi"), ("clinic", "jetson"), ("farm", "nano")):
        store.fix_classes(site, 3, "ab" * 32)
        store.open_session(device, f"session-{device}", "adapt")
        for seq, batch in enumerate(tiny.batches(tiny.upload(device, 10), "run.features", 4), 1):
            store.keep(site, device, f"session-{device}", seq, batch)
    store.close()
    for site in ("clinic", "farm"):
        for name in (f"checkpoints/{site}.safetensors", f"checkpoints/{site}.previous.safetensors", f"journal/{site}",
                     f"models/{site}/head.safetensors"):  # fmt: skip
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(b"x" * 10)
    (root / "metrics.jsonl").write_text('{"site": "clinic", "epoch": 1}\n{"site": "farm", "epoch": 1}\n')
    (root / "run.toml").write_text("")
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / "r1")


def names(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_a_device_is_forgotten_and_the_others_are_not(root: Path) -> None:
    erased = forget(root, Subject("pi", None), with_models=False)
    assert erased.rows == 4  # three batches and a session
    assert "tensors/clinic/pi" in erased.removed
    assert set(erased.kept) == {"models/clinic/head.safetensors"}
    left = names(root)
    assert not [name for name in left if "/pi" in name]
    assert not [name for name in left if name.startswith(("checkpoints/clinic", "journal/clinic"))]
    assert {"checkpoints/farm.safetensors", "journal/farm", "models/clinic/head.safetensors"} <= left
    assert b"session-pi" not in (root / "state.sqlite").read_bytes()  # overwritten, not only unlinked
    store = Store(root)
    assert {record.device for record in store.records("clinic", "train")} == {"jetson"}
    assert store.complete("jetson", "run.features") and store.received_seq("pi", "session-pi") is None
    store.close()
    assert forget(root, Subject("pi", None), with_models=False).files == 0  # again is no fault
    (root / "status.json").write_text(json.dumps({"devices": [{"device": "agent", "site": "farm"}]}))
    store = Store(root)
    store.open_session("agent", "s", "adapt")  # it trains: its answers are in checkpoints and journals
    store.close()
    assert "journal/farm" in forget(root, Subject("agent", None), with_models=False).removed


def test_a_site_is_forgotten_with_its_class_list_and_its_lines(root: Path) -> None:
    forget(root, Subject(None, "clinic"), with_models=True)
    assert not [name for name in names(root) if "clinic" in name]
    assert (root / "metrics.jsonl").read_text() == '{"site": "farm", "epoch": 1}\n'
    store = Store(root)
    assert store.classes("clinic") is None and store.classes("farm") is not None
    store.close()


def test_a_run_at_work_is_not_touched(root: Path) -> None:
    before, lock = names(root), lock_run(root)
    with pytest.raises(ConfigError, match="in use"):
        forget(root, Subject("pi", None), with_models=False)
    assert names(root) - {"lock"} == before - {"lock"} and lock


FORGET = ["forget", "--device", "pi", "--signing-key", "operator.key", "-o", "receipt.json"]


def operators_key(folder: Path) -> dict[str, signature.PublicKey]:
    """A new operator.key there, as those who trust it know it."""
    key = signature.generate()
    signature.save_private(folder / "operator.key", key)
    return {signature.key_id(key.public_key()): key.public_key()}


def test_the_receipt_is_signed_and_never_replaced(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    trusted = operators_key(tmp_path)
    from server_runtime.cli import _main

    assert run_command(lambda: _main(FORGET)) == 0
    assert "trained models remain" in capsys.readouterr().err
    data, signed = (tmp_path / "receipt.json").read_bytes(), (tmp_path / "receipt.json.sig").read_bytes()
    assert signature.verify(data, signed, trusted)
    told = json.loads(data)
    assert (told["kind"], told["subject"]["device"], told["runs"][0]["rows"]) == ("erasure", "pi", 4)
    assert run_command(lambda: _main(FORGET)) == 2


def test_a_receipt_that_cannot_be_written_stands_on_stdout(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    trusted = operators_key(tmp_path)
    from server_runtime.cli import _main
    from server_runtime.commands import forget

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(forget, "write_atomic", full)
    assert run_command(lambda: _main(FORGET)) == 2
    found = capsys.readouterr()
    assert "are gone, but receipt.json or its signature cannot be written: No space left on device" in found.err
    data, _, signed = found.out.partition("signature (hex): ")
    assert signature.verify(data.encode(), bytes.fromhex(signed), trusted)
    assert json.loads(data)["subject"]["device"] == "pi"


@pytest.mark.parametrize("who", [("--device", "pi-22"), ("--site", "clinci"), ("--device", "a/b")])
def test_a_mistyped_name_deletes_nothing_and_gets_no_receipt(root: Path, tmp_path: Path, who: tuple[str, str]) -> None:
    (root / "status.json").write_text('{"devices": []}')
    signature.save_private(tmp_path / "key.pem", signature.generate())
    before, receipt = names(root), tmp_path / "receipt.json"
    words = ["forget", *who, "--runs", str(root.parent), "--signing-key", str(tmp_path / "key.pem"), "-o", str(receipt)]
    from server_runtime.cli import main

    assert main(words) == 2
    assert names(root) - {"lock"} == before and not receipt.exists()
