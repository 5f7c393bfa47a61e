"""Laplace noise on features and their wire quantization, image by image, keyed so that a release repeats bit for bit.

The laws are contract.keyed_noise and contract.tokens; here they meet the device's secret and config. What may be
released at all is left to `release_ledger`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contract.keyed_noise import laplace, noise_key
from contract.manifest import Cut
from contract.tokens import add_noise, keep_tokens, noise_scales, quantize, sent_layout, wire_steps


@dataclass(frozen=True)
class NoiseKeying:
    """Everything but the image that a draw is keyed by; the release ledger counts by the same fields."""

    secret: bytes
    package_digest: bytes
    cut: int
    kind: str
    kappa: float


def noise_kind(alpha: float, upload: str | None) -> str:
    """The name of the draw. Alpha is in it: features of another frontend under the same noise differ by signal alone.

    `upload` names a fresh draw (noise = "fresh"); None is the keyed one, which every upload repeats.
    """
    return f"laplace alpha={alpha!r}" + (f" fresh={upload}" if upload else "")


class FeatureNoise:
    """Clean tokens of one image in, wire codes of those that are sent out."""

    def __init__(self, cut: Cut, keying: NoiseKeying) -> None:
        self._keying, self._cut, self._prefix = keying, cut, cut.tokens.prefix
        self._scales = noise_scales(cut.statistics, keying.kappa, cut.sent.prefix_share)
        self._steps = wire_steps(cut.statistics, keying.kappa, cut.sent.prefix_share)
        sent = sent_layout(cut.tokens, cut.sent.kept)
        self.shape = (sent.count, sent.dim)  # of one image's codes

    def release(self, tokens: NDArray[np.float32], pixel_digest: bytes) -> tuple[NDArray[np.int8], int]:
        """Codes of noisy tokens (T, d), (prefix + K, d) where K patches are sent, and how many saturated.

        Raises: EngineError when tokens are not finite.
        """
        keying = self._keying
        key = noise_key(keying.secret, pixel_digest, keying.package_digest, keying.cut, keying.kind, keying.kappa)
        sent = keep_tokens(tokens, self._cut.tokens, self._cut.sent.kept)
        noisy = add_noise(sent, laplace(key, sent.shape), self._scales, self._prefix)
        return quantize(noisy, self._steps, self._prefix)
