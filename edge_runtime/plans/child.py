"""The process that builds one plan: `python -m edge_runtime.plans.child REQUEST`, with the request as JSON.

It may be killed at any time, by the system for its memory or by its parent, and nothing but it suffers. On stdout it
tells, one line of JSON each, how far it is and at last what it built; on stderr what TensorRT calls errors. Which
attempt comes next, and what a failure means, is left to `build`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from contract.canonical import decode, encode, from_json
from contract.errors import CutlayerError
from edge_runtime.engines._cuda import load_driver
from edge_runtime.engines._streams import IMAGES, KEEP
from edge_runtime.engines.tensorrt import load_library
from edge_runtime.plans.half import to_half
from edge_runtime.plans.progress import Phases

REQUEST_BYTES = 1 << 16
PR_SET_PDEATHSIG = 1  # Linux: a signal when the parent is gone


@dataclass(frozen=True)
class Request:
    """What is to be built, and what it may use."""

    onnx: str
    plan: str  # where the plan goes; its place is the parent's, and so is renaming it
    types: str  # float16 or float32: of all that is not int8
    batch_usual: int
    batch_most: int
    patches: int  # N, for a frontend that takes a choice of patches
    workspace_share: float  # of the memory that is free when the build begins
    level: int  # TensorRT's optimisation level, 0 to 5
    few_tactics: bool
    timing_cache: str | None
    capability: str | None  # as in SM86, for a build without a GPU (tensorrt_rtx alone); None: the GPU that is here


@dataclass(frozen=True)
class Outcome:
    """What was built."""

    library: str
    version: str
    seconds: float
    plan_bytes: int
    layers: dict[str, int]  # of the network, by the type of what they give
    free_bytes: int
    workspace_bytes: int
    peak_bytes: int | None  # most memory that this process held


def main() -> int:
    """Entry point. Exit code 0; 5 with the reason on stderr when TensorRT refuses."""
    die_with_parent()
    request = decode(Request, from_json(sys.argv[1].encode(), REQUEST_BYTES))
    try:
        outcome = build(request)
    except CutlayerError as error:
        print(error.cause, file=sys.stderr)
        return error.exit_code
    except MemoryError:
        print("out of memory", file=sys.stderr)
        return 5
    tell({"done": encode(outcome)})
    return 0


def die_with_parent() -> None:
    """A build that nobody waits for must not go on for minutes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def tell(event: dict[str, Any]) -> None:
    """One event for the parent."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def build(request: Request) -> Outcome:
    """Parse, type, build and write. Raises: CutlayerError; SystemExit with TensorRT's own words on stderr."""
    started_s = time.monotonic()
    library = load_library()
    free_bytes = free_memory(None if request.capability else load_driver())
    workspace_bytes = int(free_bytes * request.workspace_share)
    tell({"free_bytes": free_bytes, "workspace_bytes": workspace_bytes})
    log = library.Logger(library.Logger.ERROR)  # on stderr
    builder = library.Builder(log)
    network = parse(library, builder, log, request)
    kept = to_half(library, network) if request.types == "float16" else []
    layers = types_of_layers(network)
    config = configure(library, builder, network, request, workspace_bytes)
    plan = builder.build_serialized_network(network, config)
    del kept  # it lived as long as the network needed it
    if plan is None:
        sys.exit(5)
    write(Path(request.plan), memoryview(plan))
    keep_timings(config, request)
    return Outcome(
        library.__name__, str(library.__version__), time.monotonic() - started_s, int(plan.nbytes), layers, free_bytes,
        workspace_bytes, peak_bytes(),
    )  # fmt: skip


