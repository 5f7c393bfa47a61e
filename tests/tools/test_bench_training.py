"""The benchmark of training steps on its smallest part: it measures what it says. How fast is no test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("timm")

from contract.errors import UsageError
from tools import bench_training

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_part_is_measured_beside_torch_in_both_precisions() -> None:
    words = ["--module", "vgg16_bn_10", "--turns", "1", "--steps", "1", "--format", "json"]
    command = [sys.executable, "-m", "tools.bench_training", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["schema_version"], document["kind"], document["threads"]) == (1, "bench-training", 1)
    assert document["device_imported_torch"] is False
    assert document["torch"] and document["onnxruntime"]
    (row,) = document["rows"]
    assert row["module"] == "vgg16_bn_10"
    assert row["ratio"] == pytest.approx(row["device_step_ms"] / row["torch_step_ms"])
    assert row["bf16_ratio"] == pytest.approx(row["device_step_ms"] / row["torch_bf16_step_ms"])
    assert row["rss_ratio"] == pytest.approx(row["device_peak_mb"] / row["torch_peak_mb"])


def figures(norm: float = 1.0, peak: int | None = 100) -> dict[str, list[dict[str, Any]]]:
    def turns(*step_s: float) -> list[dict[str, Any]]:
        return [{"step_s": each, "image_s": each / 8, "peak_bytes": peak, "norm": 1.0} for each in step_s]

    # The machine became ten times slower after the first turn; all sides alike.
    sides = {"device": turns(1.0, 10.0, 10.0), "torch": turns(2.0, 20.0, 20.0), "torch_bf16": turns(4.0, 40.0, 40.0)}
    sides["device"][0]["norm"] = norm
    return sides


def test_ratios_are_made_within_a_turn() -> None:
    row = bench_training.row_of("part", figures())
    assert (row["ratio"], row["bf16_ratio"], row["rss_ratio"]) == (0.5, 0.25, 1.0)
    assert row["device_step_ms"] == 10_000.0 and row["image_ms"] == 1250.0


def test_sides_that_compute_something_else_are_not_compared() -> None:
    with pytest.raises(RuntimeError, match="do not compute the same"):
        bench_training.row_of("part", figures(norm=1.1))


def test_memory_that_is_unknown_is_said_to_be() -> None:
    row = bench_training.row_of("part", figures(peak=None))
    assert row["rss_ratio"] is None and row["device_peak_mb"] is None and row["reason"]


@pytest.mark.parametrize("flag", ["--turns", "--steps"])
def test_counts_below_one_are_a_usage_error(flag: str) -> None:
    with pytest.raises(UsageError, match=f"{flag} 0 is too few"):
        bench_training.parse([flag, "0"])


def test_the_modules_are_those_that_can_be_built() -> None:
    from tools.bench_training_parts import CASES

    assert tuple(CASES) == bench_training.MODULES
