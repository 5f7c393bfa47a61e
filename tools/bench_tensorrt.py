"""Builds TensorRT plans on this machine's GPU, compares them with onnxruntime and times them; first the memory layer.

PLACE is a package folder, whose golden pictures are run, or an ONNX file of a frontend, which gets drawn ones. For each
the float32-typed and the float16-typed plan are built, each in a child process as a device builds them. With --stand-in
torch runs the ONNX file in TensorRT's place, in the engine's own buffers and stream: dB then say that copies, order and
casts are right, and times nothing about TensorRT.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from contract.canonical import encode, to_json
from contract.console import ArgumentParser, print_document, run_command, say
from contract.errors import EngineError, UsageError
from contract.images import normalise
from contract.manifest import MANIFEST_NAME, from_bytes
from edge_runtime.engines import open_engine
from edge_runtime.engines._cuda import load_driver, read_gpu
from edge_runtime.engines.tensorrt import load_library, open_model
from edge_runtime.install import GOLDEN_NAME, read_golden, signal_to_noise_db
from edge_runtime.plans.build import build_plan
from edge_runtime.plans.child import Request
from edge_runtime.plans.choose import BATCH_MOST, BATCH_USUAL, TYPES, Frontend, open_planned
from edge_runtime.plans.store import PlanStore
from tools.bench_tensorrt_memory import exercise_memory

DRAWN = 8
STAND_IN = Path(__file__).with_name("standin")
Figures = dict[str, Any]


def find(place: Path) -> tuple[Path, np.ndarray]:
    """The ONNX file of a place, and normalised images (n, 3, h, w) for it. Raises: UsageError."""
    if (place / MANIFEST_NAME).is_file():
        manifest = from_bytes((place / MANIFEST_NAME).read_bytes())
        cut = manifest.cuts[0]
        pixels, _ = read_golden(place / GOLDEN_NAME, manifest, cut)
        return place / cut.onnx, normalise(pixels, manifest.image)
    if place.suffix != ".onnx" or not place.is_file():
        raise UsageError(f"{place} is neither a package folder nor an .onnx file", "correct the place")
    import onnxruntime

    shape = onnxruntime.InferenceSession(str(place)).get_inputs()[0].shape
    return place, np.random.default_rng(0).standard_normal((DRAWN, *shape[1:])).astype(np.float32)


def request_of(onnx: Path, plan: Path, types: str) -> Request:
    return Request(str(onnx), str(plan), types, BATCH_USUAL, BATCH_MOST, 1, 0.0, 0, False, None, None)


def times_of(run: Any, images: np.ndarray, batch: int, seconds: float) -> Figures:
    """Milliseconds a batch, copies included, of as many runs as fit."""
    taken = images[np.arange(batch) % len(images)]
    for _ in range(3):
        run(taken)
    times_ms: list[float] = []
    ends_s = time.perf_counter() + seconds
    while not times_ms or time.perf_counter() < ends_s:
        before_s = time.perf_counter()
        run(taken)
        times_ms.append(1e3 * (time.perf_counter() - before_s))
    low, high = np.percentile(times_ms, [5, 95])
    return {
        "batch": batch,
        "median_ms": statistics.median(times_ms),
        "p5_ms": float(low),
        "p95_ms": float(high),
        "runs": len(times_ms),
    }


def measure(place: Path, batches: list[int], seconds: float, folder: Path) -> Figures:
    """Both plans of one frontend beside onnxruntime on one thread of the CPU."""
    onnx, images = find(place)
    runtime = open_engine("onnxruntime", onnx, 1)
    expected = runtime.run(images)
    cpu_times = [times_of(runtime.run, images, 1, seconds)]
    sides: list[Figures] = [{"engine": "onnxruntime, 1 CPU thread", "times": cpu_times}]
    for types in TYPES:
        request = request_of(onnx, folder / f"{types}.plan", types)
        side: Figures = {"engine": f"tensorrt {types}"}
        try:
            outcome = build_plan(request, lambda: None, say)
            side |= {"build_s": outcome.seconds, "plan_bytes": outcome.plan_bytes, "network": outcome.layers}
            side |= {"build_peak_bytes": outcome.peak_bytes, "workspace_bytes": outcome.workspace_bytes}
            engine = open_model(Path(request.plan), 1)
        except EngineError as error:
            sides.append(side | {"failed": error.cause})
            continue
        try:
            found = engine.run(images)
            finite = bool(np.isfinite(found).all())
            snr_db = signal_to_noise_db(expected, found)
            side |= {"snr_db": snr_db if np.isfinite(snr_db) else None, "finite": finite}
            side |= {"version": engine.version, "layers": engine.layers.by_type if engine.layers else None}
            side["times"] = [times_of(engine.run, images, batch, seconds) for batch in batches]
        finally:
            engine.close()
        sides.append(side)
    return {"place": place.name, "image": list(images.shape[1:]), "sides": sides}


def kill_in_build(place: Path, folder: Path) -> Figures:
    """Kill a build at its first word; then a start must find no plan, and build one."""
    onnx, images = find(place)
    folder.mkdir()
    store = PlanStore(folder, lambda data: "bench")
    request = request_of(onnx, store.draft("float16"), "float16")
    words = [sys.executable, "-m", "edge_runtime.plans.child", to_json(encode(request)).decode()]
    child = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    child.stdout.close()
    code = child.wait()
    before = sorted(path.name for path in folder.iterdir())
    said: list[str] = []
    frontend = Frontend(onnx, 1, images, lambda: open_engine("onnxruntime", onnx, 1).run(images))
    for _ in range(2):
        engine, record = open_planned(frontend, store, lambda: None, said.append)
        engine.close()
    return {
        "killed_with": code, "left_by_the_killed": before, "plan_served": record.types, "said": said,
        "left_at_the_end": sorted(path.name for path in folder.iterdir()),
    }  # fmt: skip


def bench(options: argparse.Namespace) -> int:
    """The command behind its command line. Raises: UsageError; EngineError without a GPU, pycuda or TensorRT."""
    if options.stand_in:
        sys.path.insert(0, str(STAND_IN))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(STAND_IN), os.environ.get("PYTHONPATH"))))
    gpu, library = read_gpu(load_driver()), load_library()
    document: Figures = {"gpu": vars(gpu), "library": library.__name__, "version": str(library.__version__)}
    say(f"{gpu.words}, driver {gpu.driver}, {library.__name__} {library.__version__}")
    document["memory"] = exercise_memory(options.memory_mib)
    say(f"memory layer: {document['memory']}")
    with tempfile.TemporaryDirectory() as folder:
        if options.places:
            document["killed_build"] = kill_in_build(options.places[0], Path(folder) / "killed")
            say(f"killed build: {document['killed_build']}")
        document["frontends"] = []
        for place in options.places:
            document["frontends"].append(measure(place, options.batches, options.seconds, Path(folder)))
            for line in in_words(document["frontends"][-1]):
                say(line)
    print_document("bench-tensorrt", document)
    return 0


def in_words(found: Figures) -> list[str]:
    lines = [f"{found['place']} {found['image']}"]
    for side in found["sides"]:
        if "failed" in side:
            lines.append(f"  {side['engine']}: {side['failed']}")
            continue
        near = "" if "snr_db" not in side else f"{side['snr_db'] or float('inf'):.1f} dB, "
        built = "" if "build_s" not in side else f"built in {side['build_s']:.1f} s, {side['plan_bytes']} bytes, "
        shown = ", ".join(f"batch {each['batch']} {each['median_ms']:.3f} ms" for each in side["times"])
        lines.append(f"  {side['engine']}: {built}{near}{shown}, layers {side.get('layers')}")
    return lines


def main() -> int:
    commands = ArgumentParser("bench_tensorrt", __doc__)
    commands.add_argument("places", type=Path, nargs="*", metavar="PLACE", help="package folders or ONNX files")
    commands.add_argument("--stand-in", action="store_true", help="torch in TensorRT's place, where it does not run")
    commands.add_argument(
        "--batches", type=lambda text: [int(each) for each in text.split(",")], default=[1, 4, 8], metavar="N,N,..."
    )
    commands.add_argument("--memory-mib", type=int, default=64, help="largest buffer of the memory checks")
    commands.add_argument("--seconds", type=float, default=0.5, help="of timing for each batch size (default: 0.5)")
    return run_command(lambda: bench(commands.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
