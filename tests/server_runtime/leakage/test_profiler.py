"""What follows from rows: curves, T_FSIM and the least noise, on rows whose answer is known."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from contract.image_folder import scan
from server_runtime.leakage.metrics import Figures
from server_runtime.leakage.package import read_package
from server_runtime.leakage.profiler import Profiler, curve_of, default_strengths
from server_runtime.leakage.public import digest_of, read_public
from server_runtime.leakage.table import Attacked, Row, Settings, Table, strongest, to_text

STRENGTHS = (0.0, 0.5, 1.0, 2.0)


@contextmanager
def quiet(what: str, total: int, unit: str) -> Iterator[object]:
    yield lambda done: None


def attacked(name: str, psnr_db: float, fsim: float, right: int | None) -> Attacked:
    return Attacked(name, Figures(psnr_db, fsim / 2, fsim, None), right, 1.0)


def planted(right: Sequence[int], images: int = 1000) -> list[Row]:
    """FSIM falls from 0.9 to 0.3, with one measurement error; the second attack reads less and tells more classes."""
    rows = []
    for strength, fsim, told in zip(STRENGTHS, (0.9, 0.5, 0.52, 0.3), right, strict=True):
        found = (attacked("ridge", 10.0 * fsim, fsim, told - 10), attacked("inverse_net", 9.0 * fsim, fsim - 0.1, told))
        rows.append(Row(2, strength, True, images, 500, found))
    return rows


def test_the_strongest_attack_counts_figure_by_figure() -> None:
    row = Row(2, 0.5, True, 10, 20, (attacked("a", 20.0, 0.4, 1), attacked("b", 15.0, 0.6, 1)))
    assert strongest(row) == Figures(20.0, 0.3, 0.6, None)


def test_a_curve_never_rises_and_is_a_twentieth_fine() -> None:
    curve = curve_of(planted([900, 300, 200, 100]), 2)
    assert [point.strength for point in curve[:3]] == [0.0, 0.05, 0.1] and len(curve) == 41
    assert all(later.fsim <= earlier.fsim for earlier, later in zip(curve, curve[1:], strict=False))
    assert curve[10].fsim == pytest.approx(0.51) and curve[-1].fsim == pytest.approx(0.3)
    assert curve_of([], 2) == []


@pytest.fixture(scope="module")
def profiler() -> Profiler:
    pytest.importorskip("piq", reason="SSIM and FSIM come from piq: install the extra attack")
    given = os.environ.get("CUTLAYER_TEST_PACKAGE")
    if given is None:
        pytest.skip("packages are made by tests.make_package: run tools/test, or set CUTLAYER_TEST_PACKAGE")
    package = read_package(Path(given) / "front")
    folder = scan(Path(given) / "public", None)
    settings = Settings(
        package.digest.hex(), digest_of(folder), ("ridge",), STRENGTHS, package.alpha, 1000, 5000, None, 0
    )
    public = read_public(folder, package.image, 1000, 5000, 0, quiet)  # type: ignore[arg-type]
    return Profiler(package, public, settings, torch.device("cpu"), quiet, None, None)  # type: ignore[arg-type]


def table(profiler: Profiler, right: Sequence[int], images: int = 1000) -> Table:
    return profiler.table(planted(right, images), "no weights")


def test_the_threshold_is_found_where_a_classifier_can_tell_no_more(profiler: Profiler) -> None:
    """Four classes: 27 % are allowed; 240 of 1000 leave up to 26.4 % possible, 260 up to 28.4 %."""
    found = table(profiler, [900, 500, 400, 240])
    assert found.threshold.fsim == pytest.approx(0.3) and found.threshold.classes == 4
    assert found.least_noise[0].strength == 2.0
    assert "T_FSIM 0.300" in to_text(found) and "least noise at split 2: kappa 2" in to_text(found)
    more = table(profiler, [900, 240, 240, 240])
    assert more.threshold.fsim == pytest.approx(0.51)
    assert more.least_noise[0].strength == pytest.approx(0.5)


def test_a_threshold_that_is_not_found_leaves_the_least_noise_unknown(profiler: Profiler) -> None:
    found = table(profiler, [900, 500, 400, 260])
    assert found.threshold.fsim is None and "0.284 of the pictures and more" in found.threshold.reason
    assert found.least_noise[0].strength is None
    few = table(profiler, [9, 5, 3, 2], images=9)
    assert few.threshold.fsim is None and "9 images are too few" in few.threshold.reason


def test_strengths_end_where_the_package_allows_no_more_noise(profiler: Profiler) -> None:
    package = read_package(Path(os.environ["CUTLAYER_TEST_PACKAGE"]) / "front")
    rules = package.manifest.transforms
    found = default_strengths(package)
    assert found[0] == 0.0 and found[-1] == rules.kappa_max and rules.kappa in found
