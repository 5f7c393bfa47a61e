from __future__ import annotations

import numpy as np
import pytest

from contract.preview import psnr_db, ssim


def pair(*size: int) -> tuple[np.ndarray, np.ndarray]:
    """A picture (h, w, 3) and the same under noise."""
    rng = np.random.default_rng(0)
    true = rng.random((*size, 3))
    return true, (true + 0.3 * rng.normal(size=true.shape)).clip(0, 1)


@pytest.mark.parametrize("size", [(32, 32), (10, 13), (9, 9), (48, 64), (400, 390)])
def test_likeness_is_that_of_the_servers_library(size: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch", reason="the device has neither torch nor piq")
    piq = pytest.importorskip("piq", reason="the extra 'attack' is not installed")
    true, found = pair(*size)
    tensors = [torch.from_numpy(each).permute(2, 0, 1)[None] for each in (true, found)]
    window = min(11, min(size) // 2 * 2 - 1)
    assert ssim(true, found) == pytest.approx(float(piq.ssim(*tensors, kernel_size=window)), abs=1e-9)
    assert psnr_db(true, found) == pytest.approx(float(piq.psnr(*tensors)), abs=1e-4)


def test_equal_pictures_are_as_alike_as_can_be_and_noise_is_not() -> None:
    true, found = pair(16, 16)
    assert ssim(true, true) == pytest.approx(1.0) and psnr_db(true, true) == 100.0
    assert ssim(true, 1.0 - true) < 0.0 < ssim(true, found) < 0.9
    assert psnr_db(true, np.full_like(true, 0.5)) == pytest.approx(10 * np.log10(1 / ((true - 0.5) ** 2).mean()))


def test_pictures_too_small_for_any_window_are_refused() -> None:
    with pytest.raises(ValueError, match="3 pixels"):
        ssim(*pair(2, 16))
