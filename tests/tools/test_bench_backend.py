"""The backend benchmark on a tiny model: it runs and its document is whole. How fast is no matter of a test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("timm")

from contract.errors import UsageError  # noqa: E402  (after the skips)
from tools import bench_backend  # noqa: E402

ROOT = Path(__file__).parents[2]
TINY = ("img_size=16", "patch_size=4", "embed_dim=24", "depth=3", "num_heads=3")


def bench(*options: str) -> str:
    arguments = [word for argument in TINY for word in ("--model-arg", argument)]
    model = ["--model", "vit_tiny_patch16_224", *arguments, "--split", "1"]
    sizes = ["--images", "5", "--classes", "3", "--steps", "2"]
    command = [sys.executable, "-m", "tools.bench_backend", *model, *sizes, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_both_sides_of_a_tiny_model_are_measured() -> None:
    document = json.loads(bench("--format", "json", "--precision", "highest"))
    assert (document["kind"], document["split"], document["tokens"]) == ("bench_backend", 1, [17, 24])
    assert (document["images"], document["classes"], document["steps"]) == (5, 3, 2)
    assert document["precision"] == "highest"
    for side in ("server", "plain"):
        low, high = document[side]["steps_per_s_range"]
        assert 0 < low <= document[side]["steps_per_s"] <= high
        assert (document[side]["peak_gpu_bytes"] is None) == ("peak_gpu_reason" in document[side])
    low, high = document["share_range"]
    assert 0 < low <= document["share"] <= high


def test_the_table_says_the_same_in_words() -> None:
    lines = bench("--precision", "high").splitlines()
    assert "17 tokens of 24" in lines[0] and "'high'" in lines[1]
    assert [line.split()[0] for line in lines[2:]] == ["server", "plain", "share"]


@pytest.mark.parametrize(
    ("options", "cause"),
    [(("--images", "1"), "--images 1"), (("--steps", "0"), "--steps 0"), (("--model", "vit_none"), "vit_none")],
)
def test_what_cannot_be_measured_is_refused(options: tuple[str, ...], cause: str) -> None:
    with pytest.raises(UsageError, match=cause):
        bench_backend.parse([*options])


def test_arguments_of_the_model_are_numbers_or_texts() -> None:
    assert bench_backend.model_arguments(["depth=3", "global_pool=avg"]) == {"depth": 3, "global_pool": "avg"}
    with pytest.raises(UsageError, match="KEY=VALUE"):
        bench_backend.model_arguments(["depth"])
