"""Compares what NVML says of a GPU in two ways: its energy counter, and its power added up over time.

A turn is a fixed load (matrix products by torch, so many seconds of them on the first GPU) with quiet before and after.
Its energy is read from the counter through the product's own meter (`edge_runtime.meters.nvml`), and by trapezoid from
power samples that are taken beside it, through the same integration; told are both, their difference, and how often
counter and power change while work goes on. Power is the board's instant one where it shows it, else the mean of the
last second. One board must be visible to torch and to NVML under the same number.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from contract.console import ArgumentParser, print_document, run_command
from contract.errors import DeviceError, UsageError
from edge_runtime.meters import PowerTrace, recording
from edge_runtime.meters._pieces import Timing
from edge_runtime.meters._sampled import SampledMeter, Sampling
from edge_runtime.meters.nvml import SAMPLING, NvmlSensor

SIZE = 8192  # rows and columns of the products
QUIET_S = 2.0  # before and after a load
WATCHED_S = 3.0  # for how often figures change
POLL_S = 0.001


class PowerReader:
    """What the board shows as its power now."""

    name, scope, quality = "nvml power", "1 GPU board", "measured"

    def __init__(self, read_w: Callable[[], float]) -> None:
        self.read_w = read_w


@dataclass(frozen=True)
class Turn:
    """One load: seconds, joules by the counter and by power with the bounds that the product prints, mean watts."""

    seconds: float
    counter_j: float | None
    counter_bound_j: float | None
    power_j: float | None
    power_bound_j: float | None

    @property
    def difference(self) -> float | None:
        """Of power against the counter, as a share of it."""
        if not self.counter_j or self.power_j is None:
            return None
        return self.power_j / self.counter_j - 1.0


def main() -> int:
    options = parse(sys.argv[1:])
    nvml, handle = open_board(options.board)
    counter = lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3  # noqa: E731 - joules
    power, timing = power_of(nvml, handle)
    load = Load(options.board)
    periods = {name: changes_s(read, load) for name, read in (("counter", counter), ("power", power))}
    turns = [
        turn(nvml, handle, PowerReader(power), timing, load, seconds)
        for seconds in options.seconds
        for _ in range(options.turns)
    ]
    report(options, str(nvml.nvmlDeviceGetName(handle)), timing.window_s, periods, turns)
    return 0


def parse(argv: list[str]) -> Any:
    parser = ArgumentParser(prog="tools/bench_nvml", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--board", type=int, default=0, metavar="N", help="the GPU (default: 0)")
    parser.add_argument("--seconds", type=float, nargs="+", default=[1.0, 5.0, 10.0], help="of the loads")
    parser.add_argument("--turns", type=int, default=3, help="of each load (default: 3)")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    options = parser.parse_args(argv)
    if options.board < 0 or options.turns < 1 or not all(0.1 <= each <= 3600.0 for each in options.seconds):
        raise UsageError("expected a board of 0 or more, 1 turn or more, and loads of 0.1 to 3600 s", "correct them")
    return options


def open_board(number: int) -> tuple[Any, Any]:
    """NVML and the board. Raises: DeviceError."""
    if not torch.cuda.is_available() or number >= torch.cuda.device_count():
        raise DeviceError(f"torch finds no GPU {number}", "run this on a machine with an NVIDIA GPU")
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception as error:  # a missing package, or NVML's own errors
        raise DeviceError(
            f"NVML cannot be read: {error}", "pip install cutlayer[nvml]; edge-doctor says more"
        ) from error
    return nvml, handle


class Load:
    """Products of matrices, one after the other."""

    def __init__(self, board: int) -> None:
        device = torch.device("cuda", board)
        generator = torch.Generator(device).manual_seed(0)
        self._left, self._right = (
            torch.randn(SIZE, SIZE, generator=generator, device=device).bfloat16() for _ in range(2)
        )
        self._device = device

    def run(self, seconds: float) -> tuple[float, float]:
        """Keep the GPU busy; when it began and ended, by the monotonic clock."""
        torch.cuda.synchronize(self._device)
        began_s = time.monotonic()
        while time.monotonic() - began_s < seconds:
            for _ in range(8):
                torch.matmul(self._left, self._right)
            torch.cuda.synchronize(self._device)
        return began_s, time.monotonic()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The GPU is busy for the time of the block."""
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                self.run(0.05)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def changes_s(read: Callable[[], float], load: Load) -> list[float]:
    """Seconds between changes of a figure while the GPU works."""
    changed_s = []
    with load.running():
        began_s, before = time.monotonic(), read()
        while (now_s := time.monotonic()) - began_s < WATCHED_S:
            value = read()
            if value != before:
                changed_s.append(now_s)
                before = value
            time.sleep(POLL_S)
    return [after - earlier for earlier, after in zip(changed_s, changed_s[1:], strict=False)]


