"""Measures what sampling a power sensor costs: CPU time, and how much slower an inference beside it gets.

The sensor is an INA3221 of a made-up file tree, as on a Jetson Orin Nano, so that reading it costs what system calls
and Python cost and nothing waits for a conversion. A stage is measured all the while, as in edge-run. A turn is three
blocks of inferences (onnxruntime, one thread): without the sampler, with it, without it. The one with it is compared
with the mean of its neighbours, and as a control the last with the first: what differs there is the machine's noise.
Told is the median of the turns with their middle half.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from contract.console import ArgumentParser, print_document, run_command, say
from contract.errors import UsageError
from edge_runtime.meters._sampled import SampledMeter
from edge_runtime.meters.ina import SAMPLING, InaSensor, find_rails
from edge_runtime.stages import Stages

AIM = 0.01  # of the time
WIDTH, ROWS, LAYERS = 512, 32, 4
RATES = {"default": SAMPLING.interval_s, "fine": SAMPLING.fine_interval_s or SAMPLING.interval_s}  # live, profile


@dataclass
class Sampler:
    """A meter that is sampled on a thread that can be stopped, and what that thread has used."""

    interval_s: float
    root: Path
    samples: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Sample for the time of the block, as edge-run does."""
        stop, started = threading.Event(), threading.Event()

        def sample(meter: SampledMeter) -> None:
            rng, began_s, began_cpu_s = random.Random(0), time.monotonic(), time.thread_time()
            started.set()
            while not stop.wait(meter.wait_s(rng)):
                meter.sample()
                self.samples += 1
            self.cpu_s += time.thread_time() - began_cpu_s
            self.wall_s += time.monotonic() - began_s

        threads: list[threading.Thread] = []

        def start(meter: SampledMeter) -> None:
            threads.append(threading.Thread(target=sample, args=(meter,)))
            threads[0].start()

        sampling = replace(SAMPLING, interval_s=self.interval_s, fine_interval_s=None)
        sensor = InaSensor({"VDD_IN": find_rails(self.root)["VDD_IN"]}, "module input")
        stages = Stages(SampledMeter(sensor, sampling, start=start), time.monotonic)
        started.wait()
        try:
            with stages.measure("inference"):
                yield
        finally:
            stop.set()
            threads[0].join()


def write_board(root: Path) -> None:
    """The files that a Jetson Orin Nano's input rail has."""
    device = root / "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon1"
    device.mkdir(parents=True)
    for name, text in (
        ("in1_label", "VDD_IN"),
        ("in1_input", "4984"),
        ("curr1_input", "1856"),
        ("update_interval", "7"),
    ):
        (device / name).write_text(text + "\n")


def open_model() -> onnxruntime.InferenceSession:
    """A few linear layers: some milliseconds of work that is bound by arithmetic, on one thread."""
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    weights = [(rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32) for _ in range(LAYERS)]
    initializers = [numpy_helper.from_array(each, f"w{number}") for number, each in enumerate(weights)]
    nodes = []
    for number in range(LAYERS):
        nodes.append(helper.make_node("MatMul", [f"x{number}", f"w{number}"], [f"y{number}"]))
        nodes.append(helper.make_node("Relu", [f"y{number}"], [f"x{number + 1}"]))
    shape = [ROWS, WIDTH]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x0", f"x{LAYERS}")]
    graph = helper.make_graph(nodes, "layers", ends[:1], ends[1:], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run_block(session: onnxruntime.InferenceSession, seconds: float) -> tuple[float, float]:
    """Mean wall and CPU time of one inference, over inferences for so long."""
    pictures = {"x0": np.ones((ROWS, WIDTH), np.float32)}
    count, began_s, began_cpu_s = 0, time.monotonic(), time.thread_time()
    while time.monotonic() - began_s < seconds:
        session.run(None, pictures)
        count += 1
    return (time.monotonic() - began_s) / count, (time.thread_time() - began_cpu_s) / count


def measure(
    session: onnxruntime.InferenceSession, interval_s: float, root: Path, turns: int, seconds: float
) -> dict[str, Any]:
    """The figures of one sampling interval."""
    sampler = Sampler(interval_s, root)
    changes: dict[str, list[float]] = {"wall": [], "cpu": [], "control_wall": [], "control_cpu": []}
    inference_s = []
    for _ in range(turns):
        before = run_block(session, seconds)
        with sampler.running():
            beside = run_block(session, seconds)
        after = run_block(session, seconds)
        for place, name in enumerate(("wall", "cpu")):
            changes[name].append(2.0 * beside[place] / (before[place] + after[place]) - 1.0)
            changes[f"control_{name}"].append(after[place] / before[place] - 1.0)
        inference_s.append(before[0])
    share = sampler.cpu_s / sampler.wall_s
    return {
        "interval_s": interval_s,
        "samples": sampler.samples,
        "cpu_per_sample_s": sampler.cpu_s / sampler.samples if sampler.samples else None,
        "cpu_share": share,
        "inference_s": statistics.median(inference_s),
        "inference_change": {name: spread(values) for name, values in changes.items()},
        "within_aim": share < AIM,
    }


def spread(values: list[float]) -> dict[str, float]:
    """The median and the middle half."""
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "lower": lower, "upper": upper}


def to_table(rows: dict[str, dict[str, Any]], seconds: float) -> str:
    lines = []
    for name, row in rows.items():
        change = row["inference_change"]
        sample = "none" if row["cpu_per_sample_s"] is None else f"{1e6 * row['cpu_per_sample_s']:.0f} us of CPU"
        lines += [
            f"{name}: a sample every {1e3 * row['interval_s']:.0f} ms",
            f"  sampler    {row['cpu_share']:.3%} of a CPU; one sample takes {sample}",
            f"  inference  {1e3 * row['inference_s']:.2f} ms without it",
            f"  with it    slower by {shown(change['wall'])} of wall time, {shown(change['cpu'])} of CPU time",
            f"  control    {shown(change['control_wall'])} of wall time, {shown(change['control_cpu'])} of CPU time",
        ]
    return "\n".join([*lines, f"blocks of {seconds:g} s; the aim is under {AIM:.0%} of a CPU"])


def shown(change: dict[str, float]) -> str:
    return f"{change['median']:+.2%} ({change['lower']:+.2%} to {change['upper']:+.2%})"


def main() -> int:
    parser = ArgumentParser(prog="tools/bench_sampler", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--turns", type=int, default=40, help="how often (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a block (default %(default)s)")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="form of the result")
    arguments = parser.parse_args()
    if arguments.turns < 1 or arguments.seconds <= 0.0:
        raise UsageError("--turns should be 1 or more and --seconds above 0", "correct them")
    session = open_model()
    run_block(session, arguments.seconds)  # to warm up
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_board(Path(folder))
        for name, interval_s in RATES.items():
            say(f"{name}: {arguments.turns} turns")
            rows[name] = measure(session, interval_s, Path(folder), arguments.turns, arguments.seconds)
    if arguments.format == "json":
        print_document("bench-sampler", {"aim": AIM, "seconds": arguments.seconds, "rows": rows})
    else:
        print(to_table(rows, arguments.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
