"""What is reported of samples of memory: quarters, slope and its error, also of a file that is cut off."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the measurement runs a server")

from contract.errors import UsageError
from tools import bench_memory, chaos
from tools.bench_memory import read, summarise


def sample(s: float, kb: int, pid: int = 7) -> dict[str, object]:
    return {"s": s, "epochs": int(s), "processes": [{"role": "server", "pid": pid, "rss_kb": kb, "pss_kb": None}]}


def rss(document: dict[str, object]) -> dict[str, float]:
    memory = document["memory"]
    assert isinstance(memory, list)
    return next(row for row in memory if row["kind"] == "rss_kb")


def test_a_leak_is_seen_with_its_error_and_a_warm_up_is_none() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(scale=50, size=721)
    leak = [sample(10.0 * n, int(60_000 + 360 * 10 * n / 3600 + noise[n])) for n in range(721)]
    row = rss(summarise(leak))
    assert row["slope_kb_per_h"] == pytest.approx(360, abs=3 * row["slope_error_kb_per_h"])
    assert 0 < row["slope_error_kb_per_h"] < 20
    warm = [sample(10.0 * n, 60_000 + min(n, 100)) for n in range(721)]
    row = rss(summarise(warm))
    assert (row["first"], row["second_quarter"], row["last_quarter"]) == (60_000, 60_100, 60_100)
    assert (row["most"], row["slope_kb_per_h"], row["slope_error_kb_per_h"]) == (60_100, 0.0, 0.0)


def test_what_is_not_told_is_unknown_and_restarts_are_counted() -> None:
    document = summarise([sample(0.0, 5), sample(10.0, 6, pid=8)])
    memory = document["memory"]
    assert [row["processes"] for row in memory] == [2, 2]
    assert next(row for row in memory if row["kind"] == "pss_kb")["first"] is None
    assert rss(document)["slope_kb_per_h"] is None


def test_a_line_that_was_not_written_to_its_end_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(json.dumps(sample(0.0, 5)) + "\n" + json.dumps(sample(10.0, 6))[:20])
    assert len(read(path)) == 1


@pytest.mark.parametrize("data", [b'{"s": 1}\n', b"[]\n", b"\xff\xfe\n", b"no\n"])
def test_a_file_of_something_else_is_a_usage_error(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_bytes(data)
    with pytest.raises(UsageError, match=r"samples.jsonl cannot be read: "):
        read(tmp_path / "samples.jsonl")


@pytest.mark.parametrize("minutes", ["nan", "0", "-1"])
def test_durations_that_are_none_are_usage_errors_before_anything_is_made(minutes: str) -> None:
    for parse in (bench_memory.parse, chaos.parse):
        with pytest.raises(UsageError, match="more than 0"):
            parse(["--minutes", minutes])


def test_runs_and_states_of_others_in_the_folder_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("runs", "state", "measured"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kept").touch()

    def stopped(package: Path, root: Path, front: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_memory, "Deployment", stopped)
    with pytest.raises(KeyboardInterrupt):
        bench_memory.measure(tmp_path / "samples.jsonl", tmp_path, 1.0, 1.0)
    assert (tmp_path / "runs" / "kept").exists() and (tmp_path / "state" / "kept").exists()
    assert list((tmp_path / "measured").iterdir()) == []  # its own
