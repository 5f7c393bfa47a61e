"""A made-up frontend in numpy, for tests of everything around an engine: one int8 linear layer on each patch.

It is as deterministic as a real one and just as sensitive to weight noise, and it needs neither onnx nor onnxruntime.

Its model file is one line of JSON {"prefix", "grid": [rows, columns], "size": [h, w], "dim", "delay_s"}, a line feed,
int8 codes (K, d) with K = 3 ph pw values of a patch, and float32 scales (d,). A prefix token is the patches' mean.
It takes any choice of patches.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from contract.errors import EngineError
from edge_runtime.engines._streams import KEEP, single_feeds
from edge_runtime.int8_check import Kernels


@dataclass(frozen=True)
class FakeLayout:
    """The header of a fake model file."""

    prefix: int
    grid: tuple[int, int]
    size: tuple[int, int]
    dim: int
    delay_s: float  # per image, to stand for a slow device

    @property
    def patch_size(self) -> tuple[int, int]:
        return self.size[0] // self.grid[0], self.size[1] // self.grid[1]

    @property
    def inputs(self) -> int:
        """K, the values of one patch."""
        return 3 * math.prod(self.patch_size)


def open_model(model: Path | bytes, threads: int) -> FakeEngine:
    """Raises: EngineError when the bytes are not a fake model."""
    data = model if isinstance(model, bytes) else model.read_bytes()
    header, _, weights = data.partition(b"\n")
    try:
        fields = json.loads(header)
        layout = FakeLayout(
            fields["prefix"], tuple(fields["grid"]), tuple(fields["size"]), fields["dim"], fields["delay_s"]
        )
        codes = np.frombuffer(weights, np.int8, layout.inputs * layout.dim).reshape(layout.inputs, layout.dim)
        scales = np.frombuffer(weights, "<f4", layout.dim, offset=codes.size)
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(
            f"not a model of the fake engine: {error}", "use --engine with a package, or onnxruntime"
        ) from error
    return FakeEngine(layout, codes.astype(np.float32) * scales, threads)


class FakeEngine:
    """tokens = patches @ weights, in float32."""

    name = "fake"
    version = "1"
    kernels: Kernels | None = None

    def __init__(self, layout: FakeLayout, weights: NDArray[np.float32], threads: int) -> None:
        self.threads = threads
        self._layout, self._weights = layout, weights  # (K, d)

    def run(self, images: NDArray[np.float32], keep: NDArray[np.int64] | None = None) -> NDArray[np.float32]:
        """Tokens (B, T, d) of images (B, 3, h, w)."""
        (rows, columns), (high, wide) = self._layout.grid, self._layout.patch_size
        time.sleep(self._layout.delay_s * len(images))
        patches = images.reshape(len(images), 3, rows, high, columns, wide).transpose(0, 2, 4, 1, 3, 5)
        feeds = single_feeds(images, keep, rows * columns)
        # One image at a time: a matrix product of another height may round differently.
        tokens = np.stack(
            [
                image.reshape(rows * columns, -1)[feed[KEEP][0].astype(np.int64)] @ self._weights
                for image, feed in zip(patches, feeds, strict=True)
            ]
        )  # (B, K, d)
        prefix = np.repeat(tokens.mean(axis=1, keepdims=True), self._layout.prefix, axis=1)
        return np.concatenate([prefix, tokens], axis=1).astype(np.float32)
