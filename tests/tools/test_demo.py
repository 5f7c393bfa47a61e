"""The demo's folders, and (slow) the whole story as a user would run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from contract.errors import DataError, UsageError
from contract.image_folder import scan

pytest.importorskip("sklearn", reason="the demo's data comes with scikit-learn")

from tools import demo_data  # noqa: E402  (after the skip)

ROOT = Path(__file__).parents[2]


def names(folder: Path) -> dict[str, set[str]]:
    return {path.name: {image.name for image in path.iterdir()} for path in folder.iterdir()}


def test_digits_divide_into_public_and_private_classes_without_overlap(tmp_path: Path) -> None:
    folders = demo_data.digits(tmp_path, shots=5, seed=1)
    assert scan(folders.public, None).classes == tuple("01234")
    assert folders.classes == tuple("56789")
    train, test = ([names(folder) for folder in part] for part in (folders.train, folders.test))
    for label in folders.classes:
        shots = [device.get(label, set()) for device in train]
        assert sum(map(len, shots)) == 5 == len(set().union(*shots))
        assert not set().union(*shots) & set().union(*(device[label] for device in test))


def test_other_seeds_draw_other_shots(tmp_path: Path) -> None:
    first, second = (demo_data.digits(tmp_path / str(seed), shots=5, seed=seed) for seed in (1, 42))
    assert names(first.train[0]) != names(second.train[0])


def pictures(folder: Path, count: int) -> Path:
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for number in range(count):
        Image.fromarray(rng.integers(0, 255, (40, 60, 3), np.uint8)).save(folder / f"{number}.png")
    return folder


def test_class_folders_of_a_user_split_in_half(tmp_path: Path) -> None:
    for label in "abcde":
        pictures(tmp_path / "mine" / label, 8)
    folders = demo_data.user_folder(tmp_path / "out", tmp_path / "mine", shots=3, seed=0)
    assert scan(folders.public, None).classes == ("a", "b")
    assert folders.classes == ("c", "d", "e")


def test_a_flat_folder_becomes_one_class_per_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = pictures(tmp_path / "mine", 4)
    (source / "broken.png").write_bytes(b"no picture")
    folders = demo_data.user_folder(tmp_path / "out", source, shots=3, seed=0)
    assert scan(folders.public, None).classes == ("0", "1")
    assert folders.classes == ("2", "3")
    assert "random crops" in folders.note
    assert "broken.png" in capsys.readouterr().err


def test_too_few_classes_are_named(tmp_path: Path) -> None:
    for label in "abc":
        pictures(tmp_path / "mine" / label, 8)
    with pytest.raises(DataError, match="4 classes with at least 6 images each, found 3"):
        demo_data.user_folder(tmp_path / "out", tmp_path / "mine", shots=5, seed=0)
    with pytest.raises(UsageError, match="--shots"):
        demo_data.digits(tmp_path / "digits", shots=0, seed=0)


@pytest.mark.slow
def test_the_whole_story(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.demo", "--format", "json", "-o", str(tmp_path / "demo")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["sa_accuracy"] > document["linear_probe_accuracy"] > 0.3
    assert document["bytes_per_image"] == 17 * 64 + 2 * 16
    assert document["energy_j"] is not None or document["energy_reason"]
    page = Path(document["report"]).read_text()
    assert page.startswith("<!doctype html>") and page.count("data:image/png") == 6
    assert "what an attacker gets at kappa 0.25" in page and "what an attacker gets at kappa 1" in page
