"""A TensorRT engine for a frontend: the plan that is known to fit, or new ones, gated, measured and one of them kept.

The frontend is built twice from the same scales, once with float16 and once with float32 between its INT8 layers
(TensorRT 11 goes by the types in the network). Each is held against onnxruntime on the package's golden pictures, which
onnxruntime itself passed when the package was installed; of those near enough the faster one serves (EN-04). How a plan
is built is `build`'s part, how it is known again `store`'s.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from contract.errors import EngineError
from edge_runtime.engines._cuda import load_driver, read_gpu
from edge_runtime.engines.tensorrt import PlanRefusedError, TensorRtEngine, load_library, open_model
from edge_runtime.install import LIMITS_OF_INSTALL, signal_to_noise_db
from edge_runtime.plans.build import build_plan
from edge_runtime.plans.child import Outcome, Request
from edge_runtime.plans.store import PlanKey, PlanRecord, PlanStore, Tried, sha256_of

TYPES = ("float16", "float32")
BATCH_USUAL, BATCH_MOST = 4, 8  # images at once: more need more memory than they save time
MEASURED_RUNS, MEASURED_S, WARM_RUNS = 20, 3.0, 3

Floats = NDArray[np.float32]
Say = Callable[[str], None]
Build = Callable[[Request, Callable[[], None], Say], Outcome]


@dataclass(frozen=True)
class Frontend:
    """What a plan is built of and judged by.

    `reference` gives onnxruntime's tokens of `images`, and is called only where a plan has to be judged.
    """

    onnx: Path
    patches: int  # N, where it takes a choice of patches
    images: Floats  # (n, 3, h, w), normalised: the package's golden pictures
    reference: Callable[[], Floats]


def open_planned(
    frontend: Frontend, store: PlanStore, check: Callable[[], None], say: Say, build: Build = build_plan
) -> tuple[TensorRtEngine, PlanRecord]:
    """The engine, and what was measured of every plan that was tried.

    Raises: EngineError where TensorRT, pycuda, GPU or memory is missing or no plan is near enough; what `check` raises.
    """
    library = load_library()
    gpu = read_gpu(load_driver())
    key = PlanKey(
        sha256_of(frontend.onnx), library.__name__, str(library.__version__), gpu.name, gpu.capability, gpu.processors,
        gpu.driver, BATCH_MOST, frontend.patches,
    )  # fmt: skip
    record = store.find(key, say)
    if record is not None and record.types is not None:
        try:
            return open_model(store.plan, 1), record
        except PlanRefusedError as error:
            say(f"the TensorRT plan is built again: {error.cause}")
            record = None
    record = record or make(frontend, store, key, check, say, build)
    if record.types is None:
        raise EngineError(
            "; ".join(str(each.refused) for each in record.tried),
            "use another version of TensorRT, or --engine DIR/front.onnx",
        )
    return open_model(store.plan, 1), record


def make(
    frontend: Frontend, store: PlanStore, key: PlanKey, check: Callable[[], None], say: Say, build: Build
) -> PlanRecord:
    """Build, judge and measure each serialisation, and keep the best. Raises: as `open_planned`."""
    expected = frontend.reference()
    tried: list[Tried] = []
    failed: EngineError | None = None
    try:
        for types in TYPES:
            say(f"building the {types} plan for {key.gpu} with {key.library} {key.version}; this may take minutes")
            request = Request(
                str(frontend.onnx), str(store.draft(types)), types, BATCH_USUAL, BATCH_MOST, frontend.patches, 0.0, 0,
                False, str(store.timing_cache), None,
            )  # fmt: skip
            try:
                outcome = build(request, check, say)
                tried.append(judge(types, request, outcome.seconds, outcome.workspace_bytes, frontend.images, expected))
            except EngineError as error:  # the other serialisation may need less, or do without a missing kernel
                failed = error
                say(f"no {types} plan: {error.cause}")
                continue
            say(in_words(tried[-1]))
            check()
        serving = [each for each in tried if each.refused is None]
        if failed is not None and not serving:
            raise failed
        chosen = min(serving, key=lambda each: each.median_ms or math.inf, default=None)
        return store.keep(key, chosen, tuple(tried))
    finally:
        store.drop_drafts()


def judge(
    types: str, request: Request, build_s: float, workspace_bytes: int, images: Floats, expected: Floats
) -> Tried:
    """Open a plan that was just built, compare it with onnxruntime, and time it. Raises: EngineError."""
    engine = open_model(Path(request.plan), 1)
    try:
        found = engine.run(images)
        snr_db = signal_to_noise_db(expected, found)
        refused = None
        if not snr_db >= LIMITS_OF_INSTALL.golden_snr_db:
            seen = "values that are not finite" if not np.isfinite(found).all() else f"{snr_db:.1f} dB"
            refused = (
                f"the {types} plan should be within {LIMITS_OF_INSTALL.golden_snr_db:g} dB of onnxruntime on the "
                f"golden pictures, found {seen}"
            )
        times_ms = [] if refused else measure(engine, images)
    finally:
        engine.close()
    return Tried(
        types, snr_db if math.isfinite(snr_db) else None, refused,
        statistics.median(times_ms) if times_ms else None, min(times_ms, default=None), max(times_ms, default=None),
        len(times_ms), build_s, Path(request.plan).stat().st_size, workspace_bytes,
    )  # fmt: skip


def measure(engine: TensorRtEngine, images: Floats) -> list[float]:
    """Milliseconds for an image at the largest batch, of each run; copies to and from the GPU are in it."""
    batch = images[np.arange(engine.threads) % len(images)]
    for _ in range(WARM_RUNS):
        engine.run(batch)
    times_ms: list[float] = []
    ends_s = time.perf_counter() + MEASURED_S
    while len(times_ms) < MEASURED_RUNS and (not times_ms or time.perf_counter() < ends_s):
        before_s = time.perf_counter()
        engine.run(batch)
        times_ms.append(1e3 * (time.perf_counter() - before_s) / len(batch))
    return times_ms


def in_words(tried: Tried) -> str:
    """What a plan is like, in a line."""
    if tried.refused is not None:
        return tried.refused
    near = "equal to onnxruntime" if tried.snr_db is None else f"{tried.snr_db:.1f} dB from onnxruntime"
    return (
        f"{tried.types} plan: built in {tried.build_s:.0f} s, {tried.plan_bytes / 1e6:.0f} MB, {near}, "
        f"{tried.median_ms:.3g} ms an image ({tried.fastest_ms:.3g} to {tried.slowest_ms:.3g}, {tried.runs} runs)"
    )
