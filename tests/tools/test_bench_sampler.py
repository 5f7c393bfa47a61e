"""What the sampler costs: that the figures are of what they say, on blocks too short to judge by."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.bench_sampler import Sampler, spread, to_table, write_board

ROOT = Path(__file__).parents[2]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.bench_sampler", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_document_has_both_rates() -> None:
    done = run("--turns", "2", "--seconds", "0.2", "--format", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["kind"] == "bench-sampler" and list(document["rows"]) == ["default", "fine"]
    slow, fine = document["rows"]["default"], document["rows"]["fine"]
    assert slow["interval_s"] == 0.1 and fine["interval_s"] == 0.01
    assert 1 <= slow["samples"] < fine["samples"]
    for row in (slow, fine):
        assert row["cpu_share"] > 0.0 and row["inference_s"] > 0.0 and row["within_aim"] == (row["cpu_share"] < 0.01)
        assert set(row["inference_change"]) == {"wall", "cpu", "control_wall", "control_cpu"}
        for change in row["inference_change"].values():
            assert change["lower"] <= change["median"] <= change["upper"]
    assert "slower by" in to_table(document["rows"], 0.2)


def test_the_sampler_samples_while_the_block_runs_and_then_stops(tmp_path: Path) -> None:
    write_board(tmp_path)
    sampler = Sampler(0.001, tmp_path)
    with sampler.running():
        deadline_s = time.monotonic() + 30.0
        while sampler.samples < 5 and time.monotonic() < deadline_s:
            sum(range(10_000))
    seen = sampler.samples
    assert seen >= 5 and 0.0 < sampler.cpu_s <= sampler.wall_s
    assert sampler.samples == seen  # its thread was joined


def test_the_middle_half_of_one_turn_is_itself() -> None:
    assert spread([0.25]) == {"median": 0.25, "lower": 0.25, "upper": 0.25}
    assert spread([0.0, 1.0, 2.0, 3.0, 4.0]) == {"median": 2.0, "lower": 1.0, "upper": 3.0}


@pytest.mark.parametrize("words", [("--turns", "0"), ("--seconds", "0")])
def test_nothing_to_measure_is_refused(words: tuple[str, str]) -> None:
    done = run(*words)
    assert done.returncode == 2 and "Traceback" not in done.stderr
