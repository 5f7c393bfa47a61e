"""Measures INT8 frontends in the device's engines beside the same runtimes in float32 and beside torch.

Every figure is of a process of its own on one thread, and its CPU time; the sides take turns, ratios are made within a
turn (onnxruntime's float32 over the side), and the median of the turns is told. Float and torch sides run whole
batches; the engines run a batch image by image, as they do on a device. The weights are random: they run as fast as
trained ones and say nothing of accuracy; the SNR is against float32 on the same random weights.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from contract.console import ArgumentParser, print_document, run_command, say
from contract.errors import UsageError
from contract.output import open_output
from edge_runtime.cpus import allowed_affinity, has_vnni, usable_cpus
from edge_runtime.install import signal_to_noise_db

MODELS = ("vit_base_8", "vit_large_16")
QUICK = "tiny"
SHAPES = ("dense", "masked")
BATCHES = (1, 8)
BASELINE = "onnxruntime_float"
SIDES = ("onnxruntime_int8", BASELINE, "openvino_int8", "openvino_float", "torch_float32", "torch_bfloat16")
CHILD_S = 1500.0
IMAGES_OF_A_SITE = 500
Figures = dict[str, Any]


def child(python: str, module: str, *words: object, one_thread: bool = True) -> Figures | None:
    """The JSON that a process of its own prints."""
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} if one_thread else {}
    command = [python, "-m", module, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=CHILD_S)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1:]}")
    figures: Figures | None = json.loads(done.stdout) if done.stdout else None
    return figures


def file_of(folder: Path, kind: str, shape: str) -> Path:
    return folder / (kind if shape == "dense" else f"{kind}_masked") / "front.onnx"


def run_side(side: str, shape: str, name: str, folder: Path, options: argparse.Namespace) -> Figures:
    runtime, kind = side.split("_")
    batches = ",".join(map(str, options.batches))
    if runtime == "torch":
        words: tuple[object, ...] = ("torch", name, folder, options.budget_s, kind, shape, batches)
        figures = child(sys.executable, "tools.bench_engine_parts", *words)
    else:
        words = ("run", file_of(folder, kind, shape), folder, options.budget_s, runtime, batches)
        figures = child(str(options.device_python), "tools.bench_engine_device", *words)
    assert figures is not None
    return figures


def absent_sides(options: argparse.Namespace) -> dict[str, str]:
    """Sides that cannot be measured here, with the reason."""
    ask = [str(options.device_python), "-c", "import importlib.util as u; print(u.find_spec('openvino') is not None)"]
    if subprocess.run(ask, capture_output=True, text=True).stdout.strip() == "True":
        return {}
    return {side: "openvino is not installed" for side in SIDES if side.startswith("openvino")}


def measure(name: str, folder: Path, options: argparse.Namespace, absent: dict[str, str]) -> Figures:
    """All figures of one model."""
    if not (folder / "batch.npz").is_file():
        say(f"{name}: exporting packages")
        child(sys.executable, "tools.bench_engine_parts", "write", name, folder, one_thread=False)
    facts: Figures = json.loads((folder / "facts.json").read_text())
    sides = [side for side in SIDES if side not in absent and side not in options.without]
    turns: dict[tuple[str, str], list[Figures]] = {(side, shape): [] for side in sides for shape in options.shapes}
    peaks: dict[str, list[float]] = {}
    for turn in range(options.turns):
        for side, shape in list(turns) if turn % 2 == 0 else reversed(list(turns)):
            turns[side, shape].append(run_side(side, shape, name, folder, options))
            told = ", ".join(f"{1e3 * image_s(turns[side, shape][-1], batch):.1f} ms" for batch in options.batches)
            say(f"{name}, turn {turn + 1}, {side}, {shape}: {told} an image")
        for file in sorted(folder.glob("gemm-*.onnx")):
            for runtime in ("onnxruntime", "openvino") if not absent else ("onnxruntime",):
                words = ("gemm", file, folder, options.budget_s, runtime)
                found = child(str(options.device_python), "tools.bench_engine_device", *words)
                _, shape, kind, _ = file.stem.split("-")
                peaks.setdefault(f"{runtime}_{kind}_{shape}", []).append(found["gmacs"])  # type: ignore[index]
    best = {key: max(found) for key, found in peaks.items()}
    rows = [
        row_of(side, shape, batch, turns, facts, best, folder)
        for shape in options.shapes for batch in options.batches for side in sides
    ]  # fmt: skip
    return {
        "name": name, **facts, "gemm_peak_gmacs": best, "rows": rows,
        "streams": measure_streams(folder, options, absent), "device": measure_device(folder, options, absent),
        "version": {side.split("_")[0]: found[0]["version"] for (side, _), found in turns.items()},
    }  # fmt: skip


def image_s(figures: Figures, batch: int) -> float:
    return float(figures["batches"][str(batch)]["image_s"])


def row_of(
    side: str, shape: str, batch: int, turns: dict[tuple[str, str], list[Figures]], facts: Figures,
    peaks: dict[str, float], folder: Path,
) -> Figures:  # fmt: skip
    """One line of the result; what could not be had is None."""
    own, baseline = turns[side, shape], turns.get((BASELINE, shape))
    seconds = [image_s(each, batch) for each in own]
    gmacs = facts["macs" if shape == "dense" else "kept_macs"] / statistics.median(seconds) / 1e9
    runtime, kind = side.split("_")
    peak = peaks.get(f"{runtime}_{kind}_{shape}")
    ratio = None
    if baseline:
        ratio = statistics.median(image_s(theirs, batch) / s for theirs, s in zip(baseline, seconds, strict=True))
    return {
        "side": side, "shape": shape, "batch": batch, "image_ms": 1e3 * statistics.median(seconds),
        "image_ms_range": [1e3 * min(seconds), 1e3 * max(seconds)],
        "wall_ms": 1e3 * statistics.median(each["batches"][str(batch)]["wall_s"] for each in own),
        "ratio": ratio, "gmacs": gmacs, "share_of_peak": None if peak is None else gmacs / peak,
        "int8_layers": own[0]["int8_layers"], "load_s": statistics.median(each["load_s"] for each in own),
        "peak_mb": median_mb([each["peak_bytes"] for each in own]), "snr_db": snr_of(folder, side, shape),
    }  # fmt: skip


def median_mb(peaks: list[int | None]) -> float | None:
    known = [each for each in peaks if each is not None]
    return statistics.median(known) / 1e6 if len(known) == len(peaks) else None


def snr_of(folder: Path, side: str, shape: str) -> float | None:
    """Tokens of two images against onnxruntime's in float32; None where equal, or where that was not run."""

    def path_of(other: str) -> Path:
        runtime, kind = other.split("_")
        if runtime == "torch":
            return folder / f"tokens-{other}-{shape}.npy"
        return folder / f"tokens-{runtime}-{file_of(folder, kind, shape).parent.name}.npy"

    if not path_of(BASELINE).exists():
        return None
    found = signal_to_noise_db(np.load(path_of(BASELINE)), np.load(path_of(side)))
    return found if math.isfinite(found) else None


