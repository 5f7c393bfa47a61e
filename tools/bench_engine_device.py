"""The device's side of tools/bench_engine: one engine in a process without torch.

    python -m tools.bench_engine_device VERB FILE FOLDER BUDGET_S WORDS...

    run RUNTIME BATCH,...    an int8 file in our engine, image by image; a float file in the bare runtime, whole batches
    gemm RUNTIME             the best of many runs of one product (M, K) x (K, N)
    streams RUNTIME HOW N    images a second on N cores: `streams` in our engine, `joined` one run on all of them
    device RUNTIME COUNT     COUNT pictures from JPEG to tokens on one core, as edge-run does it

FOLDER holds `batch.npz` of `bench_engine_parts`. One JSON object goes to stdout. Times are of this process's
CPUs unless they are called wall.
"""

from __future__ import annotations

import importlib
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from contract.images import normalise, resize
from contract.manifest import MANIFEST_NAME, from_bytes
from edge_runtime.data import load_image
from edge_runtime.engines import Engine, open_engine
from tools.bench_training_device import peak_bytes

RunBatch = Callable[[dict[str, np.ndarray]], np.ndarray]
MOST_RUNS = 30


def timed(run: Callable[[], object], budget_s: float) -> tuple[list[float], list[float]]:
    """CPU and wall seconds of each run after a first one, until the budget is spent."""
    run()
    cpu_s, wall_s = [], []
    began_s = time.perf_counter()
    while not cpu_s or (time.perf_counter() - began_s < budget_s and len(cpu_s) < MOST_RUNS):
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        run()
        cpu_s.append(time.process_time() - started_cpu_s)
        wall_s.append(time.perf_counter() - started_s)
    return cpu_s, wall_s


def bare_runtime(runtime: str, file: Path, threads: int) -> tuple[RunBatch, str]:
    """A runtime as anyone would use it on whole batches, and its version; joined threads in every run."""
    if runtime == "onnxruntime":
        import onnxruntime

        from edge_runtime.engines.onnxruntime import session_options

        options = session_options()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        return lambda feed: session.run(None, feed)[0], onnxruntime.__version__
    door = importlib.import_module("edge_runtime.engines.openvino")
    openvino = door.load_openvino()
    options = door.compile_options(1) | {"INFERENCE_NUM_THREADS": threads}
    request = openvino.Core().compile_model(str(file), "CPU", options).create_infer_request()

    def run(feed: dict[str, np.ndarray]) -> np.ndarray:
        request.infer(feed)
        return np.array(request.get_output_tensor(0).data)

    return run, str(openvino.__version__).split("-")[0]


def run_of(engine: Engine) -> RunBatch:
    return lambda feed: engine.run(feed["images"], feed.get("keep"))


def batch_of(folder: Path, file: Path, count: int) -> dict[str, np.ndarray]:
    """The first images, and the patches of each that are kept where the file takes a choice."""
    stored = np.load(folder / "batch.npz")
    names = ("images", "keep") if "masked" in file.parent.name else ("images",)
    return {name: stored[name][:count] for name in names}


def run(file: Path, folder: Path, budget_s: float, runtime: str, batches: str) -> dict[str, Any]:
    started_s = time.perf_counter()
    kernels = None
    if file.parent.name.startswith("int8"):
        engine = open_engine(runtime, file, 1)
        kernels = None if engine.kernels is None else engine.kernels.int8
        run_batch, version = run_of(engine), engine.version
    else:
        run_batch, version = bare_runtime(runtime, file, 1)
    load_s, peak = time.perf_counter() - started_s, None
    rows = {}
    for count in map(int, batches.split(",")):
        feed = batch_of(folder, file, count)
        cpu_s, wall_s = timed(lambda feed=feed: run_batch(feed), budget_s)
        peak = peak or peak_bytes()  # of the first batch size alone
        rows[str(count)] = {"image_s": statistics.median(cpu_s) / count, "wall_s": statistics.median(wall_s) / count}
    tokens = run_batch(batch_of(folder, file, 2)).astype(np.float64)
    np.save(folder / f"tokens-{runtime}-{file.parent.name}.npy", tokens)
    return {
        "version": version, "int8_layers": kernels, "load_s": load_s, "peak_bytes": peak, "batches": rows,
        "torch_imported": "torch" in sys.modules, "python": platform.python_version(),
    }  # fmt: skip


def gemm(file: Path, folder: Path, budget_s: float, runtime: str) -> dict[str, Any]:
    run_batch, version = bare_runtime(runtime, file, 1)
    shape = [int(size) for size in file.stem.split("-")[-1].split("x")]  # M, K, N
    rows = np.random.default_rng(0).uniform(-1, 1, (1, shape[0], shape[1])).astype(np.float32)
    cpu_s, _ = timed(lambda: run_batch({"rows": rows}), budget_s)
    return {"version": version, "gmacs": float(np.prod(shape)) / min(cpu_s) / 1e9}


def streams(file: Path, folder: Path, budget_s: float, runtime: str, how: str, cores: str) -> dict[str, Any]:
    count = int(cores)
    if how == "streams":
        run_batch = run_of(open_engine(runtime, file, count))
    else:
        joined, _ = bare_runtime(runtime, file, count)

        def run_batch(feed: dict[str, np.ndarray]) -> np.ndarray:
            singles = [{name: array[row : row + 1] for name, array in feed.items()} for row in range(2 * count)]
            return np.concatenate([joined(single) for single in singles])

    feed = batch_of(folder, file, 2 * count)
    cpu_s, wall_s = timed(lambda: run_batch(feed), budget_s)
    return {
        "images_per_s": 2 * count / statistics.median(wall_s),
        "image_s": statistics.median(cpu_s) / (2 * count),
        "cores_busy": sum(cpu_s) / sum(wall_s),  # less than there are where other programs take them
        "peak_bytes": peak_bytes(),
    }


def device(file: Path, folder: Path, budget_s: float, runtime: str, count: str) -> dict[str, Any]:
    started_s = time.process_time()
    manifest = from_bytes((file.parent / MANIFEST_NAME).read_bytes())
    engine = open_engine(runtime, file, 1)
    ready_s = time.process_time() - started_s
    picture = folder / "picture.jpg"
    spent_s = []
    for _ in range(int(count)):
        started_s = time.process_time()
        pixels = resize(load_image(picture, picture.name, manifest.image.max_pixels), manifest.image)
        engine.run(normalise(pixels[None], manifest.image)).astype(np.float16)
        spent_s.append(time.process_time() - started_s)
    return {"ready_s": ready_s, "image_s": statistics.median(spent_s), "images": int(count), "peak_bytes": peak_bytes()}


def main() -> None:
    verb, file, folder, budget_s, *words = sys.argv[1:]
    verbs: dict[str, Callable[..., dict[str, Any]]] = {"run": run, "gemm": gemm, "streams": streams, "device": device}
    print(json.dumps(verbs[verb](Path(file), Path(folder), float(budget_s), *words)))


if __name__ == "__main__":
    main()
