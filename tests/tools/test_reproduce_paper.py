"""tools/reproduce sa --paper: the plan, what it finds missing, and what a run would be made of."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

torch = pytest.importorskip("torch")
timm = pytest.importorskip("timm")
from safetensors.torch import save_file  # noqa: E402  (after the skips)

from contract.errors import DataError, UsageError  # noqa: E402
from exporter import plan as exporter_plan  # noqa: E402
from tools import reproduce, reproduce_paper  # noqa: E402
from tools.reproduce_paper import DATASETS, MODELS, PaperModel  # noqa: E402
from tools.reproduce_world import World  # noqa: E402

TINY = "vit_tiny_patch16_224"


def write_classes(root: Path, classes: int, images: int) -> None:
    for label in range(classes):
        (root / f"class{label:02}").mkdir(parents=True)
        for number in range(images):
            pixels = np.full((4, 4, 3), 40 * number + label, np.uint8)
            Image.fromarray(pixels).save(root / f"class{label:02}" / f"{number}.png")


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything that a small stand-in of the paper's setting needs."""
    monkeypatch.setattr(reproduce_paper, "MODELS", {TINY: PaperModel(8, 12, 197, 192)})
    monkeypatch.setattr(reproduce_paper, "DATASETS", {"cifar100": 3})
    monkeypatch.setattr(exporter_plan, "TUNES", ("noise-aware", "paper", "none"))
    write_classes(tmp_path / "data" / "cifar100" / "train", 3, 6)
    write_classes(tmp_path / "data" / "cifar100" / "test", 3, 2)
    write_classes(tmp_path / "public", 2, 1)
    (tmp_path / "weights").mkdir()
    save_file(timm.create_model(TINY, num_classes=11).state_dict(), tmp_path / "weights" / f"{TINY}.safetensors")
    words = [f"--{name}={tmp_path / name}" for name in ("weights", "data", "public")]
    return [*words, "--models=" + TINY, "--datasets=cifar100", "--shots=3,5", "-o", str(tmp_path / "out")]


def test_the_plan_is_the_papers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [f"--{name}={tmp_path}" for name in ("weights", "data", "public")]
    with pytest.raises(DataError, match=r"lacks \d+ things"):
        reproduce_paper.main([*words, "--dry-run", "--format", "json"])
    document = json.loads(capsys.readouterr().out)
    plan = document["plan"]
    assert {(line["model"], line["data set"]) for line in plan} == {(m, d) for m in MODELS for d in DATASETS}
    first = next(line for line in plan if line["data set"] == "cifar100")
    assert first["blocks on the device"] == "16 of 24" and first["classes"] == 100
    assert first["images at 3,5,10 shots"] == "300, 500, 1000"
    # algorithms.md 1.1: 201,728 bytes an image, and two bytes for each patch's source
    assert first["MB sent"] == ", ".join(f"{images * (201_728 + 2 * 196) / 1e6:.1f}" for images in (300, 500, 1000))
    assert (first["rows"], first["baselines"]) == (9, 36)
    swin = next(line for line in plan if line["model"].startswith("swin"))
    assert swin["baselines"] == 27  # offsite tuning has no row of blocks there
    settings = document["settings"]
    assert (settings["seeds"], settings["alpha"], settings["epochs"]) == ([1, 42, 215], 0.01, 100)
    assert (settings["augmentation_runs"], settings["replaced_patches"], settings["learning_rate"]) == (64, 50, 1e-5)
    assert any("cifar100" in text for text in document["missing"]) and document["departures"]


def test_the_models_are_as_large_as_the_plan_says() -> None:
    with torch.device("meta"):
        for name, planned in MODELS.items():
            model = timm.create_model(name)
            blocks = model.blocks if planned.blocks else [block for stage in model.layers for block in stage.blocks]
            assert len(blocks) == planned.depth
            width = model.num_features if planned.blocks else model.layers[-2].blocks[-1].norm1.normalized_shape[0]
            assert width == planned.dim


