"""From samples to feature batches: decode, resize, normalise, engine, noise, wire codes.

Clean features never lie in memory all at once: they wait in a float16 file until the spool has the noisy ones. What may
be released, and the labels, are left to `worker`; the laws of noise and retrieval to `transforms`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from contract.errors import DataError, DeviceError, EngineError
from contract.images import ImageRule, normalise, pixel_digest, resize
from contract.tokens import TokenLayout
from edge_runtime.data import Sample, load_image
from edge_runtime.engines import Engine
from edge_runtime.transforms.laplace import FeatureNoise

FRAME_MARGIN_BYTES = 4096  # header and tensor table of a frame
DISK_RESERVE_BYTES = 64 << 20
ID_AND_LABEL_BYTES = 16 + 2
BATCH_SAMPLES_MAX = 256


@dataclass(frozen=True)
class Frontend:
    """An engine, and what goes in and comes out of it; `seen` is shown all clean tokens that come out."""

    engine: Engine
    image: ImageRule
    layout: TokenLayout
    seen: Callable[[Sequence[Sample], NDArray[np.float16]], None] | None = None

    def tokens(self, samples: Sequence[Sample]) -> NDArray[np.float16]:
        """Clean tokens (B, T, d), in float16 for training and inference alike, so that both release the same codes.

        Raises: DataError when a file changed since it was named; EngineError when tokens do not fit float16.
        """
        pictures = np.stack([read_picture(sample, self.image) for sample in samples])  # (B, h, w, 3)
        with np.errstate(over="ignore"):
            tokens = self.engine.run(normalise(pictures, self.image)).astype(np.float16)
        if tokens.shape[1:] != (self.layout.count, self.layout.dim):
            raise EngineError(
                f"tokens should be {(self.layout.count, self.layout.dim)}, found {tokens.shape[1:]}",
                "export the package again",
            )
        if not np.isfinite(tokens).all():
            names = ", ".join(sample.relative for sample in samples)
            raise EngineError(
                f"tokens of {names} are not finite in float16",
                "use another engine version, or export the package again",
            )
        if self.seen is not None:
            self.seen(samples, tokens)
        return tokens

    def tokens_in_steps(self, samples: Sequence[Sample], on_images: Callable[[int], object]) -> NDArray[np.float16]:
        """As `tokens`, decoding no more pictures at once than the engine runs side by side."""
        parts = []
        for start in range(0, len(samples), self.engine.threads):
            parts.append(self.tokens(samples[start : start + self.engine.threads]))
            on_images(len(parts[-1]))
        return np.concatenate(parts)


def read_picture(sample: Sample, image: ImageRule) -> NDArray[np.uint8]:
    """A sample's picture (h, w, 3) at the model's size. Raises: DataError when the file changed since it was named."""
    pixels = load_image(sample.path, sample.relative, image.max_pixels)
    if pixel_digest(pixels) != sample.pixel_digest:
        raise DataError(
            f"{sample.relative} changed while it was in use",
            "leave the folder alone while edge-run reads it, then start again",
        )
    return resize(pixels, image)


def extract(frontend: Frontend, samples: Sequence[Sample], path: Path, on_images: Callable[[int], object]) -> None:
    """Write the clean features (n, T, d) float16 of all samples to `path`; the caller removes it, whatever happens.

    `on_images` is told after each step how many images it took, and may raise to stop.
    Raises: DeviceError when the disk has no room; what `Frontend.tokens` raises.
    """
    needed_bytes = len(samples) * frontend.layout.count * frontend.layout.dim * 2 + DISK_RESERVE_BYTES
    free_bytes = shutil.disk_usage(path.parent).free
    if free_bytes < needed_bytes:
        raise DeviceError(
            f"clean features of {len(samples)} images need {needed_bytes >> 20} MiB in {path.parent}, "
            f"{free_bytes >> 20} MiB are free",
            "make room, or give --state a larger disk",
        )
    step = frontend.engine.threads
    try:
        with open(path, "wb", opener=owner_only) as stream:
            for start in range(0, len(samples), step):
                batch = samples[start : start + step]
                stream.write(frontend.tokens(batch).tobytes())
                on_images(len(batch))
    except OSError as error:
        raise DeviceError(
            f"{path} cannot be written: {error.strerror}", "make room on the disk and start again"
        ) from error


def owner_only(path: str, flags: int) -> int:
    """Clean features show the images to whoever reads them: mode 0600."""
    return os.open(path, flags, 0o600)


def read_features(path: Path, layout: TokenLayout, start: int, count: int) -> NDArray[np.float16]:
    """Clean features (count, T, d) of the samples from `start` on."""
    row_bytes = layout.count * layout.dim * 2
    with path.open("rb") as stream:
        stream.seek(start * row_bytes)
        return np.frombuffer(stream.read(count * row_bytes), np.float16).reshape(-1, layout.count, layout.dim)


def samples_per_batch(layout: TokenLayout, with_sources: bool, frame_bytes: int) -> int:
    """As many samples as one frame holds; a sample that is larger than a frame goes alone, and is cut into chunks."""
    sample_bytes = layout.count * layout.dim + (2 * layout.patches if with_sources else 0) + ID_AND_LABEL_BYTES
    return max(1, min((frame_bytes - FRAME_MARGIN_BYTES) // sample_bytes, BATCH_SAMPLES_MAX))


@dataclass(frozen=True)
class CodeBatch:
    """Wire codes (B, S, d) of the samples from `start` on: S tokens of an image are sent."""

    number: int
    start: int
    codes: NDArray[np.int8]
    saturated: int


def release_batches(
    tokens_of: Callable[[int, int], NDArray[np.float16]],
    samples: Sequence[Sample],
    noise: FeatureNoise,
    size: int,
    first_batch: int,
) -> Iterator[CodeBatch]:
    """Noise and quantize batch after batch, lazily, beginning with `first_batch`.

    `tokens_of(start, count)` gives clean tokens (count, T, d): from the feature file, or straight from the engine.
    """
    for start in range(first_batch * size, len(samples), size):
        batch = samples[start : start + size]
        clean = tokens_of(start, len(batch))
        codes = np.empty((len(batch), *noise.shape), np.int8)
        saturated = 0
        for row, sample in enumerate(batch):
            codes[row], clipped = noise.release(clean[row].astype(np.float32), sample.pixel_digest)
            saturated += clipped
        yield CodeBatch(start // size, start, codes, saturated)
