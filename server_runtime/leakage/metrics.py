"""How alike reconstructed pictures are to the true ones: PSNR, SSIM, FSIM and LPIPS, the last three by the library piq.

Which pictures are compared, and with which baselines beside them, is `profiler`'s part. A figure alone says little: the
FSIM of an unrelated photograph of 32 pixels is about 0.6.

Images are (n, 3, h, w) in [0, 1], h and w at least 7.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from contract.errors import UsageError
from contract.leakage import Figures

from ..attacks.ridge import image_psnr_db

AT_ONCE = 64
LEAST_PIXELS = 7  # of a side: SSIM's window
LUMINANCE = (0.299, 0.587, 0.114)
LPIPS_FILES = ("vgg16-397923af.pth", "lpips_weights.pt")  # as torchvision and piq name what they download


class Perceptual(Protocol):
    """LPIPS of pairs of images (n, 3, h, w) -> (n,)."""

    def __call__(self, true: Tensor, found: Tensor) -> Tensor: ...


def measure(true: Tensor, found: Tensor, lpips: Perceptual | None = None) -> Figures:
    """Means over images. FSIM is that of the luminance."""
    piq = load_piq()
    window = min(11, min(true.shape[2:]) // 2 * 2 - 1)
    sums: dict[str, list[Tensor]] = {"ssim": [], "fsim": [], "lpips": []}
    for a, b in zip(true.split(AT_ONCE), found.split(AT_ONCE), strict=True):
        a, b = a.float().clamp(0, 1), b.float().clamp(0, 1)
        sums["ssim"].append(piq.ssim(a, b, kernel_size=window, reduction="none"))
        grey = [
            each.mul(each.new_tensor(LUMINANCE).view(1, 3, 1, 1)).sum(1, keepdim=True).clamp(0, 1) for each in (a, b)
        ]
        sums["fsim"].append(piq.fsim(*grey, chromatic=False, reduction="none"))
        if lpips is not None:
            sums["lpips"].append(lpips(a, b).flatten())
    means = {name: float(torch.cat(parts).double().mean()) for name, parts in sums.items() if parts}
    psnr_db = float(image_psnr_db(true, found).mean())
    return Figures(psnr_db, means["ssim"], means["fsim"], means.get("lpips"))


def load_piq():  # type: ignore[no-untyped-def]
    """The library. Raises: UsageError where it is not installed."""
    try:
        import piq
    except ImportError as error:
        raise UsageError(
            f"SSIM and FSIM come from piq, which is missing: {error}", "pip install 'cutlayer[attack]'"
        ) from error
    return piq


def load_lpips(device: torch.device) -> tuple[Perceptual | None, str]:
    """LPIPS, or None and why. Nothing is downloaded: its weights must lie in torch's cache, and hold tensors alone."""
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    missing = [name for name in LPIPS_FILES if not (folder / name).is_file()]
    if missing:
        return None, f"the weights {', '.join(missing)} are not in {folder}, and nothing is downloaded"
    try:
        for name in LPIPS_FILES:
            torch.load(folder / name, map_location="cpu", weights_only=True)  # refuses anything but tensors
        module = load_piq().LPIPS(reduction="none").to(device)
    except Exception as error:  # a damaged or foreign file: every library has its own class for that
        return None, f"the weights in {folder} cannot be used: {str(error).splitlines()[0][:200]}"
    return module, ""
