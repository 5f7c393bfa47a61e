"""P3SL's upper level against its invariants (algorithms.md 3.4), and what judges the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from contract.errors import ConfigError, PackageError, TrainingError
from contract.images import ImageRule
from contract.leakage import Threshold, to_bytes
from contract.manifest import from_bytes
from contract.privacy_table import PrivacyTable, from_leakage
from server_runtime import backend_folder
from server_runtime.evaluation import check_same, digest_of, read_evaluation
from server_runtime.leakage.curve import fine_grid, interpolate, non_increasing
from server_runtime.noise_table import (
    NoiseTable,
    accuracy_floor,
    first_table,
    initial_table,
    is_saturated,
    offer_of,
    reassigned,
    threshold_of,
    uniform_table,
)
from server_runtime.plan import parse_sigma
from tests.leakage_table import leakage_table, sigma_table

TABLE = NoiseTable((1, 2), (2.0, 1.0))


def test_invariant_3_noise_is_lowered_by_eq_5_and_by_nothing_else() -> None:
    assert reassigned(TABLE, 0.9, 0.85) == TABLE  # A >= A_min
    assert reassigned(TABLE, 0.75, 0.85).sigma == pytest.approx((1.6, 0.8))  # a gap of 0.1: x 0.8
    for accuracy in np.linspace(0.0, 1.0, 21):
        lowered = reassigned(TABLE, float(accuracy), 0.85).sigma
        assert all(0.1 * old <= new <= old for new, old in zip(lowered, TABLE.sigma, strict=True))


def test_invariant_4_each_split_gets_the_least_noise_that_is_enough() -> None:
    privacy = from_leakage(sigma_table([1, 2, 5]), [1, 2, 5])
    table = initial_table(privacy, 0.33)
    for split, sigma in zip(table.splits, table.sigma, strict=True):
        assert privacy.at(split, sigma) <= 0.33 + 1e-9
        assert sigma == 0.0 or privacy.at(split, sigma - 0.05) > 0.33
    assert initial_table(privacy, 0.01).sigma == (2.5, 2.5, 2.5)  # where nothing is enough: the most


def test_invariant_10_the_leakage_table_never_rises_with_noise() -> None:
    rng = np.random.default_rng(0)
    coarse = [0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5]
    grid = fine_grid(coarse)
    rows = []
    for _ in range(4):
        levelled = non_increasing(list(0.5 - 0.08 * np.array(coarse) + 0.05 * rng.standard_normal(len(coarse))))
        rows.append(tuple(interpolate(coarse, levelled, at) for at in grid))
    values = PrivacyTable((1, 2, 3, 4), tuple(grid), tuple(rows)).as_array()
    assert values.shape == (4, 51)
    assert (np.diff(values, axis=1) <= 1e-6).all()


def test_noise_that_is_next_to_nothing_is_none() -> None:
    assert reassigned(NoiseTable((1,), (0.05,)), 0.0, 0.9) == NoiseTable((1,), (0.0,))
    assert NoiseTable((1, 2), (0.0, 0.0)).is_silent and not TABLE.is_silent
    with pytest.raises(TrainingError, match="no noise is assigned to split 9, but to 1, 2"):
        TABLE.of(9)


def test_the_floor_and_when_an_accuracy_is_held_against_it() -> None:
    assert accuracy_floor(0.9, 0.05) == pytest.approx(0.855)
    assert not is_saturated([0.1, 0.3]) and not is_saturated([0.1, 0.3, 0.5, 0.52])
    assert is_saturated([0.1, 0.5, 0.502, 0.49])


def test_where_the_first_table_comes_from() -> None:
    leakage = sigma_table([1, 2])
    table, privacy = first_table("table", [1, 2], leakage, 0.0)
    assert table == NoiseTable((1, 2), (1.5, 1.0)) and privacy is not None and privacy.splits == (1, 2)
    assert first_table("table", [1, 2], leakage, 0.4)[0] == NoiseTable((1, 2), (1.0, 0.5))
    assert first_table(2.5, [2, 1], None, 0.0) == (uniform_table([1, 2], 2.5), None)
    assert first_table("auto", [1], leakage, 0.0)[0] is None and first_table(0.0, [1], None, 0.0) == (None, None)
    for of in (None, replace(leakage, unit="kappa")):
        with pytest.raises(ConfigError) as raised:
            first_table("table", [1, 2], of, 0.0)
        assert "leakage-profile" in raised.value.cure
    with pytest.raises(ConfigError, match="no T_FSIM: too few"):
        threshold_of(Threshold(None, "too few", None, None), 0.0)


def test_what_is_offered_without_a_leakage_table_shows_the_same_everywhere() -> None:
    offer = offer_of(TABLE, None, [2, 1])
    assert offer["splits"].tolist() == [1, 2] and offer["sigma"].tolist() == [2.0, 1.0]
    assert offer["leakage"].tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("text", ["-1", "nan", "much", "inf"])
def test_a_sigma_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="sigma"):
        parse_sigma(text)
    assert parse_sigma("2.5") == 2.5


RULE = ImageRule(8, 8, "bicubic", 1.0, "center", (0.5,) * 3, (0.5,) * 3, "white", 1_000_000)


def test_the_models_judges_are_the_operators_images_by_class(tmp_path: Path) -> None:
    for place, name in enumerate(("ape", "bee")):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 8), (255 * place, 0, 0)).save(tmp_path / name / "1.png")
    judged = read_evaluation(tmp_path, RULE)
    assert judged.images.shape == (2, 3, 8, 8) and judged.labels.tolist() == [0, 1] and judged.classes == 2
    digest = digest_of(tmp_path)
    check_same(digest, tmp_path)
    check_same("", None)
    (tmp_path / "bee" / "1.png").rename(tmp_path / "bee" / "2.png")
    for root in (tmp_path, None):
        with pytest.raises(ConfigError, match="judged by other images"):
            check_same(digest, root)


def test_a_leakage_table_of_another_package_is_refused_with_the_backend(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    from tests.server_runtime.tiny_training import write_folder

    root = write_folder(tmp_path / "parts.backend")
    manifest = from_bytes((root / "manifest.json").read_bytes())
    alone = backend_folder.read(root)
    right = replace(leakage_table(manifest), unit="sigma")
    (root / "leakage.json").write_bytes(to_bytes(right))
    found = backend_folder.read(root)
    assert isinstance(found, backend_folder.TrainingFolder) and found.leakage == right
    assert found.sha256() != alone.sha256()
    other = replace(right, settings=replace(right.settings, package_digest="0" * 64))
    (root / "leakage.json").write_bytes(to_bytes(other))
    with pytest.raises(PackageError, match="leakage table is of a package"):
        backend_folder.read(root)
