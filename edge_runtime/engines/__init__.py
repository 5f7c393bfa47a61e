"""Engines: one file each, and the door that opens one by its name.

An engine maps normalised images to tokens; which file it runs, and the noise on its weights, are decided elsewhere.
The file's name is the engine's name in the config; nothing is imported before it is opened.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from contract.errors import EngineError, suggest
from edge_runtime.int8_check import Kernels

__all__ = ["Engine", "engine_names", "offered_engines", "open_engine"]


class Engine(Protocol):
    """A frontend that is ready to run."""

    name: str
    version: str  # of the runtime that really runs
    threads: int
    kernels: Kernels | None  # what ran as int8 in a first run; None when the engine cannot say

    def run(self, images: NDArray[np.float32], keep: NDArray[np.int64] | None = None) -> NDArray[np.float32]:
        """Tokens (B, T, d) of normalised images (B, 3, h, w).

        `keep` (B, K) are patch numbers, for a frontend exported with --masked: the tokens are then the prefix and those
        patches, in their order; without it, all of them.
        Raises: EngineError when the runtime fails, or `keep` does not fit the frontend.
        """


def engine_names() -> list[str]:
    """The engines this build has: the files of this folder."""
    return sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))


def offered_engines() -> list[str]:
    """Those that a person may choose: the fake one is for tests."""
    return [name for name in engine_names() if name != "fake"]


def open_engine(name: str, model: Path | bytes, threads: int) -> Engine:
    """Open `model` (a file, or its bytes) in the engine of that name.

    Raises: EngineError when there is no such engine, its runtime is not installed, or it refuses the model.
    """
    if name not in engine_names():
        raise EngineError(
            f"there is no engine {name!r}{suggest(name, offered_engines())}", "choose one that this build has"
        )
    module = importlib.import_module(f"edge_runtime.engines.{name}")
    return cast("Callable[[Path | bytes, int], Engine]", module.open_model)(model, threads)