def measure_streams(folder: Path, options: argparse.Namespace, absent: dict[str, str]) -> list[Figures]:
    """Images a second: one stream, one stream per core, and every run on all cores."""
    rows = []
    runtimes = [each for each in ("onnxruntime", "openvino") if f"{each}_int8" not in (*absent, *options.without)]
    cores = usable_cpus(allowed_affinity())
    for runtime in runtimes:
        for shape in options.shapes:
            for how, count in (("streams", 1), ("streams", cores), ("joined", cores)):
                words = ("streams", file_of(folder, "int8", shape), folder, options.budget_s, runtime, how, count)
                found = child(str(options.device_python), "tools.bench_engine_device", *words, one_thread=False)
                rows.append({"runtime": runtime, "shape": shape, "how": how, "cores": count, **(found or {})})
    return rows


def measure_device(folder: Path, options: argparse.Namespace, absent: dict[str, str]) -> list[Figures]:
    """What 500 pictures take on one core, reckoned from a few."""
    rows = []
    for runtime in ("onnxruntime", "openvino"):
        if f"{runtime}_int8" in (*absent, *options.without):
            continue
        words = ("device", file_of(folder, "int8", "dense"), folder, options.budget_s, runtime, options.pictures)
        found = child(str(options.device_python), "tools.bench_engine_device", *words)
        assert found is not None
        reckoned_s = found["ready_s"] + IMAGES_OF_A_SITE * found["image_s"]
        rows.append({"runtime": runtime, "reckoned_s_for_500": reckoned_s, **found})
    return rows


def shown(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)


def to_text(document: Figures) -> str:
    lines = [
        f"1 thread of {document['cpu']}{'' if document['vnni'] else ' (no VNNI)'}, {document['turns']} turns; "
        + ", ".join(f"{key} {value}" for key, value in document["versions"].items()),
        "random weights; ms of CPU time an image; ratio over onnxruntime float32 at the same batch",
    ]
    lines += [f"not measured: {side}: {reason}" for side, reason in document["absent"].items()]
    for model in document["models"]:
        lines += ["", *model_lines(model)]
    return "\n".join(lines)


