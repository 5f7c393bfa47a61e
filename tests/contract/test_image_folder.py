"""Finding images: traps in real folders, class numbers, and errors that name the folder."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from contract.errors import DataError
from contract.image_folder import Folder, scan


def make(root: Path, names: Iterable[str]) -> Path:
    """Empty files below a folder; a name that ends with / is a folder."""
    for name in names:
        path = root / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.touch()
    return root


def listed(folder: Folder) -> list[tuple[str, int | None]]:
    return [(image.relative, image.class_index) for image in folder.images]


def test_ed_04_hidden_files_are_no_classes_and_suffixes_have_no_case(tmp_path: Path) -> None:
    make(
        tmp_path,
        [
            *("cats/1.JPG", "cats/2.jpeg", "cats/deep/er/3.Png", "dogs/1.webp"),
            *(".DS_Store", ".git/a.png", "__MACOSX/cats/1.jpg", "Thumbs.db", "desktop.ini", "README.txt"),
            *("cats/.DS_Store", "cats/._1.JPG", "cats/Thumbs.db", "cats/notes.txt", "dogs/.cache/1.png", "loose.png"),
        ],
    )
    folder = scan(tmp_path, None)
    assert folder.classes == ("cats", "dogs")
    assert listed(folder) == [("cats/1.JPG", 0), ("cats/2.jpeg", 0), ("cats/deep/er/3.Png", 0), ("dogs/1.webp", 1)]
    assert folder.ignored == 12
    assert all(image.path == tmp_path / image.relative for image in folder.images)


NAMES = ["1", "2", "10", "Zebra", "apple", "äpfel"]
ORDERED = ("1", "10", "2", "Zebra", "apple", "äpfel")


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("seed", [0, 1])
def test_ed_05_class_numbers_are_the_same_everywhere(form: Any, seed: int, tmp_path: Path) -> None:
    names = [unicodedata.normalize(form, f"{name}/ö.png") for name in NAMES]
    random.Random(seed).shuffle(names)
    folder = scan(make(tmp_path, names), None)
    assert folder.classes == ORDERED
    assert listed(folder) == [(f"{name}/ö.png", number) for number, name in enumerate(ORDERED)]


def test_ed_05_the_locale_changes_nothing(tmp_path: Path) -> None:
    make(tmp_path, [f"{name}/x.png" for name in NAMES])
    program = "import sys, pathlib, contract.image_folder as f; print(ascii(f.scan(pathlib.Path(sys.argv[1]), None)))"
    told = {
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)],
            env={**os.environ, "LC_ALL": locale, "PYTHONUTF8": "1"},
            capture_output=True,
            check=True,
        ).stdout
        for locale in ("C", "C.UTF-8", "de_DE.UTF-8")
    }
    assert len(told) == 1


def test_ed_05_the_class_list_gives_the_numbers(tmp_path: Path) -> None:
    make(tmp_path, ["b/1.png", unicodedata.normalize("NFD", "ä/1.png")])
    folder = scan(tmp_path, ["c", "b", unicodedata.normalize("NFD", "ä")])
    assert folder.classes == ("c", "b", "ä")
    assert listed(folder) == [("b/1.png", 1), ("ä/1.png", 2)]


def test_ed_05_two_spellings_of_one_name_are_one_class(tmp_path: Path) -> None:
    make(tmp_path, [unicodedata.normalize("NFC", "ä/1.png"), unicodedata.normalize("NFD", "ä/2.png")])
    assert listed(scan(tmp_path, None)) == [("ä/1.png", 0), ("ä/2.png", 0)]


def test_ed_05_an_unknown_folder_is_named(tmp_path: Path) -> None:
    make(tmp_path, ["cats/1.png", "Dogs/1.png"])
    with pytest.raises(DataError) as error:
        scan(tmp_path, ["cats", "dogs"])
    assert "found 'Dogs' (did you mean 'dogs'?)" in error.value.cause


def test_ed_05_a_class_named_twice_is_an_error(tmp_path: Path) -> None:
    make(tmp_path, ["a/1.png"])
    with pytest.raises(DataError, match="found 'a' twice"):
        scan(tmp_path, ["a", "b", "a"])


def test_ed_07_a_class_without_pictures_keeps_its_number(tmp_path: Path) -> None:
    make(tmp_path, ["2/1.png", "3/", "4/1.png"])
    folder = scan(tmp_path, ["0", "1", "2", "3", "4"])
    assert folder.classes == ("0", "1", "2", "3", "4")
    assert listed(folder) == [("2/1.png", 2), ("4/1.png", 4)]
    assert scan(tmp_path, None).classes == ("2", "3", "4")


def test_a_flat_folder_is_unlabelled(tmp_path: Path) -> None:
    make(tmp_path, ["b.png", "a.jpg", "notes.txt", ".hidden/c.png"])
    folder = scan(tmp_path, None)
    assert folder.classes == () and folder.ignored == 2
    assert listed(folder) == [("a.jpg", None), ("b.png", None)]
    assert listed(scan(tmp_path, ["cats"])) == listed(folder)


@pytest.mark.parametrize("names", [[], ["notes.txt"], ["cats/"], ["cats/notes.txt", "1.png"]])
def test_a_folder_without_images_is_an_error(names: list[str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must hold images"):
        scan(make(tmp_path, names), None)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none", make(tmp_path, ["file"]) / "file"):
        with pytest.raises(DataError) as error:
            scan(path, None)
        assert str(path) in error.value.cause and "cannot be read" in error.value.cause


def test_loops_of_links_end(tmp_path: Path) -> None:
    root = make(tmp_path / "data", ["cats/1.png", "cats/more/2.png", "dogs/1.png"])
    (root / "self").symlink_to("self")
    (root / "above").symlink_to("..", target_is_directory=True)
    (root / "root").symlink_to(".", target_is_directory=True)
    (root / "cats" / "more" / "back").symlink_to("../../cats", target_is_directory=True)
    (root / "cats" / "up").symlink_to("/", target_is_directory=True)
    (root / "dogs" / "broken.png").symlink_to("nowhere.png")
    (root / "dogs" / "all").symlink_to("..", target_is_directory=True)
    folder = scan(root, None)
    assert folder.classes == ("cats", "dogs")
    assert listed(folder) == [("cats/1.png", 0), ("cats/more/2.png", 0), ("dogs/1.png", 1)]


def test_links_to_folders_and_files_are_followed(tmp_path: Path) -> None:
    make(tmp_path / "store", ["cats/1.png", "2.png"])
    root = make(tmp_path / "data", ["dogs/"])
    (root / "cats").symlink_to(tmp_path / "store" / "cats", target_is_directory=True)
    (root / "dogs" / "2.png").symlink_to(tmp_path / "store" / "2.png")
    assert listed(scan(root, None)) == [("cats/1.png", 0), ("dogs/2.png", 1)]


@pytest.mark.skipif(sys.platform == "darwin", reason="file names are UTF-8 there")
def test_names_that_are_no_text_become_printable(tmp_path: Path) -> None:
    os.makedirs(os.fsencode(tmp_path) + b"/caf\xe9")
    os.close(os.open(os.fsencode(tmp_path) + b"/caf\xe9/1.png", os.O_CREAT | os.O_WRONLY))
    folder = scan(tmp_path, None)
    assert folder.classes == ("caf\\xe9",) and listed(folder) == [("caf\\xe9/1.png", 0)]
    assert folder.images[0].path.exists()


def test_a_pipe_with_an_image_name_is_passed_over(tmp_path: Path) -> None:
    make(tmp_path, ["a/1.png"])
    os.mkfifo(tmp_path / "a" / "2.png")
    assert listed(scan(tmp_path, None)) == [("a/1.png", 0)]


def test_control_characters_of_a_name_reach_no_terminal(tmp_path: Path) -> None:
    (tmp_path / "esc\x1b]0;x\x07\n.png").write_bytes(b"")
    (image,) = scan(tmp_path, None).images
    assert image.relative == "esc\\x1b]0;x\\x07\\n.png"
    assert image.path.exists()


def test_a_long_class_list_is_quick(tmp_path: Path) -> None:
    (tmp_path / "99999").mkdir()
    (tmp_path / "99999" / "a.png").write_bytes(b"")
    folder = scan(tmp_path, [str(number) for number in range(100_000)])
    assert folder.images[0].class_index == 99_999