def parse(library: Any, builder: Any, log: Any, request: Request) -> Any:
    """The network of the ONNX file, strongly typed. Exits with the parser's words on stderr."""
    network = builder.create_network(1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = library.OnnxParser(network, log)
    if not parser.parse_from_file(request.onnx):
        for number in range(parser.num_errors):
            print(parser.get_error(number), file=sys.stderr)
        sys.exit(5)
    return network


def configure(library: Any, builder: Any, network: Any, request: Request, workspace_bytes: int) -> Any:
    """Limits, sizes and what to tell of the build."""
    config = builder.create_builder_config()
    config.set_memory_pool_limit(library.MemoryPoolType.WORKSPACE, workspace_bytes)
    config.builder_optimization_level = request.level
    config.profiling_verbosity = library.ProfilingVerbosity.DETAILED  # for the count of layers by type
    config.clear_flag(library.BuilderFlag.TF32)  # float32 means float32: products of 10 bits are float16's business
    if hasattr(config, "progress_monitor"):
        config.progress_monitor = make_monitor(library)
    if request.few_tactics:
        config.set_tactic_sources(0)
    if request.capability and hasattr(library, "ComputeCapability"):
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(library.ComputeCapability, request.capability), 0)
    elif request.timing_cache and hasattr(config, "create_timing_cache"):
        cache = Path(request.timing_cache)
        stored = config.create_timing_cache(cache.read_bytes() if cache.is_file() else b"")
        config.set_timing_cache(stored, ignore_mismatch=False)
    config.add_optimization_profile(profile_of(builder, network, request))
    return config


def profile_of(builder: Any, network: Any, request: Request) -> Any:
    """One image to `batch_most`, and one patch to all of them where they can be chosen."""
    profile = builder.create_optimization_profile()
    batches = (1, request.batch_usual, request.batch_most)
    for number in range(network.num_inputs):
        tensor = network.get_input(number)
        if tensor.name == IMAGES:
            size = tuple(tensor.shape)[1:]
            profile.set_shape(IMAGES, *((batch, *size) for batch in batches))
        elif tensor.name == KEEP:
            kept = (1, max(1, request.patches // 2), request.patches)
            profile.set_shape(KEEP, *zip(batches, kept, strict=True))
    return profile


def make_monitor(library: Any) -> Any:
    """Tells the parent of every per cent."""

    class Monitor(library.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._phases, self._told = Phases(), -1

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            self._phases.start(name, parent, steps)

        def step_complete(self, name: str, number: int) -> bool:
            self._phases.step(name, number)
            percent = int(100 * self._phases.fraction)
            if percent > self._told:
                self._told = percent
                tell({"fraction": percent / 100})
            return True

        def phase_finish(self, name: str) -> None:
            self._phases.finish(name)

    return Monitor()


def types_of_layers(network: Any) -> dict[str, int]:
    """How many layers give which type: what was asked for, while kernels are the builder's choice."""
    counted: dict[str, int] = {}
    for number in range(network.num_layers):
        layer = network.get_layer(number)
        if layer.num_outputs and layer.type.name not in ("CONSTANT", "SHAPE"):
            name = layer.get_output(0).dtype.name.casefold()
            counted[name] = counted.get(name, 0) + 1
    return dict(sorted(counted.items()))


def free_memory(driver: Any) -> int:
    """Bytes that are free on the GPU, and where it shares the machine's memory, there."""
    available = int(psutil.virtual_memory().available)
    if driver is None:
        return available
    device = driver.Device(0)
    context = device.retain_primary_context()
    context.push()
    try:
        free = int(driver.mem_get_info()[0])
    finally:
        context.pop()
    shares = bool(device.get_attribute(driver.device_attribute.INTEGRATED))
    return min(free, available) if shares else free


def write(path: Path, plan: memoryview) -> None:
    """The plan, for this user's eyes alone (it holds the noised weights), and on the disk before it is told of."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(plan)
        stream.flush()
        os.fsync(stream.fileno())


def keep_timings(config: Any, request: Request) -> None:
    """What was timed, for the next build here; losing it costs time alone."""
    if request.timing_cache is None or request.capability or not hasattr(config, "get_timing_cache"):
        return
    timed = config.get_timing_cache()
    if timed is not None:
        path = Path(request.timing_cache)
        draft = path.with_name(path.name + ".partial")
        write(draft, memoryview(timed.serialize()))
        os.replace(draft, path)


def peak_bytes() -> int | None:
    """The most memory that this process held; None where the system does not tell. (ru_maxrss tells the parent's.)"""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)


if __name__ == "__main__":
    sys.exit(main())