def model_lines(model: Figures) -> list[str]:
    heads = ("batch", "ms", "ratio", "of peak", "int8", "MB", "dB")
    peaks = ", ".join(f"{key} {value:.0f}" for key, value in model["gemm_peak_gmacs"].items())
    lines = [
        f"{model['model']} split {model['split']}: {model['macs'] / 1e9:.2f} GMAC an image, {model['tokens']} tokens; "
        f"masked {model['kept_macs'] / 1e9:.2f} GMAC, {model['kept_tokens']} tokens",
        f"best product, GMAC/s: {peaks}",
        " " * 28 + "".join(f"{head:>9}" for head in heads),
    ]
    for row in model["rows"]:
        layers = "-" if row["int8_layers"] is None else f"{row['int8_layers']}"
        lines.append(
            f"{row['side']:<20}{row['shape']:<8}{row['batch']:>9}{row['image_ms']:>9.1f}{shown(row['ratio'], '.2f'):>9}"
            f"{shown(row['share_of_peak'], '.0%'):>9}{layers:>9}{shown(row['peak_mb'], '.0f'):>9}"
            f"{'-' if row['snr_db'] is None else format(row['snr_db'], '.1f'):>9}"
        )
    for row in model["streams"]:
        how = f"{row['cores']} streams" if row["how"] == "streams" else f"each run on {row['cores']}"
        memory = shown(row["peak_bytes"] and row["peak_bytes"] / 1e6, ".0f")
        lines.append(
            f"{row['runtime']} int8 {row['shape']}, {how}: {row['images_per_s']:.2f} images/s with "
            f"{row['cores_busy']:.2f} cores, {1e3 * row['image_s']:.0f} ms of CPU time an image, {memory} MB"
        )
    for row in model["device"]:
        memory = shown(row["peak_bytes"] and row["peak_bytes"] / 1e6, ".0f")
        lines.append(
            f"{row['runtime']} int8, 500 pictures from JPEG to tokens on one core: {row['reckoned_s_for_500']:.0f} s, "
            f"reckoned from {row['images']}; {memory} MB at most"
        )
    return lines


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "an unknown CPU"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "an unknown CPU")


def main() -> int:
    options = parse(sys.argv[1:])
    absent = absent_sides(options)
    for side, reason in absent.items():
        say(f"{side} is left out: {reason}")
    models = []
    for name in options.model:
        if options.work is None:
            with tempfile.TemporaryDirectory(prefix="cutlayer-bench-") as folder:
                models.append(measure(name, Path(folder), options, absent))
        else:
            folder = open_output(options.work) / name
            folder.mkdir(exist_ok=True)
            models.append(measure(name, folder, options, absent))
    document: Figures = {
        "cpu": cpu_name(), "vnni": has_vnni(), "cores": usable_cpus(allowed_affinity()), "threads": 1,
        "turns": options.turns, "weights": "random", "absent": absent,
        "versions": {key: value for model in models for key, value in model.pop("version").items()}, "models": models,
    }  # fmt: skip
    if options.format == "json":
        print_document("bench-engine", document)
    else:
        print(to_text(document))
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog="tools/bench_engine", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", action="append", choices=(*MODELS, QUICK), help="repeatable; default: both ViTs")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES, help="masked: a quarter of the patches")
    parser.add_argument("--batches", nargs="+", type=int, choices=BATCHES, default=BATCHES, help="images a call")
    parser.add_argument("--without", action="append", choices=SIDES, default=[], help="leave a side out (repeatable)")
    parser.add_argument("--turns", type=int, default=3, help="processes of each side (default %(default)s)")
    parser.add_argument(
        "--budget-s", type=float, default=3.0, help="seconds of runs for a figure, one at least (default %(default)s)"
    )
    parser.add_argument("--pictures", type=int, default=8, help="pictures from JPEG to tokens (default %(default)s)")
    parser.add_argument("--work", type=Path, help="keep the packages here, and use those that are here")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one turn: does it work at all?")
    parser.add_argument(
        "--device-python", type=Path, default=Path(sys.executable), help="interpreter of the device (default: this)"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default %(default)s")
    options = parser.parse_args(argv)
    for name in ("turns", "pictures"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} {getattr(options, name)} is too few", "give at least 1")
    if options.quick:
        options.model, options.turns, options.budget_s, options.pictures = [QUICK], 1, 0.0, 2
    options.model = options.model or list(MODELS)
    return options


if __name__ == "__main__":
    sys.exit(run_command(main))
