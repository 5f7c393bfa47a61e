"""Does memory grow? Real devices and a real server train over TLS for hours, and what each process holds is sampled.

Sequential split learning of the tests' small package, without a pause: every step is a forward pass, an exchange and a
backward pass. One sample of every process each few seconds goes into `samples.jsonl`, line by line, so that a killed
measurement loses nothing: `--read` reports on what is there, also while the measurement goes on.

    first           kB of the first sample after the first epoch, when everything is loaded
    second quarter  median kB of that quarter of the time; last quarter likewise
    slope           kB an hour over the last three quarters, fitted to the means of equal blocks of time: samples that
                    follow each other are not independent, block means nearly are, and the standard error is theirs

RSS counts pages that processes share (libraries) in each; PSS, where the system tells it, shares them out.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from contract.console import ArgumentParser, print_document, run_command, say
from contract.errors import DeviceError, TrainingError, UsageError, why
from contract.output import open_output
from server_runtime.report import Table, to_text
from tests.make_package import DEVICES
from tests.over_loopback.deployment import Deployment, stop

SAMPLES = "samples.jsonl"
EPOCHS = 1_000_000  # the most that server-run takes; hours do not reach it
BATCH, RATE = 3, 0.001
START_S = 120.0
BLOCKS = 12
STOPPED = 143  # exit code, as a shell tells it
KINDS = ("rss_kb", "pss_kb")


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))  # so that no program is left behind
    options = parse(sys.argv[1:])
    if options.read is None:
        path = open_output(options.output) / SAMPLES
        measure(path, options.package, options.minutes * 60.0, options.every_s)
    else:
        path = options.read / SAMPLES
    document = summarise(read(path))
    if options.format == "json":
        print_document("bench-memory", document)
    else:
        print_table(document)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser("tools/bench_memory", "Sample the memory of devices and server that train for hours.")
    parser.add_argument("--minutes", type=float, default=120.0, metavar="N", help="default: %(default)g")
    parser.add_argument("--every-s", type=float, default=10.0, metavar="N", help="between samples (default: 10)")
    parser.add_argument("--package", type=Path, metavar="DIR", help="of python -m tests.make_package; default: made")
    parser.add_argument("--read", type=Path, metavar="DIR", help="report on the samples in DIR, and measure nothing")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    default = Path(tempfile.gettempdir()) / "cutlayer-bench-memory"
    parser.add_argument("-o", "--output", type=Path, default=default, help="folder to work in (default: %(default)s)")
    options = parser.parse_args(argv)
    if not (0 < options.minutes < math.inf and 0 < options.every_s < math.inf):  # NaN is neither
        raise UsageError("a duration must be more than 0, and have an end", "correct --minutes or --every-s")
    return options


# -- measuring


def measure(path: Path, package: Path | None, seconds: float, every_s: float) -> None:
    """Train for so long, and write samples into `path`.

    Raises: DeviceError or TrainingError when a command ends by itself.
    """
    root = path.parent / "measured"  # of our own: what else is called runs or state there is not ours to delete
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    if package is None:
        package = path.parent / "package"
        if not package.exists():
            subprocess.run([sys.executable, "-m", "tests.make_package", str(package)], check=True)
    deployment = Deployment(package, root, front="parts")
    options = ("--run", "memory", "--seed", 1, "--epochs", EPOCHS, "--batch", BATCH, "--learning-rate", RATE)
    mode = ("--label-mode", "raw-label")
    with deployment.server(*mode, *options, strategy="sequential_split") as server, path.open("w") as samples:
        devices = {name: deployment.start_device(name, *mode) for name in DEVICES}
        try:
            wait_for_first_epoch(deployment, server)
            began_s = time.monotonic()
            while (passed_s := time.monotonic() - began_s) <= seconds:
                for name, process in devices.items():
                    if process.poll() is not None:
                        raise DeviceError(f"{name} ended with {process.returncode}", f"see {root / name}.log")
                if server.poll() is not None:
                    raise TrainingError(f"the server ended with {server.returncode}", f"see {root / 'server.log'}")
                line = {"s": round(passed_s, 1), "epochs": deployment.newest_epoch()}
                line["processes"] = sampled(server, devices)
                samples.write(json.dumps(line) + "\n")
                samples.flush()
                time.sleep(every_s - (time.monotonic() - began_s) % every_s)
        finally:
            for process in devices.values():
                stop(process)


def wait_for_first_epoch(deployment: Deployment, server: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + START_S
    while not deployment.newest_epoch():
        if time.monotonic() > deadline_s or server.poll() is not None:
            raise TrainingError(f"no epoch within {START_S:g} s", f"see the logs in {deployment.root}")
        time.sleep(0.1)


def sampled(server: subprocess.Popen[str], devices: dict[str, subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """Role, process id and kB of every process; children of the server are torch's, those of a device its helpers."""
    found = []
    for role, pid in (("server", server.pid), *((name, process.pid) for name, process in devices.items())):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            own = role if process.pid == pid else f"{role} child"
            found.append({"role": own, "pid": process.pid, **kilobytes(process.pid)})
    return found