def power_of(nvml: Any, handle: Any) -> tuple[Callable[[], float], Timing]:
    """How watts are read, and over which time they are a mean."""

    def instant_w() -> float:
        found = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_POWER_INSTANT])[0]
        if found.nvmlReturn:
            raise OSError(f"NVML answered {found.nvmlReturn}")
        return found.value.uiVal / 1e3

    try:
        instant_w()
    except Exception:  # an older driver or package, which knows no such field
        return lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3, Timing(window_s=1.0)
    return instant_w, Timing(window_s=0.1)


def turn(nvml: Any, handle: Any, reader: PowerReader, timing: Timing, load: Load, seconds: float) -> Turn:
    """One load, seen by both."""
    meters = [
        SampledMeter(NvmlSensor(nvml, [handle]), SAMPLING),
        SampledMeter(reader, Sampling(0.1, fine_interval_s=0.02, timing=timing)),
    ]
    with ExitStack() as stack:
        traces = [stack.enter_context(recording(meter)) for meter in meters]
        time.sleep(QUIET_S)
        began_s, ended_s = load.run(seconds)
        time.sleep(QUIET_S + max(meter.settle_s for meter in meters))
    found = [between(trace, began_s, ended_s) for trace in traces]
    return Turn(ended_s - began_s, *found[0], *found[1])


def between(trace: PowerTrace, began_s: float, ended_s: float) -> tuple[float | None, float | None]:
    window = trace.energy_between(began_s, ended_s)
    return window.energy_j, window.bound_j


def report(options: Any, board: str, window_s: float, periods: dict[str, list[float]], turns: list[Turn]) -> None:
    rows = [{**vars(each), "difference": each.difference} for each in turns]
    told = {name: {"changes": len(each), "median_s": statistics.median(each) if each else None,
                   "longest_s": max(each, default=None)} for name, each in periods.items()}  # fmt: skip
    if options.format == "json":
        print_document("bench-nvml", {"board": board, "power_window_s": window_s, "periods": told, "turns": rows})
        return
    print(f"{board}; power is a mean over {window_s:g} s")
    for name, each in told.items():
        if each["median_s"] is None:
            print(f"{name}: no two changes within {WATCHED_S:g} s")
        else:
            median_ms, longest_ms = 1e3 * each["median_s"], 1e3 * each["longest_s"]
            print(f"{name}: a change every {median_ms:.0f} ms (median), {longest_ms:.0f} at most")
    for each in turns:
        shown = [f"{value:.1f}" if value is not None else "unknown" for value in
                 (each.counter_j, each.counter_bound_j, each.power_j, each.power_bound_j)]  # fmt: skip
        share = "unknown" if each.difference is None else f"{100 * each.difference:+.2f} %"
        print(f"{each.seconds:.2f} s: counter {shown[0]} J +- {shown[1]}, power {shown[2]} J +- {shown[3]}: {share}")


if __name__ == "__main__":
    sys.exit(run_command(main))
