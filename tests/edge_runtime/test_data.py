from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from contract.errors import ConfigError, DataError
from edge_runtime.data import DataLimits, Dataset, load_dataset, read_class_list, require_labels
from tests.edge_runtime.fake_package import write_images

SECRET = bytes(range(32))


def load(root: Path, classes: tuple[str, ...] | None = None, bad_share: float = 0.2) -> Dataset:
    return load_dataset(root, classes, SECRET, 10_000, lambda: None, DataLimits(bad_share=bad_share))


def save(path: Path, value: int = 0, mode: str = "RGB", **options: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((6, 5, 3), value, np.uint8)
    pixels[0] = (255, 0, 0)
    Image.fromarray(pixels).convert(mode).save(path, **options)  # type: ignore[arg-type]


def test_ed_01_the_same_picture_in_another_orientation_is_the_same_sample(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 3), dtype=np.uint8)
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels).save(tmp_path / "a" / "upright.png")
    exif = Image.Exif()
    exif[0x0112] = 8  # shown turned by 90 degrees
    Image.fromarray(np.rot90(pixels, -1).copy()).save(tmp_path / "a" / "turned.png", exif=exif)
    dataset = load(tmp_path)
    assert len(dataset.samples) == 1 and dataset.duplicates[0].same_as == "a/turned.png"


def test_ed_02_bad_files_are_named_counted_and_cost_only_themselves(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 4, "dog": 4})
    good = (tmp_path / "cat" / "cat_0.png").read_bytes()
    bad = {
        "empty.png": b"",
        "text.jpg": b"hello",
        "short.png": good[: len(good) // 2],
        "a.gif": b"GIF89a",
        "b.bmp": b"BM",
    }
    for name, content in bad.items():
        (tmp_path / "cat" / name).write_bytes(content)
    dataset = load(tmp_path, bad_share=0.5)
    assert len(dataset.samples) == 8 and dataset.class_counts() == (4, 4)
    assert {entry.file for entry in dataset.skipped} == {f"cat/{name}" for name in bad}
    assert all(entry.reason and "0x" not in entry.reason for entry in dataset.skipped)


def test_ed_02_too_many_bad_files_stop_with_a_summary(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 8})
    for number in range(5):
        (tmp_path / "cat" / f"broken_{number}.png").write_bytes(b"x")
    with pytest.raises(DataError, match=r"5 of 13 images .* at most 20% may be bad") as error:
        load(tmp_path)
    assert "cat/broken_3.png" in error.value.cause


def test_ed_02_only_bad_files_are_an_error_whatever_the_share(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "x.png").write_bytes(b"x")
    with pytest.raises(DataError, match="1 of 1 images"):
        load(tmp_path, bad_share=1.0)


def test_ed_03_every_kind_of_picture_is_taken(tmp_path: Path) -> None:
    for number, mode in enumerate(("RGB", "L", "RGBA", "P", "LA", "1")):
        save(tmp_path / "a" / f"{mode}.png", 40 * number, mode)
    save(tmp_path / "a" / "moving.gif", 9, save_all=True, append_images=[Image.new("RGB", (5, 6))])
    dataset = load(tmp_path)
    assert len(dataset.samples) + len(dataset.duplicates) == 7 and not dataset.skipped


def test_ed_04_traps_are_no_classes_and_no_pictures(tmp_path: Path) -> None:
    save(tmp_path / "cat" / "UPPER.PNG", 1)
    save(tmp_path / "cat" / "deep" / "er" / "x.jpeg", 2)
    save(tmp_path / ".hidden" / "x.png", 3)
    save(tmp_path / "__MACOSX" / "x.png", 4)
    for name in (".DS_Store", "Thumbs.db", "cat/._x.png", "cat/desktop.ini", "cat/notes.txt"):
        (tmp_path / name).write_bytes(b"junk")
    dataset = load(tmp_path)
    assert dataset.classes == ("cat",) and len(dataset.samples) == 2 and dataset.ignored >= 5


def test_ed_05_class_numbers_do_not_depend_on_disk_order_or_normal_form(tmp_path: Path) -> None:
    names = ["10", "2", "1", "Zebra", "apple", "a\u0308pfel"]
    for value, name in enumerate(names):
        save(tmp_path / "one" / name / "x.png", 20 * value)
    for value, name in reversed(list(enumerate(names))):
        save(tmp_path / "two" / name.replace("a\u0308", "\u00e4") / "x.png", 20 * value)
    one, two = load(tmp_path / "one"), load(tmp_path / "two")
    assert one.classes == two.classes == ("1", "10", "2", "Zebra", "apple", "\u00e4pfel")
    assert {s.sample_id: s.label for s in one.samples} == {s.sample_id: s.label for s in two.samples}


def test_ed_05_a_folder_outside_the_class_list_is_named(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 1, "dgo": 1})
    with pytest.raises(DataError, match="dgo"):
        load(tmp_path, ("cat", "dog"))


def test_ed_07_a_class_without_pictures_keeps_the_numbering(tmp_path: Path) -> None:
    write_images(tmp_path, {"two": 2, "four": 3})
    (tmp_path / "three").mkdir()
    dataset = load(tmp_path, ("zero", "one", "two", "three", "four"))
    assert dataset.class_counts() == (0, 0, 2, 0, 3)


def test_a_renamed_picture_keeps_its_id_and_another_secret_gives_another(tmp_path: Path) -> None:
    write_images(tmp_path / "one", {"a": 2})
    before = {sample.sample_id for sample in load(tmp_path / "one").samples}
    (tmp_path / "one" / "a" / "a_0.png").rename(tmp_path / "one" / "a" / "zzz.png")
    assert {sample.sample_id for sample in load(tmp_path / "one").samples} == before
    other = load_dataset(tmp_path / "one", None, bytes(32), 10_000, lambda: None)
    assert before.isdisjoint(sample.sample_id for sample in other.samples)


def test_equal_pictures_are_one_sample(tmp_path: Path) -> None:
    save(tmp_path / "a" / "x.png", 5)
    save(tmp_path / "a" / "y.png", 5)
    save(tmp_path / "b" / "z.bmp", 5)
    dataset = load(tmp_path)
    assert len(dataset.samples) == 1
    assert [(entry.file, entry.same_as) for entry in dataset.duplicates] == [
        ("a/y.png", "a/x.png"),
        ("b/z.bmp", "a/x.png"),
    ]


def test_loose_pictures_cannot_be_adapted_to(tmp_path: Path) -> None:
    write_images(tmp_path, {"": 2})
    dataset = load(tmp_path, ("cat",))
    with pytest.raises(DataError, match="needs a class for each image, 2 in"):
        require_labels(dataset, tmp_path)


def test_a_class_list_is_one_name_a_line(tmp_path: Path) -> None:
    path = tmp_path / "classes.txt"
    path.write_bytes("\ufeffcat\r\n\n  dog \n".encode())
    assert read_class_list(path) == ("cat", "dog")
    path.write_bytes(b"\n")
    with pytest.raises(ConfigError, match="found 0"):
        read_class_list(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_class_list(tmp_path / "none")
