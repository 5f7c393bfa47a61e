"""INT8 exports through the whole command: quantizers, gates and their record, poor calibration folders, families."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

import exporter.build
from contract.errors import DataError, ExportError, GateError, UsageError
from contract.manifest import Manifest, from_bytes
from exporter.backend_tuning import Accuracies
from tests.exporter import tiny

SMALL = tuple({**tiny.ARGS, "depth": 2}.items())


def _manifest(output: Path) -> Manifest:
    return from_bytes((output / "manifest.json").read_bytes())


def test_the_published_form_is_recorded_with_what_its_search_chose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.run(tmp_path / "front", model_args=SMALL, split=1, quantizer="paper", limit_tuning=8, force=True)
    recipe = _manifest(tmp_path / "front").quantization.recipe
    assert recipe[:2] == ("quantizer paper", "weights int8 symmetric per tensor (Q, K and V apart)")
    said = capsys.readouterr().err
    assert "Searching scales" in said
    figures = {
        name: float(said.split(f"{name} ")[-1].split(" dB")[0])
        for name in ("min-max", "searched for weights", "searched")
        if f"{name} " in said
    }
    best = max(figures, key=lambda name: figures[name])
    assert f"scales {best}" in recipe[2]  # the guard: whatever came closest on other pictures


def test_the_default_says_what_it_did(exported: object) -> None:
    recipe = exported.manifest.quantization.recipe
    assert recipe[0] == "quantizer default" and "inputs int8 symmetric per tensor, scales min-max" in recipe
    assert not any("in float" in step and "hidden" in step for step in recipe)  # too few units for a tail here


def test_a_quantizer_without_int8_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not --int8"):
        tiny.plan(tmp_path / "front", int8=False, quantizer="paper")
    with pytest.raises(UsageError, match="default, searched, paper"):
        tiny.plan(tmp_path / "front", quantizer="papre")


@pytest.mark.parametrize("force", [False, True])
def test_qu_03_lost_answers_stop_the_export_or_are_recorded(
    force: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures are replaced: a tiny model that loses answers by INT8 alone is hard to make."""
    measured = exporter.build._prepare

    def poor(*arguments: object) -> object:
        prepared = measured(*arguments)
        return exporter.build.replace(prepared, accuracies=Accuracies(float32=0.9, int8=0.5))

    monkeypatch.setattr(exporter.build, "_prepare", poor)
    folder = tiny.write_pictures(tmp_path / "public", 12)
    arguments = {"model_args": SMALL, "split": 1, "calibration": str(folder), "force": force}
    if force:
        report = tiny.run(tmp_path / "front", **arguments)
        assert report.figures["forced"] is True and _manifest(tmp_path / "front").quantization.forced is True
        return
    with pytest.raises(GateError, match=r"float32 answers 90\.0%.*INT8 answers 50\.0%"):
        tiny.run(tmp_path / "front", **arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["public"]


def test_a_folder_of_one_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    Image.new("RGB", (32, 32), (9, 99, 199)).save(tmp_path / "one" / "a.png")
    with pytest.raises(ExportError, match="at least 2 images, found 1"):
        tiny.run(tmp_path / "front", model_args=SMALL, split=1, calibration=str(tmp_path / "one"))
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_folder_of_broken_images_names_the_first(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    for name in ("a.png", "b.png", "c.jpg"):
        (tmp_path / "broken" / name).write_bytes(b"\x89PNG no picture")
    with pytest.raises(DataError, match=r"[abc]\.(png|jpg)"):
        tiny.run(tmp_path / "front", model_args=SMALL, split=1, calibration=str(tmp_path / "broken"))


@pytest.mark.parametrize(
    ("model", "arguments", "split"),
    [
        ("resnet18", {"img_size": (64, 64), "num_classes": 4}, 4),
        ("vgg11_bn", {"num_classes": 4, "img_size": (64, 64)}, 9),
    ],
)
def test_convolutional_frontends_are_exported_in_int8(
    model: str, arguments: dict[str, object], split: int, tmp_path: Path
) -> None:
    report = tiny.run(tmp_path / "front", model=model, model_args=tuple(arguments.items()), split=split)
    figures = report.figures
    assert figures["int8_kernels"] == figures["linear_layers"] >= 3 and figures["int8_share"] == 1.0
    assert figures["snr_db"] > 25
    assert all(len(each.shape) == 4 for each in _manifest(tmp_path / "front").cuts[0].weights)
