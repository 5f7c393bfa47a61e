"""Which public images are attacked, and which are learnt from."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from contract.errors import DataError
from contract.image_folder import scan
from server_runtime.leakage.public import Public, digest_of, read_public
from tests.golden.samples import MANIFEST

RULE = dataclasses.replace(MANIFEST.image, height=16, width=16)


@contextmanager
def quiet(what: str, total: int, unit: str) -> Iterator[object]:
    yield lambda done: None


def draw(root: Path, counts: dict[str, int]) -> Path:
    rng = np.random.default_rng(0)
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return root


def read(root: Path, images: int = 1000, learn: int = 1000, seed: int = 0) -> Public:
    return read_public(scan(root, None), RULE, images, learn, seed, quiet)  # type: ignore[arg-type]


def test_a_fifth_is_attacked_evenly_over_the_classes_and_never_learnt_from(tmp_path: Path) -> None:
    public = read(draw(tmp_path, {"many": 60, "few": 12, "some": 28}))
    sizes = [len(part.pixels) for part in (public.learn, public.held, public.attacked)]
    assert sizes == [72, 8, 20]
    assert public.attacked.labels is not None
    assert sorted(np.bincount(public.attacked.labels)) == [6, 7, 7]
    names = [set(part.digests) for part in (public.learn, public.held, public.attacked)]
    assert len(set.union(*names)) == 100


def test_a_copy_of_an_attacked_picture_is_not_learnt_from(tmp_path: Path) -> None:
    root = draw(tmp_path, {"a": 20, "b": 20})
    alone = read(root)
    for number, file in enumerate(scan(root, None).images):
        if number % 2 == 0:
            shutil.copy(file.path, file.path.with_name(f"copy-{file.path.name}"))
    public = read(root)
    attacked = set(public.attacked.digests)
    assert not attacked & {*public.learn.digests, *public.held.digests}
    assert len(alone.attacked.pixels) == 8


def test_the_same_seed_chooses_the_same(tmp_path: Path) -> None:
    root = draw(tmp_path, {"a": 30, "b": 30})
    assert read(root).attacked.digests == read(root).attacked.digests
    assert read(root).attacked.digests != read(root, seed=1).attacked.digests
    assert len(read(root, images=5, learn=10).learn.pixels) == 8


def test_images_without_classes_have_no_labels(tmp_path: Path) -> None:
    folder = draw(tmp_path, {"only": 25}) / "only"
    public = read(folder)
    assert public.attacked.labels is None and public.classes == ()


def test_too_few_images_and_other_images_are_noticed(tmp_path: Path) -> None:
    root = draw(tmp_path, {"a": 19})
    with pytest.raises(DataError, match="has 19 images"):
        read(root)
    before = digest_of(scan(root, None))
    draw(root, {"b": 1})
    assert digest_of(scan(root, None)) != before