def test_a_dry_run_with_everything_there_says_so_and_computes_nothing(
    folders: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert reproduce_paper.main([*folders, "--dry-run"]) == 0
    assert "missing:\nnothing" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda root: (root / "weights" / f"{TINY}.safetensors").unlink(), "No such file"),
        (lambda root: (root / "weights" / f"{TINY}.safetensors").write_bytes(b"torn"), "safetensors"),
        (
            lambda root: save_file({"head.weight": torch.zeros(11, 192)}, root / "weights" / f"{TINY}.safetensors"),
            "is missing",
        ),
        (
            lambda root: save_file(
                {**timm.create_model(TINY).state_dict(), "cls_token": torch.zeros(1, 1, 7)},
                root / "weights" / f"{TINY}.safetensors",
            ),
            r"cls_token should be \(1, 1, 192\), found \(1, 1, 7\)",
        ),
        (
            lambda root: write_classes(root / "data" / "cifar100" / "test" / "class09", 1, 1),
            "expected 3 classes, found 4",
        ),
        (lambda root: (root / "data" / "cifar100" / "train" / "class00" / "0.png").unlink(), None),
        (
            lambda root: [(root / "data/cifar100/train/class00" / f"{n}.png").unlink() for n in range(4)],
            "expected 5 images in each class, found 2",
        ),
        (
            lambda root: [each.unlink() for each in (root / "data/cifar100/test/class02").iterdir()],
            "expected 1 images in each class, found 0|expected 3 classes, found 2",
        ),
        (
            lambda root: [each.rename(root / "public" / each.name) for each in (root / "public/class00").iterdir()],
            "public",
        ),
    ],
)
def test_what_is_missing_is_named(folders: list[str], tmp_path: Path, spoil: Any, said: str | None) -> None:
    spoil(tmp_path)
    if said is None:
        assert reproduce_paper.main([*folders, "--dry-run"]) == 0
        return
    with pytest.raises(DataError, match=said):
        reproduce_paper.main(folders)


def test_an_exporter_without_the_published_tuning_is_named(folders: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter_plan, "TUNES", ("noise-aware", "none"))
    with pytest.raises(DataError, match="export-frontend knows no --tune paper"):
        reproduce_paper.main([*folders, "--dry-run"])


def test_a_run_adapts_as_published_on_sites_of_the_folders(
    folders: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Namespace, Path, World, reproduce.Effort]] = []
    monkeypatch.setattr(
        reproduce, "reproduce",
        lambda options, root, scratch, make, effort: seen.append((options, root, make(), effort)),
    )  # fmt: skip
    assert reproduce_paper.main([*folders, "--test-images", "2"]) == 0
    ((options, root, world, effort),) = seen
    assert root == tmp_path / "out" / TINY and options.cases is not None
    assert world.model_args == {"num_classes": 11} and world.split == 8
    assert world.words == ("--tune", "paper", "--alpha", "0.01")
    wanted = effort.adaptation
    assert (wanted.alpha, wanted.epochs, wanted.runs, wanted.backend_lr) == (0.01, 100, 64, 1e-5)
    assert round(wanted.replaced * 196) == 50
    site = world.site("cifar100", 3, 1)
    assert site.classes == ("class00", "class01", "class02")
    (train,), (test,) = site.train.values(), site.test.values()
    assert sorted(path.parent.name for path in train.rglob("*.png")) == sorted(3 * list(site.classes))
    assert len(list(test.rglob("*.png"))) == 2
    assert world.site("cifar100", 3, 1) == site and world.site("cifar100", 3, 42) != site


@pytest.mark.parametrize("words", [["--shots=0"], ["--models=resnet18"], ["--kappas=2"], ["--cases=lora"]])
def test_what_cannot_be_run_is_refused(folders: list[str], words: list[str]) -> None:
    with pytest.raises(UsageError, match=words[0].split("=")[0]):
        reproduce_paper.parse([*folders, *words])
