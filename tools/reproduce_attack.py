"""The ridge attack on uploads, as rows of a reproduction report it: PSNR in dB beside the public mean colour's.

The attacker knows the law of both noises and draws its own; the law of the attack is `server_runtime.attacks.ridge`'s.
It is one linear map and flatters the defence: rows say so.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from contract.image_folder import scan
from contract.images import ImageRule, load_pixels, normalise, resize
from contract.keyed_noise import derive_key
from contract.manifest import Cut
from contract.onnx_weights import noised_onnx
from contract.tokens import dequantize, wire_steps
from edge_runtime.engines import Engine
from server_runtime.attacks import ridge
from tools.torch_worker import IMAGES_AT_ONCE

NOTE = "one linear map from token to patch; it flatters the defence: a transformer decoder reads 4 to 7 dB more"
IMAGES = 2000  # public images that it learns from
FRONTENDS = 3  # weight noises that it draws
HELD_OUT = 5  # every fifth public image chooses the penalty


class RidgeAttack:
    """One decoder for each noise strength, fitted when it is first asked for."""

    def __init__(
        self, front: Path, cut: Cut, rule: ImageRule, public: Path, alpha: float,
        open_frontend: Callable[[Path], Engine],
    ) -> None:  # fmt: skip
        self._front, self._cut, self._rule, self._public, self._alpha = front, cut, rule, public, alpha
        self._open_frontend = open_frontend
        self._decoders: dict[float, tuple[ridge.RidgeDecoder, NDArray[np.float64]]] = {}

    def psnr_db(
        self, kappa: float, uploads: Sequence[tuple[NDArray[np.int8], NDArray[np.uint8]]]
    ) -> tuple[float, float]:
        """Means over all uploaded images, of the decoder and of the mean colour; uploads are (codes, pictures)."""
        decoder, colour = self._decoder(kappa)
        layout, steps = self._cut.tokens, wire_steps(self._cut.statistics, kappa)
        size = (self._rule.height, self._rule.width)
        true, decoded = [], []
        for codes, shown in uploads:
            tokens = dequantize(codes, steps, layout.prefix)[:, layout.prefix :]
            decoded.append(ridge.images_of(decoder.decode(tokens), layout.grid, size))
            true.append(shown / 255.0)
        images, found = np.concatenate(true), np.concatenate(decoded)
        return ridge.mean_psnr_db(images, found), ridge.mean_psnr_db(images, np.broadcast_to(colour, images.shape))

    def _decoder(self, kappa: float) -> tuple[ridge.RidgeDecoder, NDArray[np.float64]]:
        if kappa not in self._decoders:
            layout, statistics = self._cut.tokens, self._cut.statistics
            patches, frontends = self._public_pairs
            rng = np.random.default_rng([0, round(1000 * kappa)])
            train, held = (ridge.Moments(layout.dim, patches.shape[2]) for _ in range(2))
            for tokens in frontends:
                for place in range(0, len(tokens), IMAGES_AT_ONCE):
                    rows = np.arange(place, min(place + IMAGES_AT_ONCE, len(tokens)))
                    noisy = ridge.released(tokens[rows].astype(np.float32), statistics, kappa, layout.prefix, rng)
                    for sums, part in ((train, rows % HELD_OUT != 0), (held, rows % HELD_OUT == 0)):
                        seen = noisy[part][:, layout.prefix :]
                        sums.add(seen.reshape(-1, layout.dim), patches[rows[part]].reshape(-1, patches.shape[2]))
            self._decoders[kappa] = (ridge.fit(train, held), ridge.mean_colour(train))
        return self._decoders[kappa]

    @cached_property
    def _public_pairs(self) -> tuple[NDArray[np.float32], list[NDArray[np.float16]]]:
        """Patches (n, N, p) of some public images, and their tokens (n, T, d) from each noised frontend."""
        files = scan(self._public, None).images
        order = np.random.default_rng(0).permutation(len(files))[:IMAGES]
        images = pictures([(files[row].path, files[row].relative) for row in order], self._rule)
        patches = ridge.patches_of((images / 255.0).astype(np.float32), self._cut.tokens.grid)
        return patches, [self._tokens(images, number) for number in range(FRONTENDS)]

    def _tokens(self, images: NDArray[np.uint8], number: int) -> NDArray[np.float16]:
        def key_for(layer: str) -> bytes:
            return derive_key(b"the attacker's own", number, layer)

        data, _, _ = noised_onnx((self._front / self._cut.onnx).read_bytes(), self._cut.weights, self._alpha, key_for)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / self._cut.onnx
            path.write_bytes(data)
            engine = self._open_frontend(path)
        parts = [
            engine.run(normalise(images[start : start + IMAGES_AT_ONCE], self._rule)).astype(np.float16)
            for start in range(0, len(images), IMAGES_AT_ONCE)
        ]
        return np.concatenate(parts)


def pictures(files: Sequence[tuple[Path, str]], rule: ImageRule) -> NDArray[np.uint8]:
    """(n, h, w, 3) as a device makes them before it normalises."""
    return np.stack([resize(load_pixels(path, name, rule.max_pixels), rule) for path, name in files])
