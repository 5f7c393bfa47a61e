"""Tokens at the cut of many images in a file on disk, so that memory does not grow with their number.

What is learnt from them is left to exporter.tune and exporter.few_shot.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from contract.console import progress
from contract.errors import ExportError
from exporter.runtime import run_tokens

HALF_MAX = 65504.0  # largest fp16 value


def extract(
    session: onnxruntime.InferenceSession,
    batches: Iterable[NDArray[np.float32]],
    shape: tuple[int, int, int],
    path: Path,
    description: str,
) -> NDArray[np.float16]:
    """Memory map (n, T, d) fp16 at `path` of the tokens of n images given in batches (B, 3, h, w).

    Raises ExportError when a token does not fit into fp16.
    """
    if not shape[0]:
        return np.zeros(shape, np.float16)  # an empty file cannot be mapped
    store = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=shape)
    done = 0
    with progress(total=shape[0], description=description, unit="images") as bar:
        for batch in batches:
            tokens = run_tokens(session, batch)
            if not np.abs(tokens).max() <= HALF_MAX:
                raise ExportError(
                    f"tokens at the cut should be finite and at most {HALF_MAX:.0f}, found {np.abs(tokens).max()}",
                    "choose another --split, or check the weights",
                )
            store[done : done + len(tokens)] = tokens
            done += len(tokens)
            bar.update(len(tokens))
    store.flush()
    return store
