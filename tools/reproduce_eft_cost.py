"""What a training step of EFTViT costs on the device, by mask ratio or by local blocks, beside the counter of
multiply-accumulates.

The device's own trainer on onnxruntime, one thread; each step in a process of its own (`reproduce_eft_device`), so
that its peak of resident memory is known. One package serves all ratios: what is fed decides how many patches are kept.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from server_runtime.report import Results, Table
from server_runtime.training_macs import VitSizes
from tools.reproduce_world import ROOT

COST_RATIOS = (0.0, 0.25, 0.5, 0.75, 0.85, 0.95)


def measured(front: Path, sizes: VitSizes, local: int, ratio: float, batch: int) -> dict[str, Any]:
    """One row, with what the counter says."""
    words = [sys.executable, "-m", "tools.reproduce_eft_device", str(front), str(ratio), str(batch)]
    row = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout)
    return {**row, "local": local, "batch": batch, "macs": batch * sizes.local_step(row["kept"], local)}


def results_of(rows: list[dict[str, Any]], model: str) -> Results:
    """Measured and counted, each beside the first row; a table for each size of a batch."""
    batches = dict.fromkeys(row["batch"] for row in rows)
    tables = tuple(table_of([row for row in rows if row["batch"] == batch], batch) for batch in batches)
    return Results("A step of EFTViT on the device", (("model", model), ("threads", 1)), tables)


def table_of(rows: list[dict[str, Any]], batch: int) -> Table:
    """Of one size of a batch."""
    first = rows[0]
    cells = tuple(
        (
            f"{row['ratio']:g}", row["kept"], row["local"], f"{row['parameters'] / 1e6:.2f}",
            f"{1e3 * row['step_s']:.0f}", f"{first['step_s'] / row['step_s']:.2f}", f"{row['macs'] / 1e9:.2f}",
            f"{first['macs'] / row['macs']:.2f}", f"{row['peak_bytes'] / 1e6:.0f}",
        )
        for row in rows
    )  # fmt: skip
    columns = (
        "mask", "patches", "local blocks", "M parameters", "ms of CPU", "times less", "GMAC", "times less by counter",
        "peak MB",
    )  # fmt: skip
    return Table(f"Cost of a training step, batch {batch}", columns, cells)
