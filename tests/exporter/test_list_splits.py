"""`--list-splits`: against the cuts themselves, and without ever allocating a weight."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import exporter.list_splits
from exporter.architecture import create
from exporter.checkpoint import create_named
from exporter.cli import main
from exporter.list_splits import list_splits
from exporter.macs import count_macs
from exporter.models import family_of
from exporter.split import split_tokens
from tests.exporter.test_models_swin import SMALL

MODELS = {
    "vit": ("vit_tiny_patch16_224", {"img_size": (32, 48), "patch_size": 8, "depth": 4, "reg_tokens": 4}, 3),
    "distilled": ("deit_tiny_distilled_patch16_224", {"depth": 3}, 2),
    "swin": ("swin_tiny_patch4_window7_224", {**SMALL, "img_size": 64, "window_size": 4}, 6),
    "resnet": ("resnet18", {"img_size": 64, "channels": (8, 8, 12, 16)}, 7),
    "vgg": ("vgg11_bn", {"small_images": True}, 14),
}


@pytest.mark.parametrize(("name", "arguments", "usual"), MODELS.values(), ids=MODELS)
def test_every_cut_costs_what_the_frontend_costs(name: str, arguments: dict, usual: int) -> None:
    found = list_splits(name, arguments)
    model = create(name, False, arguments).eval()
    facts = family_of(model)[1].facts(model)
    assert (found.usual, found.depth, found.input_shape) == (usual, facts.depth, facts.input_shape)
    assert [each.index for each in found.splits] == list(range(1, facts.depth))
    assert [each.layer for each in found.splits] == list(facts.layers[:-1])
    for each in found.splits[:: max(1, len(found.splits) // 4)]:
        frontend, _, layout = split_tokens(model, each.index)
        with torch.no_grad():
            tokens = frontend(torch.zeros(1, *facts.input_shape))
        assert each.output_shape == tuple(tokens.shape[1:]) and each.cut_bytes == tokens.numel()
        assert (each.prefix, each.grid) == (layout.prefix, layout.grid)
        assert each.macs == count_macs(frontend, facts.input_shape) > 0


def test_vit_large_at_its_usual_cut_is_as_the_paper_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """SA 1.1: 197 tokens of 1024, 41.1 GMAC; none of the 300 M weights is allocated."""
    made: list[torch.nn.Module] = []

    def seen(*arguments: object) -> torch.nn.Module:
        made.append(create_named(*arguments))
        return made[0]

    monkeypatch.setattr(exporter.list_splits, "create_named", seen)
    found = list_splits("vit_large_patch16_224", {})
    assert all(each.is_meta for each in made[0].state_dict().values())
    chosen = found.splits[found.usual - 1]
    assert (chosen.index, chosen.cut_bytes) == (16, 201_728) and round(chosen.macs / 1e9, 1) == 41.1


def test_json_is_one_document_and_text_marks_the_usual_cut(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--list-splits", "vit_tiny_patch16_224", "--model-arg", "img_size=32", "--model-arg", "patch_size=8",
             "--model-arg", "depth=3"]  # fmt: skip
    assert main([*words, "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "splits" and document["usual"] == 2
    assert document["splits"][1] == {
        "index": 2, "layer": "blocks.1", "output_shape": [17, 192], "prefix": 1, "grid": [4, 4], "cut_bytes": 17 * 192,
        "macs": document["splits"][1]["macs"],
    }  # fmt: skip
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[3].split()[:3] == ["2*", "blocks.1", "17x192"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["vit_tinny_patch16_224"], 2, "did you mean 'vit_tiny_patch16_224'"),
        (["convnext_atto"], 3, "no family that can be split"),
        (["vit_tiny_patch16_224", "--model-arg", "depht=3"], 3, "depht"),
        (["vit_tiny_patch16_224", "--model-arg", "depth=1"], 3, "one layer"),
        (["vit_tiny_patch16_224", "--model-arg", "depth"], 2, "KEY=VALUE"),
    ],
)
def test_mistakes_are_one_line_of_cause_and_one_of_cure(
    words: list[str], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["--list-splits", *words]) == code
    error = capsys.readouterr().err
    assert said in error and "cure: " in error and "Traceback" not in error and not list(tmp_path.iterdir())
