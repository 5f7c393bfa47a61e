"""Measures what split adaptation and its baselines cost the client: peak memory, seconds and joules (SA, Table 2).

Every method runs in a fresh process without torch: split adaptation through the product's device on all images (decode,
weight noise, INT8 frontend, patch retrieval, feature noise; no socket), linear probing through the float32 model, the
others through the product's trainer. Weights are random, which changes no cost. Training is measured for a few steps
and told as modelled: measured seconds an image x images x epochs; its memory is measured at the batch that is given.
Waiting for a server is nowhere counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from contract.console import ArgumentParser, print_document, run_command, say
from contract.errors import CutlayerError, UsageError

EPOCHS = {"sa": 1, "lp": 100, "fine_tuning": 100, "ln_tuning": 100, "split_learning": 100, "offsite_tuning": 50}
SHOTS = 5  # images of a class
CALIBRATION_IMAGES = 16
FILE_SIDE_PX = 256
CHILD_S = 4 * 3600.0

Row = dict[str, Any]


def main() -> int:
    options = parse(sys.argv[1:])
    rows = []
    for method in options.methods:
        say(f"measuring {method}")
        with tempfile.TemporaryDirectory(prefix="cutlayer-cost-") as name:
            figures = run_method(method, options, Path(name))
        rows.append(row_of(method, figures, options.images))
        say(line_of(rows[-1]))
    document = {
        "model": options.model, "model_args": options.model_arg, "weights": "random", "images": options.images,
        "classes": classes_of(options.images), "batch": options.batch, "steps": options.steps,
        "threads": options.threads, "rows": rows, "verdict": verdict(rows),
    }  # fmt: skip
    if options.format == "json":
        print_document("bench-client-cost", document)
    else:
        print("\n".join(lines_of(document)))
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog="tools/bench_client_cost", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--methods", type=listed_methods, default=list(EPOCHS), help=f"(default: {','.join(EPOCHS)})")
    parser.add_argument("--model", default="vit_base_patch16_224", help="timm's name (default: %(default)s, at 224 px)")
    parser.add_argument(
        "--model-arg", action="append", default=[], metavar="KEY=VALUE", help="passed to timm (repeatable)"
    )
    parser.add_argument("--split", type=int, help="blocks on the client (default: two thirds)")
    parser.add_argument("--images", type=int, default=500, help="of the client, five a class (default %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="of training (default %(default)s, as published)")
    parser.add_argument("--steps", type=int, default=2, help="measured steps of training (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of the client's process (default %(default)s)")
    parser.add_argument("--format", choices=["text", "json"], default="text", help="(default: %(default)s)")
    options = parser.parse_args(argv)
    for name, least in (("images", 2 * SHOTS), ("batch", 2), ("steps", 1), ("threads", 1)):
        if getattr(options, name) < least:
            raise UsageError(f"--{name} {getattr(options, name)} is too few", f"give at least {least}")
    return options


def listed_methods(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in EPOCHS]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected {', '.join(EPOCHS)}, found {unknown[0]!r}")
    return names


# -- one method


def run_method(method: str, options: argparse.Namespace, folder: Path) -> Row:
    """What the client's process measured. Raises: CutlayerError when a process ended otherwise than well."""
    draw_images(folder / "images", options.images)
    task = {
        "method": method, "model": options.model, "model_args": options.model_arg, "split": options.split,
        "classes": classes_of(options.images), "batch": options.batch, "steps": options.steps,
        "threads": options.threads, "epochs": EPOCHS[method],
    }  # fmt: skip
    if method == "sa":
        draw_images(folder / "public", CALIBRATION_IMAGES)
        arguments = [word for each in options.model_arg for word in ("--model-arg", each)]
        split = [] if options.split is None else ["--split", options.split]
        # Random weights may miss INT8's limits, which is no matter of cost.
        child(
            "exporter.cli", "--model", options.model, *arguments, *split, "--int8", "--force", "--tune", "none",
            "--calibration", folder / "public", "--seed", 1, "-o", folder / "front",
        )  # fmt: skip
        (folder / "facts.json").write_text(json.dumps(task))
    else:
        (folder / "task.json").write_text(json.dumps(task))
        child("tools.bench_client_cost_parts", folder)
    facts = json.loads((folder / "facts.json").read_text())
    figures: Row = json.loads(child("tools.bench_client_cost_device", folder, threads=options.threads))
    return {**figures, **{name: facts[name] for name in ("trained_values", "macs") if name in facts}}


def draw_images(root: Path, count: int) -> None:
    """Smooth coloured noise as JPEG files, the classes' folders filled in turn."""
    rng = np.random.default_rng(count)
    for number in range(count):
        small = Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8))
        path = root / f"class-{number % classes_of(count):04}" / f"{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        small.resize((FILE_SIDE_PX, FILE_SIDE_PX), Image.Resampling.BICUBIC).save(path, quality=90)


