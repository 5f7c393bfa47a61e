"""edge-profile joins a real run of training: a real server, TLS, and what the device saw of its time away."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.make_package import DEVICES
from tests.over_loopback.deployment import DEADLINE_S, Deployment

pytest.importorskip("torch", reason="the server needs torch")

COMMAND = "import sys; from edge_runtime.profiling.cli import main; sys.exit(main())"
QUICK = ("--block-s", "0.1", "--baseline-s", "0.1", "--warm-up-s", "0.2", "--cool-down-s", "0", "--batch", "4")


def test_a_run_of_training_tells_how_long_each_step_kept_the_device_away(package: Path, tmp_path: Path) -> None:
    roster = tmp_path / "roster" / "site"
    roster.mkdir(parents=True)
    shutil.copy(package / "keys" / "roster" / "site" / f"{DEVICES[0]}.pub", roster)
    deployment = Deployment(package, tmp_path, front="parts", roster=tmp_path / "roster")
    options = ("--label-mode", "raw-label", "--seed", "5", "--epochs", "3", "--batch", "4", "--cuts", "2")
    with deployment.server(*options, "--exit-when-done", strategy="sequential_split") as server:
        keys = package / "keys" / "devices" / DEVICES[0]
        words = [
            "--engine", package / "parts", "--train", "--server", f"wss://localhost:{deployment.port}",
            "--data", package / DEVICES[0] / "train", "--trust", keys / "publisher.pub", "--ca", keys / "ca.pem",
            "--key", keys / "device.key", "--name", DEVICES[0], "--state", tmp_path / "state", "--threads", "1",
            "--site-secret", keys / "site.secret", "--classes", package / "classes.txt", "--label-mode", "raw-label",
            "--power-model", "3:7", "--format", "json", *QUICK,
        ]  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, *map(str, words)], capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert done.returncode == 0, done.stderr
        assert server.wait(timeout=DEADLINE_S) == 0, (tmp_path / "server.log").read_text()
    rows = {row["point"]["split"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows.keys() == {1, 2} and rows[1]["away"] is None
    away = rows[2]["away"]
    assert away["images"] == 36 and away["seconds"] > 0.0  # three epochs of twelve images
    parts = {part["name"]: part["seconds"] for part in away["parts"]}
    assert list(parts) == ["upload", "wait", "download"] and min(parts.values()) > 0.0
    assert 0.95 * away["seconds"] <= sum(parts.values()) <= 1.0001 * away["seconds"]
    assert [phase["name"] for phase in rows[2]["phases"]] == ["forward", "backward", "optimiser"]
    assert "modelled, not measured" in away["reason"]
    joules = [part["energy_j"] for part in away["parts"]]
    if rows[2]["energy"] is None or None in joules:  # a machine too busy for its own model of power to be told in time
        assert rows[2]["communication_j"] is None
    else:
        assert sum(joules) == pytest.approx(away["energy_j"], rel=0.2)
        assert rows[2]["communication_reason"].startswith(f"of run {away['run']}")
