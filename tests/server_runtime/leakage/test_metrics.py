"""Figures of pictures whose likeness is known, and LPIPS that is unknown with a reason."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from server_runtime.leakage.metrics import LPIPS_FILES, load_lpips, measure

pytest.importorskip("piq", reason="SSIM and FSIM come from piq: install the extra attack")


def pictures(count: int = 5, side: int = 32, seed: int = 0) -> torch.Tensor:
    coarse = torch.rand((count, 3, 6, 6), generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, (side, side), mode="bicubic").clamp(0, 1)


def test_the_same_pictures_are_alike() -> None:
    found = measure(pictures(), pictures())
    assert (found.psnr_db, found.lpips) == (100.0, None)
    assert found.ssim == pytest.approx(1.0, abs=1e-6) and found.fsim == pytest.approx(1.0, abs=1e-6)


def test_an_offset_of_a_tenth_is_twenty_decibels() -> None:
    true = pictures() * 0.8
    assert measure(true, true + 0.1).psnr_db == pytest.approx(20.0, abs=1e-4)


def test_ssim_is_that_of_scikit_image() -> None:
    metrics = pytest.importorskip("skimage.metrics", reason="scikit-image is a developer's package")
    true, found = pictures(seed=1), (pictures(seed=1) + 0.3 * pictures(seed=2)).clamp(0, 1)
    whole = [
        metrics.structural_similarity(
            a.permute(1, 2, 0).numpy(), b.permute(1, 2, 0).numpy(), channel_axis=2, data_range=1.0,
            gaussian_weights=True, sigma=1.5, use_sample_covariance=False, full=True,
        )[1][5:-5, 5:-5].mean()
        for a, b in zip(true, found, strict=True)
    ]  # fmt: skip
    assert measure(true, found).ssim == pytest.approx(sum(whole) / len(whole), abs=1e-3)


def test_what_is_less_alike_has_lower_figures() -> None:
    true = pictures()
    noise = torch.randn(true.shape, generator=torch.Generator().manual_seed(3))
    found = [measure(true, (true + amount * noise).clamp(0, 1)) for amount in (0.02, 0.1, 0.4)]
    for name in ("psnr_db", "ssim", "fsim"):
        values = [getattr(each, name) for each in found]
        assert values[0] > values[1] > values[2]


def test_flat_pictures_have_figures_that_json_can_hold() -> None:
    flat, edge = torch.full((3, 3, 32, 32), 0.5), pictures(3)
    assert measure(flat, flat).fsim == pytest.approx(1.0)
    assert 0.0 <= measure(edge, flat).fsim < 0.7


def test_pictures_of_sixteen_pixels_can_be_measured() -> None:
    found = measure(pictures(side=16), pictures(side=16))
    assert found.ssim == pytest.approx(1.0, abs=1e-6)


def test_lpips_without_weights_is_unknown_and_nothing_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    found, reason = load_lpips(torch.device("cpu"))
    assert found is None and "vgg16-397923af.pth" in reason and "nothing is downloaded" in reason
    assert not list(tmp_path.rglob("*.pt*"))


def test_weights_that_are_a_program_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle that would write a file when it is loaded."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    program = b"cos\nsystem\n(S'touch " + str(tmp_path / "owned").encode() + b"'\ntR."
    for name in LPIPS_FILES:
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr("archive/data.pkl", program)
            archive.writestr("archive/version", b"3\n")
    found, reason = load_lpips(torch.device("cpu"))
    assert found is None and "cannot be used" in reason
    assert not (tmp_path / "owned").exists()
