"""The frontends that only tuning sees: quantized on M disjoint subsets of the public set (SA section 3.3).

The one that is sent is quantized on all of it and made by the same exporter.frontend_file; what tuning does with their
tokens is exporter.tune's.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from contract.console import say
from contract.manifest import WeightRecord
from exporter.frontend_file import Halves, make_frontend_file
from exporter.plan import ExportPlan, Limits
from exporter.public_set import Parts, PublicSet
from exporter.quantize import LEAST_IMAGES
from exporter.tune import disjoint_subsets


@dataclass(frozen=True)
class TuningFrontend:
    """One INT8 file on scratch space, and where its weights are."""

    path: Path
    records: tuple[WeightRecord, ...]


def make_tuning_frontends(
    halves: Halves, plan: ExportPlan, public: PublicSet, parts: Parts, limits: Limits, threads: int, scratch: Path,
    subsets: int, rng: np.random.Generator,
) -> tuple[TuningFrontend, ...]:  # fmt: skip
    """One frontend for each subset that can calibrate one; `halves` stay as they are. None for a float32 export, where
    all would be the same.

    Raises ExportError when a step fails. Limits are those of the frontend that is sent, so none is kept here.
    """
    if plan.tune == "none" or not plan.int8:
        return ()
    made = []
    for number, members in enumerate(disjoint_subsets(len(parts.tuning), subsets, rng), start=1):
        calibration = parts.tuning[members][: limits.calibration_images]
        if len(calibration) < LEAST_IMAGES:
            continue
        say(f"frontend {number} of {subsets} for tuning, calibrated on {len(calibration)} images of its own")
        folder = scratch / f"tuning frontend {number}"
        folder.mkdir()
        file = make_frontend_file(
            copy.deepcopy(halves), replace(plan, force=True), public, replace(parts, calibration=calibration), limits,
            threads, folder,
        )  # fmt: skip
        file.float_path.unlink()
        path = folder / "int8.onnx"
        path.write_bytes(file.data)
        made.append(TuningFrontend(path, file.records))
    return tuple(made)
