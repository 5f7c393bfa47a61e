"""Noise at the cut of a part that a device trains (P3SL): its law, and the key that repeats it for an image and a draw.

Noise that stays the same while the part is trained cancels between two epochs, whatever its strength; one draw for each
epoch only averages (docs/results.md, attack `epoch_difference`). So a draw has a name: the epoch's.

sigma is a standard deviation: Laplace noise of scale b = sigma / sqrt 2 (algorithms.md 3.2), converted here and nowhere
else. Which sigma applies is left to the server's noise table and the device's floor.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from contract.keyed_noise import laplace, noise_key

KIND = "laplace at the cut"


def laplace_scale(sigma: float) -> float:
    """b of a standard deviation."""
    return sigma / math.sqrt(2.0)


def image_noise(
    secret: bytes, sample_id: bytes, package_digest: bytes, cut: int, sigma: float, shape: tuple[int, ...], draw: str,
) -> npt.NDArray[np.float32]:  # fmt: skip
    """One image's noise at a cut; its wire id stands for its pixels. A `draw` of the same name is the same draw."""
    key = noise_key(secret, sample_id, package_digest, cut, f"{KIND} draw={draw}", sigma)
    noise = laplace(key, shape)
    noise *= np.float32(laplace_scale(sigma))
    return noise
