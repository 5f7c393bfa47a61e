"""Campaigns of faults: what is drawn, how a message is altered, and that a verdict sees every kind of difference."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

pytest.importorskip("torch", reason="campaigns run a server")

from contract.codec import prepare
from contract.messages import Heartbeat
from tests.chaos.proxy import TO_DEVICE, TO_SERVER
from tests.make_package import DEVICES
from tools.chaos_faults import KINDS, MESSAGE_KINDS, draw_faults
from tools.chaos_messages import Altered
from tools.chaos_strikes import Strikes, spoil
from tools.chaos_verdict import differences

MESSAGE = prepare(Heartbeat(1, False, "", 0.0)).frame(seq=0, ack=0)


def test_a_campaign_follows_from_its_seed_and_has_every_kind() -> None:
    faults = draw_faults(200, 7)
    assert faults == draw_faults(200, 7) != draw_faults(200, 8)
    counts = Counter(fault.kind for fault in faults)
    total = sum(KINDS.values())
    assert counts.total() == 200
    assert all(abs(counts[kind] - 200 * weight / total) <= 1 for kind, weight in KINDS.items())
    assert 10 < sum(fault.hasty for fault in faults) < 60


def test_every_kind_can_be_done() -> None:
    for kind in set(KINDS) - set(MESSAGE_KINDS):
        assert callable(getattr(Strikes, "_" + kind.replace(" ", "_").replace("-", "_")))


@pytest.mark.parametrize("kind", MESSAGE_KINDS)
def test_one_message_is_altered_and_the_others_pass(kind: str) -> None:
    altered = Altered()
    altered.arm(kind, TO_SERVER, skip=1)
    other = MESSAGE + b" "  # no message: passed over
    sent = [altered(TO_SERVER, 1, number, each) for number, each in enumerate([MESSAGE, other, MESSAGE, MESSAGE], 1)]
    assert altered(TO_DEVICE, 1, 1, MESSAGE) == [MESSAGE] and altered.done == 1
    assert sent[0] == [MESSAGE] and sent[1] == [other]
    if kind == "reordered message":
        assert sent[2:] == [[], [MESSAGE, MESSAGE]]
    elif kind == "duplicated message":
        assert sent[2:] == [[MESSAGE, MESSAGE], [MESSAGE]]
    else:
        (spoiled,) = sent[2]
        assert spoiled != MESSAGE and len(spoiled) == len(MESSAGE) and sent[3] == [MESSAGE]


@pytest.mark.parametrize("draw", [0.0, 0.1, 0.37, 0.5, 0.81, 0.99])
def test_a_spoiled_file_is_another_one(draw: float, tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for path in files:
        path.write_bytes(bytes(100))
    spoil(files, draw)
    assert sum(path.read_bytes() != bytes(100) for path in files) == 1


def make_run(root: Path) -> Path:
    """What a run of two devices leaves, as far as a verdict looks."""
    run = root / "runs/chaos"
    folder = run / "tensors/site"
    for name in (folder, run / "models/site"):
        name.mkdir(parents=True)
    with closing(sqlite3.connect(run / "state.sqlite")) as ledger:
        ledger.execute("CREATE TABLE uploads (device, ask, batch, rows, total, file)")
        for device in DEVICES:
            (folder / device).mkdir()
            for batch in range(2):
                file = f"tensors/site/{device}/{batch}.safetensors"
                save_file({"codes": np.full((1, 4), batch, np.int8)}, run / file)
                ledger.execute("INSERT INTO uploads VALUES (?, 'a', ?, 1, 2, ?)", (device, batch, file))
        ledger.commit()
    save_file({"w": np.ones(3, np.float32)}, run / "models/site/backend.safetensors")
    lines = [{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": 0.25}, {"ended": True}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for device in DEVICES:
        (root / "state" / device / "parts").mkdir(parents=True)
        save_file({"part/w": np.ones(2, np.float32)}, root / "state" / device / "parts/part.chaos.3.safetensors")
    return run


def change_features(run: Path) -> None:
    save_file({"codes": np.full((1, 4), 9, np.int8)}, run / "tensors/site/device-a/1.safetensors")


def change_weights(run: Path) -> None:
    save_file({"w": np.array([1, 1, np.nextafter(1, 2, dtype=np.float32)])}, run / "models/site/backend.safetensors")


def store_twice(run: Path) -> None:
    with closing(sqlite3.connect(run / "state.sqlite")) as ledger:
        ledger.execute("INSERT INTO uploads SELECT * FROM uploads WHERE device = 'device-b' AND batch = 1")
        ledger.commit()


def lose_a_batch(run: Path) -> None:
    with closing(sqlite3.connect(run / "state.sqlite")) as ledger:
        ledger.execute("DELETE FROM uploads WHERE device = 'device-b' AND batch = 1")
        ledger.commit()


def count_an_epoch_twice(run: Path) -> None:
    path = run / "metrics.jsonl"
    path.write_text('{"epoch": 1, "loss": 0.5}\n' + path.read_text())


def change_a_part(run: Path) -> None:
    save_file({"part/w": np.zeros(2, np.float32)}, run.parents[1] / "state/device-a/parts/part.chaos.4.safetensors")


def crash(run: Path) -> None:
    (run.parents[1] / "server.log").write_text("Traceback (most recent call last):\n")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (change_features, "features: 1 tensors differ"),
        (change_weights, "trained weights: 1 tensors differ"),
        (store_twice, "device-b: a batch is stored twice"),
        (lose_a_batch, "device-b: 1 images are stored"),
        (count_an_epoch_twice, "1 epochs are on record twice"),
        (change_a_part, "device-a's part: 1 tensors differ"),
        (crash, "server.log holds a traceback"),
    ],
)
def test_a_verdict_sees_the_difference(harm: object, said: str, tmp_path: Path) -> None:
    make_run(tmp_path / "calm")
    shutil.copytree(tmp_path / "calm", tmp_path / "disturbed")
    assert differences(tmp_path / "calm", tmp_path / "disturbed") == []
    harm(tmp_path / "disturbed/runs/chaos")  # type: ignore[operator]
    assert any(said in each for each in differences(tmp_path / "calm", tmp_path / "disturbed"))
