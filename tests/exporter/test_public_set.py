from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from contract.errors import DataError
from contract.images import ImageRule
from exporter.plan import Limits
from exporter.public_set import divide, draw_synthetic, is_blank, open_folder
from tests.exporter import tiny

RULE = ImageRule(32, 32, "bicubic", 1.0, "center", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "white", 10**6)


@given(count=st.integers(1, 3000), limit=st.integers(1, 4000), seed=st.integers(0, 9))
def test_parts_are_disjoint_and_within_their_limits(count: int, limit: int, seed: int) -> None:
    limits = Limits()
    parts = divide(count, limits, limit, np.random.default_rng(seed))
    assert not set(parts.evaluation) & set(parts.tuning) and not set(parts.evaluation) & set(parts.calibration)
    assert 1 <= len(parts.calibration) <= limits.calibration_images
    assert len(parts.evaluation) == min(count // 5, limits.evaluation_images)
    assert len(parts.tuning) == min(limit, count - len(parts.evaluation))
    assert len({*parts.evaluation, *parts.tuning, *parts.calibration}) <= count


def test_a_folder_gives_batches_as_a_device_would_prepare_them(tmp_path: Path) -> None:
    public = open_folder(tiny.write_pictures(tmp_path / "public", 3), RULE)
    assert len(public) == 12 and public.labels.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    batches = list(public.batches(np.arange(5), 2))
    assert [batch.shape for batch in batches] == [(2, 3, 32, 32), (2, 3, 32, 32), (1, 3, 32, 32)]
    assert all(batch.dtype == np.float32 and np.abs(batch).max() <= 1.0 for batch in batches)


def test_a_folder_without_classes_has_no_labels(tmp_path: Path) -> None:
    Image.new("RGB", (40, 40)).save(tmp_path / "a.png")
    public = open_folder(tmp_path, RULE)
    assert public.labels is None and len(public) == 1


def test_qu_03_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="found none"):
        open_folder(tmp_path, RULE)
    with pytest.raises(DataError, match="absent"):
        open_folder(tmp_path / "absent", RULE)


def test_an_unreadable_image_is_named(tmp_path: Path) -> None:
    root = tiny.write_pictures(tmp_path / "public", 1)
    (root / "class0" / "0.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"class0/0\.png"):
        open_folder(root, RULE).pixels([0])


def test_the_digest_follows_names_and_sizes(tmp_path: Path) -> None:
    root = tiny.write_pictures(tmp_path / "public", 2)
    before = open_folder(root, RULE).digest()
    assert before == open_folder(root, RULE).digest()
    (root / "class0" / "0.png").rename(root / "class0" / "z.png")
    assert before != open_folder(root, RULE).digest()


def test_synthetic_pictures_repeat_vary_and_fill_the_range() -> None:
    first, again = (draw_synthetic(4, RULE, np.random.default_rng(0)).pixels(range(4)) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert first.shape == (4, 32, 32, 3) and first.dtype == np.uint8
    assert 30 < first.std() < 100 and not np.array_equal(first[0], first[1])


def test_blank_means_one_value_per_picture() -> None:
    black, grey = np.zeros((1, 4, 4, 3), np.uint8), np.full((1, 4, 4, 3), 90, np.uint8)
    assert is_blank(np.concatenate([black, grey]))
    grey[0, 0, 0, 0] = 91
    assert not is_blank(np.concatenate([black, grey]))
