"""The benchmark of frontends on its smallest model: it measures what it says. How fast is no test's business."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("timm")

from contract.errors import UsageError
from tools import bench_engine

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_side_is_measured_on_dense_and_masked_images() -> None:
    command = [sys.executable, "-m", "tools.bench_engine", "--quick", "--format", "json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["schema_version"], document["kind"], document["weights"]) == (1, "bench-engine", "random")
    has_openvino = importlib.util.find_spec("openvino") is not None
    assert set(document["absent"]) == (set() if has_openvino else {"openvino_int8", "openvino_float"})
    (model,) = document["models"]
    assert model["kept_tokens"] == 5 and model["tokens"] == 17 and 0 < model["kept_macs"] < model["macs"]
    rows = {(row["side"], row["shape"], row["batch"]): row for row in model["rows"]}
    assert len(rows) == 4 * (len(bench_engine.SIDES) - len(document["absent"]))
    for (side, shape, batch), row in rows.items():
        theirs = rows[bench_engine.BASELINE, shape, batch]
        assert row["ratio"] == pytest.approx(theirs["image_ms"] / row["image_ms"])
        assert row["peak_mb"] is None or row["peak_mb"] > 20
        if side.endswith("int8"):
            assert row["int8_layers"] == model["linear_layers"] + (shape == "masked")
            assert row["snr_db"] > 10  # the tiny model's worst is OpenVINO without VNNI, whose kernels saturate
    for row in model["streams"]:
        assert row["images_per_s"] > 0
    for row in model["device"]:
        assert row["reckoned_s_for_500"] == pytest.approx(row["ready_s"] + 500 * row["image_s"])
    assert "onnxruntime_int8" in bench_engine.to_text(document)


def figures(*batch_ms: float, peak: int | None = 10**8) -> list[dict[str, Any]]:
    return [
        {"batches": {"1": {"image_s": each / 1e3, "wall_s": each / 1e3}}, "int8_layers": 4, "load_s": 1.0,
         "peak_bytes": peak}
        for each in batch_ms
    ]  # fmt: skip


FACTS = {"macs": 2_000_000_000, "kept_macs": 500_000_000}


def test_ratios_are_made_within_a_turn(tmp_path: Path) -> None:
    turns = {
        ("onnxruntime_float", "dense"): figures(100.0, 300.0, 100.0),
        ("onnxruntime_int8", "dense"): figures(50.0, 100.0, 40.0),
    }
    row = bench_engine.row_of("onnxruntime_int8", "dense", 1, turns, FACTS, {"onnxruntime_int8_dense": 80.0}, tmp_path)
    assert row["ratio"] == pytest.approx(2.5)  # of 2, 3 and 2.5
    assert row["image_ms"] == pytest.approx(50) and row["gmacs"] == pytest.approx(40)
    assert row["share_of_peak"] == pytest.approx(0.5) and row["peak_mb"] == 100


def test_what_was_not_measured_is_none_and_never_zero(tmp_path: Path) -> None:
    turns = {("torch_float32", "masked"): figures(50.0, peak=None)}
    row = bench_engine.row_of("torch_float32", "masked", 1, turns, FACTS, {}, tmp_path)
    assert [row[name] for name in ("ratio", "share_of_peak", "peak_mb", "snr_db")] == [None] * 4
    assert row["gmacs"] == pytest.approx(10)


def test_snr_is_against_float32_on_the_same_weights(tmp_path: Path) -> None:
    exact = np.ones((2, 4, 4))
    np.save(tmp_path / "tokens-onnxruntime-float_masked.npy", exact)
    np.save(tmp_path / "tokens-openvino-int8_masked.npy", exact + 0.1)
    np.save(tmp_path / "tokens-torch_float32-masked.npy", exact)
    assert bench_engine.snr_of(tmp_path, "openvino_int8", "masked") == pytest.approx(20)
    assert bench_engine.snr_of(tmp_path, "torch_float32", "masked") is None  # equal
    assert bench_engine.snr_of(tmp_path, "openvino_int8", "dense") is None  # no float32 side


@pytest.mark.parametrize("words", [["--turns", "0"], ["--pictures", "0"]])
def test_too_few_is_refused(words: list[str]) -> None:
    with pytest.raises(UsageError, match="too few"):
        bench_engine.parse(words)
