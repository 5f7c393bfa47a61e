"""The comparison of one NaN device: what it tells of ours, and why the others are missing where they are not given."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the server needs torch")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_ours_leaves_the_device_out_in_every_round_and_ends_well() -> None:
    command = [sys.executable, "-m", "tools.compare_nan", "--format", "json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["kind"] == "compare-nan"
    ours = document["ours"]
    assert (ours["not_finite_at_the_end"], ours["finite_loss_in_rounds"]) == (0.0, 3)
    assert [line.split(":")[0] for line in ours["quarantined"]] == ["device-4"] * 3
    assert all("--" in document[name]["left_out"] for name in ("flower", "nvflare"))


def test_an_interpreter_without_the_peer_is_refused_before_anything_runs() -> None:
    command = [sys.executable, "-m", "tools.compare_nan", "--flower", sys.executable]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "is no Python with flwr" in done.stderr
