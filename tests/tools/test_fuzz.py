"""The fuzzer counts, finds what gets through, and makes it again; the fleet's measurement joins and leaves."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tools.fuzz import doors, run_doors

ROOT = Path(__file__).parents[2]


def test_every_door_is_tried_as_often(tmp_path: Path) -> None:
    known = doors(tmp_path)
    found = run_doors(known, seed=1, first=0, seconds=60, most=3)
    assert found["by_door"] == dict.fromkeys(known, 3) and found["inputs"] == 3 * len(known) >= 21
    assert found["faults"] == []


def test_what_gets_through_is_named_and_comes_again() -> None:
    def door(rng: random.Random) -> None:
        if rng.random() < 0.2:
            raise KeyError("unlucky")

    first = run_doors({"d": door}, seed=1, first=0, seconds=60, most=40)["faults"]
    assert isinstance(first, list) and first
    again = run_doors({"d": door}, seed=1, first=first[0]["number"], seconds=60, most=1)["faults"]
    assert again == first[:1]


@pytest.mark.slow
def test_a_small_fleet_is_measured() -> None:
    pytest.importorskip("torch", reason="server_runtime needs it")
    words = [sys.executable, "-m", "tools.bench_fleet", "--devices", "5", "--hold-s", "11", "--format", "json"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["devices"], found["lost"], found["not_let_in"]) == (5, 0, 0)
    assert found["heartbeats"] >= 5 and found["answers"] >= 5
    assert 0 < found["connect_p50_s"] <= found["connect_p99_s"]
