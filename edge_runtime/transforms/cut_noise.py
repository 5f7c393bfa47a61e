"""Noise on the values at the cut of a part that is trained here, image by image (P3SL).

The law and its keys are `contract.cut_noise`'s. That no values leave with less noise than the device's floor is
`part_ledger`'s part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from contract.cut_noise import image_noise
from edge_runtime.choose_split import SigmaFloor


@dataclass(frozen=True)
class CutNoise:
    """`fresh` draws anew whenever something is sent, as published; else an image has one draw for each epoch, the same
    whenever that epoch is sent again.

    `floor` is what is added to images that are predicted, for which no server says how much.
    """

    secret: bytes
    package_digest: bytes
    fresh: bool = False
    floor: SigmaFloor = field(default_factory=SigmaFloor)

    def draw_of(self, occasion: str, message: str) -> str:
        """The name of a draw: the occasion's; with fresh noise the message's, which no image is in twice."""
        return message if self.fresh else occasion

    def add(
        self, z: NDArray[np.float32], sample_ids: Sequence[bytes], cut: int, sigma: float, draw: str
    ) -> NDArray[np.float32]:
        """z (B, ...) with noise of standard deviation sigma, of that draw."""
        if sigma == 0.0:
            return z
        noisy = np.empty(z.shape, np.float32)
        for row, (values, sample_id) in enumerate(zip(z, sample_ids, strict=True)):
            noise = image_noise(self.secret, sample_id, self.package_digest, cut, sigma, values.shape, draw)
            np.add(values, noise, out=noisy[row])
        return noisy