def kilobytes(pid: int) -> dict[str, int | None]:
    """RSS, and PSS where the system tells it to this user."""
    rss = psutil.Process(pid).memory_info().rss // 1024
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return {"rss_kb": rss, "pss_kb": None}
    return {"rss_kb": rss, "pss_kb": next(int(line.split()[1]) for line in rollup.split("\n") if line[:4] == "Pss:")}


# -- reporting


def read(path: Path) -> list[dict[str, Any]]:
    """The samples; a last line that was not written to its end is left out.

    Raises: UsageError where the file is missing, or holds something else.
    """
    try:
        found = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if not all(isinstance(each, dict) and {"s", "epochs", "processes"} <= each.keys() for each in found):
            raise ValueError("its lines are no samples")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read: {why(error, path)}", "give --read a folder of a measurement"
        ) from error
    return found


def summarise(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """The document of the measurement."""
    if not samples:
        raise UsageError("there is no sample yet", "wait for the first one")
    hours = samples[-1]["s"] / 3600
    rows = [
        {"role": role, "processes": len(pids), "kind": kind, **figures(list(series(samples, role, kind)))}
        for role, pids in sorted(roles(samples).items())
        for kind in KINDS
    ]
    first, last = samples[0]["epochs"], samples[-1]["epochs"]
    return {"hours": round(hours, 3), "samples": len(samples), "epochs": last - first, "memory": rows}


def roles(samples: list[dict[str, Any]]) -> dict[str, set[int]]:
    """Role -> the ids that its process had: more than one where it was started again."""
    found: dict[str, set[int]] = {}
    for sample in samples:
        for process in sample["processes"]:
            found.setdefault(process["role"], set()).add(process["pid"])
    return found


def series(samples: list[dict[str, Any]], role: str, kind: str) -> Iterator[tuple[float, int]]:
    """(seconds, kB) of each sample in which that is known."""
    for sample in samples:
        known = [each[kind] for each in sample["processes"] if each["role"] == role and each[kind] is not None]
        if known:
            yield sample["s"], sum(known)


def figures(points: list[tuple[float, int]]) -> dict[str, float | None]:
    """What the head of this file says, of (seconds, kB); None where there are too few."""
    if not points:
        names = ("first", "second_quarter", "last_quarter", "most", "slope_kb_per_h", "slope_error_kb_per_h")
        return dict.fromkeys(names)
    end_s = points[-1][0]
    quarters = [[kb for s, kb in points if n * end_s / 4 <= s <= (n + 1) * end_s / 4] for n in range(4)]
    slope, error = fit([(s / 3600, kb) for s, kb in points if s >= end_s / 4])
    return {
        "first": points[0][1],
        "second_quarter": statistics.median(quarters[1]) if quarters[1] else None,
        "last_quarter": statistics.median(quarters[3]) if quarters[3] else None,
        "most": max(kb for _, kb in points),
        "slope_kb_per_h": slope,
        "slope_error_kb_per_h": error,
    }


def fit(points: list[tuple[float, int]]) -> tuple[float | None, float | None]:
    """Slope of a straight line through the block means of (x, y), and its standard error; None with too few points."""
    if len(points) < BLOCKS:
        return None, None
    blocks = np.array([np.mean(block, axis=0) for block in np.array_split(np.array(points, float), BLOCKS)])
    x, y = blocks[:, 0] - blocks[:, 0].mean(), blocks[:, 1] - blocks[:, 1].mean()
    slope = float((x * y).sum() / (x * x).sum())
    residual = float(((y - slope * x) ** 2).sum()) / (BLOCKS - 2)
    return round(slope, 1), round((residual / float((x * x).sum())) ** 0.5, 1)


def print_table(document: dict[str, Any]) -> None:
    """For a person on a terminal."""
    names = ("role", "kind", "first", "second_quarter", "last_quarter", "most")
    rows = []
    for row in document["memory"]:
        slope, error = row["slope_kb_per_h"], row["slope_error_kb_per_h"]
        said = "unknown" if slope is None else f"{slope:+.1f} ± {error:.1f}"
        rows.append((*("unknown" if row[name] is None else str(row[name]) for name in names), said))
    title = f"kB over {document['hours']:g} h, {document['epochs']} epochs, {document['samples']} samples"
    print(to_text(Table(title, (*names, "kB an hour"), tuple(rows))))
    again = [row["role"] for row in document["memory"] if row["processes"] > 1]
    if again:
        say(f"not one process all the time: {', '.join(sorted(set(again)))}")


if __name__ == "__main__":
    sys.exit(run_command(partial(main)))
