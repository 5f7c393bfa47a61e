"""The client cost benchmark on a tiny model: every method runs without torch, what is modelled is reckoned right and
says so, and the verdict follows the figures. How fast is no matter of a test."""

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
from tools import bench_client_cost

ROOT = Path(__file__).parents[2]
TINY = ("img_size=16", "patch_size=8", "embed_dim=24", "depth=6", "num_heads=3")


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    arguments = [word for each in TINY for word in ("--model-arg", each)]
    sizes = ["--model", "vit_tiny_patch16_224", *arguments, "--images", "10", "--batch", "4", "--steps", "1"]
    command = [sys.executable, "-m", "tools.bench_client_cost", *sizes, *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    done = bench("--methods", "sa,split_learning,offsite_tuning", "--format", "json")
    assert done.returncode == 0, done.stderr
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


@pytest.mark.slow
def test_every_client_is_measured_in_a_process_without_torch(document: dict[str, Any]) -> None:
    assert (document["kind"], document["images"], document["classes"]) == ("bench-client-cost", 10, 2)
    assert [row["method"] for row in document["rows"]] == ["sa", "split_learning", "offsite_tuning"]
    for row in document["rows"]:
        assert row["torch_imported"] is False
        assert row["seconds"] > 0 and (row["peak_mb"] is None or row["peak_mb"] > 20)
        assert (row["energy_j"] is None) <= (row["energy_reason"] is not None)
    assert document["verdict"]


@pytest.mark.slow
def test_split_adaptation_is_measured_in_whole_and_training_is_modelled(document: dict[str, Any]) -> None:
    ours, split, offsite = document["rows"]
    assert (ours["how"], ours["measured_images"]) == ("measured", 10)
    assert ours["seconds"] == pytest.approx(sum(ours["measured_s"].values()))
    # Of each image: its id, the codes of 5 tokens of 24 values, 4 sources and a label.
    assert ours["sent_bytes"] == 10 * (16 + 5 * 24 + 4 * 2 + 2)
    for row, epochs in ((split, 100), (offsite, 50)):
        spent = row["measured_s"]
        assert (row["how"], row["measured_images"], row["epochs"]) == ("modelled", 4, epochs)
        assert row["seconds"] == pytest.approx(spent["setup"] + spent["work"] / 4 * 10 * epochs)


@pytest.mark.slow
def test_a_client_trains_what_its_method_says(document: dict[str, Any]) -> None:
    block = 12 * 24 * 24 + 13 * 24
    embeddings = 24 + 5 * 24 + (3 * 8 * 8 * 24 + 24)
    trained = {row["method"]: row["trained_values"] for row in document["rows"]}
    assert trained["split_learning"] == embeddings + 4 * block  # the head is beside the graph
    assert trained["offsite_tuning"] == 4 * block + 2 * 24 + 2


@pytest.mark.slow
def test_the_table_says_the_same_in_words() -> None:
    done = bench("--methods", "lp,fine_tuning,ln_tuning")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "random weights" in lines[0] and lines[1].split()[:3] == ["method", "peak", "MB"]
    assert [line.split()[0] for line in lines[2:5]] == ["lp", "fine_tuning", "ln_tuning"]
    assert all("modelled" in line for line in lines[2:5]) and lines[-1].startswith("verdict: no verdict")


def figures(**changes: Any) -> dict[str, Any]:
    """Of 8 images."""
    return {
        "images": 8, "seconds": {"setup": 1.0, "warm-up": 9.0, "work": 4.0},
        "energy_j": {"setup": 2.0, "warm-up": 9.0, "work": 40.0}, "energy_reason": None, "peak_bytes": 300e6,
        "torch_imported": False, **changes,
    }  # fmt: skip


def test_seconds_and_joules_are_carried_over_to_all_images_and_epochs() -> None:
    row = bench_client_cost.row_of("offsite_tuning", figures(), images=100)
    assert (row["seconds"], row["energy_j"]) == (1 + 0.5 * 100 * 50, 2 + 5 * 100 * 50)
    assert row["peak_mb"] == 300
    assert bench_client_cost.row_of("ln_tuning", figures(), images=100)["seconds"] == 1 + 0.5 * 100 * 100


def test_a_probe_sees_every_image_once_whatever_its_epochs() -> None:
    spent = {"setup": 1.0, "forward": 4.0, "head": 3.0}
    known = figures(seconds=spent, energy_j=spent)
    assert bench_client_cost.row_of("lp", known, images=100)["seconds"] == 1 + 50 + 3
    row = bench_client_cost.row_of("lp", known, images=8)
    assert (row["seconds"], row["how"]) == (8, "measured")


def test_what_is_unknown_stays_unknown() -> None:
    unknown = figures(energy_j={"setup": None, "work": None}, energy_reason="no meter", peak_bytes=None)
    row = bench_client_cost.row_of("ln_tuning", unknown, images=8)
    assert (row["energy_j"], row["energy_reason"], row["peak_mb"]) == (None, "no meter", None)
    assert "unknown" in bench_client_cost.line_of(row)
    both = [{"method": "sa", "peak_mb": 1.0, "seconds": 1.0}, row]
    assert bench_client_cost.verdict(both).startswith("memory is unknown on this system; sa has the least time")


def test_the_verdict_is_read_off_the_figures() -> None:
    rows = [
        {"method": "sa", "peak_mb": 300.0, "seconds": 10.0},
        {"method": "lp", "peak_mb": 200.0, "seconds": 40.0},
        {"method": "fine_tuning", "peak_mb": 900.0, "seconds": 20.0},
    ]
    assert bench_client_cost.verdict(rows) == (
        "sa has NOT the least memory: 300 MB against 200 MB of lp; "
        "sa has the least time: 10.0 s against 20.0 s of fine_tuning, the next (2.0 times)"
    )
    assert bench_client_cost.verdict(rows[1:]).startswith("no verdict")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--images", "9"], "--images 9"),
        (["--batch", "1"], "--batch 1"),
        (["--steps", "0"], "--steps 0"),
        (["--threads", "0"], "--threads 0"),
        (["--methods", "sa,lora"], "'lora'"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        bench_client_cost.parse(words)


def test_a_model_that_does_not_fit_is_one_line(tmp_path: Path) -> None:
    done = bench("--methods", "offsite_tuning", "--model-arg", "depth=5")
    assert done.returncode != 0 and "6 blocks or more, found 5" in done.stderr and "Traceback" not in done.stderr
