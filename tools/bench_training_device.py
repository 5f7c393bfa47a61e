"""The device's side of tools/bench_training: steps of edge_runtime's trainer in a process without torch.

    python -m tools.bench_training_device FOLDER STEPS

FOLDER holds what `bench_training_parts` wrote. One JSON object goes to stdout.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime

from contract.training import OptimiserRule, TrainingCut
from edge_runtime.trainer import TrainerSettings, open_trainer

WARM_UP = 2
LEARNING_RATE = 0.01


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    facts = json.loads((folder / "facts.json").read_text())
    names = {name: tuple(facts[name]) for name in ("output_shape", "evaluated_shape", "trainable", "frozen", "buffers")}
    cut = TrainingCut(
        1, 2, folder.name, "forward.onnx", "backward.onnx", "evaluate.onnx",
        kept=facts.get("kept"), patches=facts.get("patches"), saved=facts["saved"], macs=facts["macs"],
        loss=facts["loss"],
        **names,
    )  # fmt: skip
    trainer = open_trainer(folder, cut, OptimiserRule("sgd", 0.9, 5e-4), TrainerSettings(threads=1))
    batch = dict(np.load(folder / "batch.npz"))
    spent_s, first_norm = [], 0.0
    for number in range(WARM_UP + steps):
        started_s = time.process_time()
        z = trainer.forward(batch["x"], keep=batch.get("keep")).z
        trainer.backward(z / np.float32(z.size))
        trainer.step(LEARNING_RATE)
        spent_s.append(time.process_time() - started_s)
        if number == 0:
            first_norm = float(np.sqrt(np.square(z, dtype=np.float64).sum()))
    alone_s = []  # one image in evaluation mode
    for _ in range(WARM_UP + steps):
        started_s = time.process_time()
        trainer.evaluate(batch["x"][:1])
        alone_s.append(time.process_time() - started_s)
    figures = {
        "image_s": statistics.median(alone_s[WARM_UP:]),
        "step_s": statistics.median(spent_s[WARM_UP:]),
        "peak_bytes": peak_bytes(),
        "norm": first_norm,
        "version": onnxruntime.__version__,
        "python": sys.version.split()[0],
        "torch_imported": "torch" in sys.modules,
    }
    print(json.dumps(figures))


def peak_bytes() -> int | None:
    """Most resident memory of this process (VmHWM: getrusage would count the parent's before exec); None if unknown."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


if __name__ == "__main__":
    main()
