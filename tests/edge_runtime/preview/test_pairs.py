"""What is chosen, measured and said of a pair; and what an owner is warned of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from contract.errors import PackageError
from edge_runtime.preview.page import to_html, to_png
from edge_runtime.preview.pairs import Pair, make_pair, remarks, settings_of
from tests.edge_runtime.fake_package import Package, write_package
from tests.edge_runtime.preview.decoders import write_previewed

YOURS = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
CODES = np.zeros((5, 8), np.int8)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return write_previewed(tmp_path_factory.mktemp("previewed") / "front")


@pytest.mark.parametrize(
    ("floor", "chosen", "said"),
    [(1.0, 1.0, None), (1.5, 1.0, "gets less"), (2.0, 2.0, None), (0.5, 1.0, "warning: this device would accept")],
)
def test_the_decoder_is_one_that_shows_no_less_than_an_attacker_gets(
    package: Package, floor: float, chosen: float, said: str | None
) -> None:
    settings = settings_of(package.manifest, floor, 0.1, False)
    assert (settings.kappa, settings.decoder.kappa) == (chosen, chosen)
    found = " ".join(remarks(settings))
    assert ("this device" in found) == (said is not None) and (said or "") in found
    assert "an attacker who trains longer gets more" in found and "docs/threat_model.md" in found


def test_weaker_settings_than_the_attacker_was_trained_for_are_warned_of(package: Package) -> None:
    assert "alpha 0.1; one who is trained" in " ".join(remarks(settings_of(package.manifest, 1.0, 0.05, False)))
    assert "averages them" in " ".join(remarks(settings_of(package.manifest, 1.0, 0.1, True)))
    assert "warning" not in " ".join(remarks(settings_of(package.manifest, 1.0, 0.1, False)))


def test_a_package_without_a_decoder_says_so_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="has no decoder") as caught:
        settings_of(write_package(tmp_path / "front").manifest, 1.0, 0.1, False)
    assert "export-frontend --preview" in caught.value.cure


def test_parts_that_devices_train_say_that_there_is_no_preview(tmp_path: Path) -> None:
    parts = write_package(tmp_path / "parts", contents={"training.json": b"{}"}, cuts=())
    with pytest.raises(PackageError, match="send activations without noise") as caught:
        settings_of(parts.manifest, 0.0, 0.0, False)
    assert "leakage-profile" in caught.value.cure


def test_figures_compare_with_a_flat_colour() -> None:
    perfect = make_pair("a.png", YOURS, CODES, lambda codes: YOURS.astype(np.float32) / 255)
    assert perfect.psnr_db > 90 and perfect.ssim == pytest.approx(1.0) and np.array_equal(perfect.theirs, YOURS)
    assert perfect.words == "almost the picture itself"
    mean = YOURS.mean(axis=(0, 1)).astype(np.float32) / 255
    flat = make_pair("a.png", YOURS, CODES, lambda codes: np.broadcast_to(mean, YOURS.shape))
    assert (
        flat.psnr_db == pytest.approx(flat.flat_psnr_db, abs=1e-4)
        and flat.words == "no more alike than one flat colour"
    )
    assert replace(flat, ssim=0.2, flat_ssim=0.1).words == "less than 0.25, the aim of the threat model"
    assert replace(flat, ssim=0.3, flat_ssim=0.1).words == "shapes and colours"
    assert flat.flat_psnr_db == pytest.approx(perfect.flat_psnr_db)


def test_a_page_is_whole_and_escapes_names(package: Package) -> None:
    pair = Pair("<script>.png", YOURS, YOURS, 10.0, 0.3, 9.0, 0.1)
    page = to_html([(pair, to_png(pair))], settings_of(package.manifest, 1.0, 0.1, False), "tiny version 1")
    assert "<script>" not in page and "&lt;script&gt;.png" in page and "http" not in page
    assert page.count("data:image/png;base64,") == 1 and "shapes and colours, for this attacker" in page
