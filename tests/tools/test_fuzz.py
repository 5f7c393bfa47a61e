"""The fuzzer counts, finds what gets through, and makes it again; the fleet's measurement joins and leaves."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from contract.errors import UsageError
from tools.fuzz import doors, parse, run_doors

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


@pytest.mark.parametrize("flag", ["--minutes", "--most"])
@pytest.mark.parametrize("value", ["0", "-1", "nan"])
def test_trying_nothing_is_a_usage_error(flag: str, value: str) -> None:
    with pytest.raises(UsageError, match=flag):
        parse([flag, value])


def test_trying_for_ever_and_a_number_that_no_input_has_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="has no end"):
        parse(["--minutes", "inf"])
    with pytest.raises(UsageError, match="--first -1"):
        parse(["--first", "-1"])


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
