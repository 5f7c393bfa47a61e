"""One process that measures a training step of EFTViT on the device: no torch in it, so that its memory is a device's.

Which ratios are measured, and beside what, is `reproduce_eft_cost`'s part.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from contract import manifest as manifests
from contract import training
from edge_runtime.trainer import open_trainer

WARM_UP, STEPS = 2, 5


def measure(front: Path, ratio: float, batch: int) -> dict[str, Any]:
    """Median CPU seconds of a step (forward, backward, AdamW), the process's peak of resident memory, and how many
    parameters of the model the device trains (its head aside)."""
    manifest = manifests.from_bytes((front / manifests.MANIFEST_NAME).read_bytes())
    plan = training.from_bytes((front / training.TRAINING_NAME).read_bytes(), manifest)
    whole = next(cut for cut in plan.cuts if cut.loss != "none")
    trainer = open_trainer(front, whole, plan.optimiser)
    assert whole.patches is not None
    kept, rng = max(1, round((1 - ratio) * whole.patches)), np.random.default_rng(0)
    images = rng.standard_normal((batch, 3, manifest.image.height, manifest.image.width), dtype=np.float32)
    targets = np.eye(whole.output_shape[0], dtype=np.float32)[rng.integers(0, whole.output_shape[0], batch)]
    keep = np.sort(np.stack([rng.permutation(whole.patches)[:kept] for _ in range(batch)]), axis=1)
    spent = []
    for _ in range(WARM_UP + STEPS):
        started_s = time.process_time()
        trainer.forward(images, targets, keep)
        trainer.backward(None)
        trainer.step(1e-4)
        spent.append(time.process_time() - started_s)
    status = Path("/proc/self/status").read_text()  # getrusage would count what the parent had before exec
    peak_bytes = 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    own = [value.size for name, value in trainer.parameters().items() if not name.startswith(f"{whole.layer}.")]
    return {
        "ratio": ratio, "kept": kept, "step_s": statistics.median(spent[WARM_UP:]), "peak_bytes": peak_bytes,
        "parameters": sum(own),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))))
