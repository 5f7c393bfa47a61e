"""Measures a training step of a client part on the device (onnxruntime, no torch) beside torch on the same core.

Every figure is of a whole process of its own with one thread: CPU time of a step (forward, backward, SGD with momentum)
and the most memory that the process held, its imports included. The device, torch in float32 and torch with bfloat16
autocast take turns; ratios (the device's over torch's) are made within a turn, and the median of the turns is told.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from contract.console import ArgumentParser, print_document, run_command, say
from contract.errors import UsageError

MODULES = (
    "vit_tiny_4", "vit_tiny_4_masked", "resnet18_layer1", "resnet18", "eeft_resnet18", "eeft_resnet18_k1",
    "vgg16_bn_10",
)  # fmt: skip
SIDES = ("device", "torch", "torch_bf16")
SAME_NORM = 1e-3  # relative; both sides must do the same work
CHILD_S = 1800.0


def child(python: str, module: str, *words: object) -> str:
    """What a process of its own prints; it runs on one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [python, "-m", module, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=CHILD_S)
    if done.returncode != 0:
        raise RuntimeError(f"{module} failed: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


def run_side(side: str, name: str, folder: Path, steps: int, device_python: str) -> dict[str, Any]:
    if side == "device":
        text = child(device_python, "tools.bench_training_device", folder, steps)
    else:
        precision = "float32" if side == "torch" else "bfloat16"
        text = child(sys.executable, "tools.bench_training_parts", "train", name, folder, steps, precision)
    figures: dict[str, Any] = json.loads(text)
    return figures


def measure(name: str, folder: Path, turns: int, steps: int, device_python: str) -> dict[str, list[dict[str, Any]]]:
    """Figures of each side by turn; the order is turned round each time."""
    child(sys.executable, "tools.bench_training_parts", "write", name, folder)
    figures: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for turn in range(turns):
        for side in SIDES if turn % 2 == 0 else reversed(SIDES):
            figures[side].append(run_side(side, name, folder, steps, device_python))
    return figures


def row_of(name: str, figures: dict[str, list[dict[str, Any]]]) -> dict[str, object]:
    """Ratios within a turn, and the medians of the sides."""
    ours, theirs = figures["device"][0]["norm"], figures["torch"][0]["norm"]
    if abs(ours - theirs) > SAME_NORM * theirs:
        raise RuntimeError(f"{name}: the sides do not compute the same: norm of the output {ours} and {theirs}")
    row: dict[str, object] = {
        "module": name,
        "ratio": ratio_of(figures, "torch", "step_s"),
        "bf16_ratio": ratio_of(figures, "torch_bf16", "step_s"),
        "rss_ratio": ratio_of(figures, "torch", "peak_bytes"),
    }
    row["image_ms"] = 1e3 * statistics.median(turn["image_s"] for turn in figures["device"])
    for side in SIDES:
        peaks = [turn["peak_bytes"] for turn in figures[side]]
        row[f"{side}_step_ms"] = 1e3 * statistics.median(turn["step_s"] for turn in figures[side])
        row[f"{side}_peak_mb"] = None if None in peaks else statistics.median(peaks) / 1e6
    if row["rss_ratio"] is None:
        row["reason"] = "this system has no /proc/self/status"
    return row


def ratio_of(figures: dict[str, list[dict[str, Any]]], other: str, name: str) -> float | None:
    """Median over the turns of the device's figure over the other side's in the same turn; None where unknown."""
    pairs = [(ours[name], theirs[name]) for ours, theirs in zip(figures["device"], figures[other], strict=True)]
    if any(None in pair for pair in pairs):
        return None
    return statistics.median(ours / theirs for ours, theirs in pairs)


def line_of(row: dict[str, Any]) -> str:
    def shown(value: float | None, digits: int) -> str:
        return "unknown" if value is None else f"{value:.{digits}f}"

    sides = ", ".join(f"{shown(row[f'{s}_step_ms'], 1)} / {shown(row[f'{s}_peak_mb'], 0)}" for s in SIDES)
    ratios = "".join(f"{shown(row[name], 2):>8}" for name in ("ratio", "bf16_ratio", "rss_ratio"))
    return f"{row['module']:<20}{ratios}   {sides}; {row['image_ms']:.1f}"


def to_text(document: dict[str, Any]) -> str:
    lines = [
        f"torch {document['torch']}, onnxruntime {document['onnxruntime']} on Python {document['device_python']}, "
        f"1 thread, {document['turns']} turns of {document['steps']} steps",
        f"{'module':<20}{'ratio':>8}{'bf16':>8}{'memory':>8}   CPU ms and peak MB: device, torch, torch bf16; "
        "device, one image",
    ]
    lines.extend(line_of(row) for row in document["rows"])
    return "\n".join(lines)


def main() -> int:
    options = parse(sys.argv[1:])
    rows, last = [], {}
    for name in options.module or MODULES:
        say(f"measuring {name}")
        with tempfile.TemporaryDirectory(prefix="cutlayer-bench-") as folder:
            last = measure(name, Path(folder), options.turns, options.steps, str(options.device_python))
        rows.append(row_of(name, last))
        say(line_of(rows[-1]))  # a run of many minutes that is cut short has told this much
    document: dict[str, Any] = {
        "torch": last["torch"][0]["version"],
        "onnxruntime": last["device"][0]["version"],
        "device_python": last["device"][0]["python"],
        "device_imported_torch": last["device"][0]["torch_imported"],
        "turns": options.turns,
        "steps": options.steps,
        "threads": 1,
        "rows": rows,
    }
    if options.format == "json":
        print_document("bench-training", document)
    else:
        print(to_text(document))
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog="tools/bench_training", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--module", action="append", choices=MODULES, help="measure this one (repeatable; default: all)"
    )
    parser.add_argument("--turns", type=int, default=3, help="processes of each side (default %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a process (default %(default)s)")
    parser.add_argument(
        "--device-python", type=Path, default=Path(sys.executable), help="interpreter of the device (default: this)"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default %(default)s")
    options = parser.parse_args(argv)
    for name in ("turns", "steps"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} {getattr(options, name)} is too few", "give at least 1")
    return options


if __name__ == "__main__":
    sys.exit(run_command(main))
