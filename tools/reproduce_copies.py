"""The published form of an upload: every augmented copy on its own, with one keyed draw of noise or a fresh one each.

In both forms the server sees 1 + N^Aug copies of each image in every epoch; they differ in nothing but the noise.
Keyed: a token's noise is drawn once and copied with it, as devices do. Fresh: drawn anew for every copy of every image,
which a device never does, because the mean over the copies is nearly free of noise. Simulated: no device sends copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contract.tokens import augmentation_positions, token_origins
from edge_runtime.transforms.laplace import FeatureNoise, NoiseKeying, noise_kind
from server_runtime.store import Upload
from server_runtime.strategies import Ask, Reply
from tools.torch_worker import Device


@dataclass(frozen=True)
class Copying:
    """How many copies, what they are made with, and whether each has noise of its own."""

    runs: int
    seed: int
    replaced: int  # patches of each copy
    kappa: float
    fresh: bool


def copies_of(device: Device, upload: Upload, copying: Copying) -> dict[str, Upload]:
    """Uploads of the un-augmented images and of each run's copies, under names of their own, without sources."""
    layout = device.installed.cut.tokens
    assert upload.sources is not None
    rows, made = np.arange(len(upload.sample_ids)), {}
    clean = device.bench.frontend.tokens_in_steps(device.worker.samples, lambda images: None) if copying.fresh else None
    for run in range(copying.runs + 1):
        origins = np.repeat(rows[:, None], layout.count, axis=1)
        if run:
            positions = np.stack([
                augmentation_positions(copying.seed, each.tobytes(), run, layout.patches, copying.replaced)
                for each in upload.sample_ids
            ])  # fmt: skip
            origins = token_origins(upload.sources, rows, positions, layout.prefix)
        source = upload.codes if clean is None else clean
        copy = source[origins, np.arange(layout.count)]
        codes = copy if clean is None else noised(device, copy, copying.kappa, run)
        name = f"{device.name}-copy-{run:03}"
        made[name] = Upload(name, upload.sample_ids, codes, None, upload.labels)
    return made


def noised(device: Device, clean: NDArray[np.float16], kappa: float, run: int) -> NDArray[np.int8]:
    """Wire codes (n, T, d) of one copy of each image, under a draw that no other copy has."""
    bench = device.bench
    kind = noise_kind(bench.terms.alpha, f"copy {run}")
    noise = FeatureNoise(bench.cut, NoiseKeying(bench.secret, bench.package_digest, bench.cut.index, kind, kappa))
    samples = device.worker.samples
    return np.stack([
        noise.release(tokens.astype(np.float32), sample.pixel_digest)[0]
        for tokens, sample in zip(clean, samples, strict=True)
    ])  # fmt: skip


class PreparedAnswers:
    """Uploads that are there already, for a strategy that asks for features and for nothing else."""

    def __init__(self, uploads: Mapping[str, Upload]) -> None:
        self.uploads = dict(uploads)

    def answer(self, ask: Ask) -> dict[str, Reply]:
        return {name: self.uploads[name] for name in ask.tensors}

    def note_checkpoint(self) -> None:
        """Nothing moves on a device."""