def classes_of(images: int) -> int:
    return max(2, images // SHOTS)


def child(module: str, *words: object, threads: int | None = None) -> str:
    """What a process of its own prints; its last line of complaint where it fails."""
    environment = dict(os.environ)
    if threads is not None:
        environment |= {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", module, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=CHILD_S)
    if done.returncode != 0:
        said = "; ".join(done.stderr.strip().splitlines()[-3:]) or f"exit code {done.returncode}"
        memory = " (a negative code -9 means that the memory was not enough)" if done.returncode == -9 else ""
        raise CutlayerError(f"{module} failed: {said}{memory}", "correct the options, or use a smaller --batch")
    return done.stdout


# -- from seconds of a few steps to those of the whole work


def row_of(method: str, figures: Row, images: int) -> Row:
    """One line of the table; what is modelled says so, what is unknown is None."""
    seconds, energy = figures["seconds"], figures["energy_j"]
    modelled = method != "sa" and not (method == "lp" and figures["images"] == images)
    spent = {
        "seconds": whole(method, seconds, figures["images"], images),
        "energy_j": None if None in energy.values() else whole(method, energy, figures["images"], images),
    }
    peak_bytes = figures["peak_bytes"]
    return {
        "method": method,
        "epochs": EPOCHS[method],
        "peak_mb": None if peak_bytes is None else peak_bytes / 1e6,
        **spent,
        "how": "modelled" if modelled else "measured",
        "energy_reason": figures["energy_reason"],
        "measured_images": figures["images"],
        "measured_s": seconds,
        "trained_values": figures.get("trained_values"),
        "torch_imported": figures["torch_imported"],
        **{name: figures[name] for name in ("sent_bytes", "engine", "int8_layers", "stages_s") if name in figures},
    }


def whole(method: str, spent: dict[str, float], measured: int, images: int) -> float:
    """Of all images and epochs, from what stages of the measured images took."""
    if method == "sa":
        return spent["setup"] + spent["work"]
    if method == "lp":  # the model sees every image once, the head has learnt for all epochs
        return spent["setup"] + spent["forward"] / measured * images + spent["head"]
    return spent["setup"] + spent["work"] / measured * images * EPOCHS[method]


def verdict(rows: list[Row]) -> str:
    """Has split adaptation the least memory and time, as published? From these figures alone."""
    others = [row for row in rows if row["method"] != "sa"]
    ours = next((row for row in rows if row["method"] == "sa"), None)
    if ours is None or not others:
        return "no verdict: it needs sa and another method"
    parts = []
    for name, word, show in (
        ("peak_mb", "memory", lambda value: f"{value:.0f} MB"),
        ("seconds", "time", lambda value: f"{value:.1f} s"),
    ):
        parts.append(compare(ours, others, name, word, show))
    return "; ".join(parts)


def compare(ours: Row, others: list[Row], name: str, word: str, show: Callable[[float], str]) -> str:
    if any(row[name] is None for row in (ours, *others)):
        return f"{word} is unknown on this system"
    nearest = min(others, key=lambda row: row[name])
    figures = f"{show(ours[name])} against {show(nearest[name])} of {nearest['method']}"
    if ours[name] < nearest[name]:
        return f"sa has the least {word}: {figures}, the next ({nearest[name] / ours[name]:.1f} times)"
    return f"sa has NOT the least {word}: {figures}"


# -- text


def line_of(row: Row) -> str:
    peak, joules = row["peak_mb"], row["energy_j"]
    memory = "unknown" if peak is None else f"{peak:.0f}"
    energy = "unknown" if joules is None else f"{joules:.0f}"
    return f"{row['method']:<15}{memory:>8}{row['seconds']:>12.1f}  {row['how']:<9}{row['epochs']:>6}  {energy:>8}"


def lines_of(document: Row) -> list[str]:
    head = (
        f"{' '.join([document['model'], *document['model_args']])} (random weights), {document['images']} images of "
        f"{document['classes']} classes, batch {document['batch']}, {document['threads']} thread(s), "
        f"{document['steps']} steps measured; whole processes without torch"
    )
    columns = f"{'method':<15}{'peak MB':>8}{'seconds':>12}  {'how':<9}{'epochs':>6}  {'joules':>8}"
    reasons = sorted({row["energy_reason"] for row in document["rows"] if row["energy_reason"]})
    notes = [f"energy: {reason}" for reason in reasons]
    return [head, columns, *map(line_of, document["rows"]), *notes, f"verdict: {document['verdict']}"]


if __name__ == "__main__":
    sys.exit(run_command(main))
