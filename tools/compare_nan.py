"""One of four devices sends NaN for what it trained: what comes of it here, on Flower and on NVFlare.

Federated averaging, three rounds, each system's own programs as processes over TLS. Here a tiny ViT is exported and
trained with `--strategy fed_avg`; on the others a vector of 1,000 weights, to which each client adds 1. Told is, after
each round, the share of the averaged weights that are not finite, and how the run ended.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from contract.console import ArgumentParser, print_document, run_command, say
from contract.errors import DeviceError
from tests.make_package import PRIVATE_CLASSES, PUBLIC_CLASSES, TRAINING, draw_folder
from tools import make_keys, peers
from tools.bench_wire_programs import stop

HERE = Path(__file__).parent
DEVICES = ("device-1", "device-2", "device-3", "device-4")
SPOILT = DEVICES[3]
ROUNDS, RUN_S, IMAGES = 3, 1200.0, 4
SITE = "site"

Outcome = dict[str, object]


def ours(root: Path) -> Outcome:
    """Export, serve, train; SPOILT is `compare_nan_device`. Raises: DeviceError when one of our programs fails."""
    with ExitStack() as stack:
        return run_ours(root, stack)


def run_ours(root: Path, stack: ExitStack) -> Outcome:
    """What is started is stopped by the stack, where it has not ended by itself."""
    keys, start = root / "keys", partial(start_program, root, stack)
    rng = np.random.default_rng(0)
    for device in DEVICES:
        make_keys.make_device(keys, SITE, device)
        for place, name in enumerate(PRIVATE_CLASSES):
            draw_folder(root / device / name, PUBLIC_CLASSES + place, IMAGES, rng)
    export = (*TRAINING["whole"], "--signing-key", keys / "publisher.key", "-o", root / "whole")
    finish(root, "export", start("export", "exporter.cli", *export))
    server = start(
        "server", "server_runtime.cli", "--strategy", "fed_avg", "--label-mode", "raw-label", "--epochs", ROUNDS,
        "--backend", root / "whole.backend", "--listen", "localhost:0", "--roster", keys / "roster",
        "--certificate", keys / "server.pem", "--certificate-key", keys / "server.key", "--runs", root / "runs",
        "--exit-when-done", "--threads", 1,
    )  # fmt: skip
    assert server.stdout is not None
    line = server.stdout.readline()
    if not line.startswith("listening on "):
        finish(root, "server", server)
    url = line.split()[-1]
    programs = {}
    for device in DEVICES:
        own = keys / "devices" / device
        module = "tools.compare_nan_device" if device == SPOILT else "edge_runtime.cli"
        programs[device] = start(
            device, module, "--engine", root / "whole", "--label-mode", "raw-label", "--data", root / device,
            "--server", url, "--name", device, "--state", root / "state" / device, "--trust", own / "publisher.pub",
            "--ca", own / "ca.pem", "--key", own / "device.key", "--site-secret", own / "site.secret", "--threads", 1,
        )  # fmt: skip
    for name, program in (programs | {"server": server}).items():
        finish(root, name, program)
    (metrics,) = root.glob("runs/*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    (folder,) = root.glob(f"runs/*/models/{SITE}")
    weights = load_file(folder / "backend.safetensors") | load_file(folder / "head.safetensors")
    values = np.concatenate([each.ravel() for each in weights.values()])
    return {
        "ended": "exit code 0",
        "not_finite_at_the_end": share(values),
        "quarantined": [str(line["quarantined"]) for line in lines if "quarantined" in line],
        "finite_loss_in_rounds": sum(bool(np.isfinite(line["loss"])) for line in lines if "loss" in line),
    }


def start_program(root: Path, stack: ExitStack, name: str, module: str, *words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", module, *map(str, words)]
    with (root / f"{name}.log").open("w") as log:
        program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    stack.callback(stop, program)
    return program


def finish(root: Path, name: str, program: subprocess.Popen[str]) -> None:
    """Wait for a program that ends by itself. Raises: DeviceError when it does not, or with an error."""
    try:
        program.communicate(timeout=RUN_S)
    except subprocess.TimeoutExpired:
        program.kill()
        program.communicate()
    if program.returncode:
        said = (root / f"{name}.log").read_text().strip()[-400:]
        raise DeviceError(f"{name} ended with {program.returncode}: {said}", "see what it said")


def share(weights: np.ndarray) -> float:
    """Of the values that are not finite."""
    return float(np.mean(~np.isfinite(weights)))


def flower(root: Path, python: str) -> Outcome:
    """By strategy. Raises: DeviceError."""
    result = root / "flower.json"
    app = HERE / "compare_nan_flower.py"
    deployment = peers.start_flower(root / "flower", python, root / "keys", app, len(DEVICES), {"result": str(result)})
    try:
        status = peers.wait_for_flower(deployment, result, RUN_S)
        shares = json.loads(result.read_text()) if result.exists() else None
    finally:
        deployment.close()
    return {"version": peers.version_of("flower", python), "ended": status, "not_finite_by_round": shares}


def nvflare(root: Path, python: str) -> Outcome:
    """Raises: DeviceError."""
    notes = root / "nvflare.notes"
    app = HERE / "compare_nan_nvflare.py"
    deployment = peers.start_nvflare(root / "nvflare", python, app, len(DEVICES), {"notes": str(notes)})
    try:
        status, results = peers.wait_for_nvflare(deployment, RUN_S)
        (model,) = results.rglob("server.npy")
        # What came to a client in the first round is the beginning; what the last one made is the model.
        shares = [*map(float, notes.read_text().split()[1:]), share(np.load(model, allow_pickle=False))]
    finally:
        deployment.close()
    by_round = {"NumpyFedAvgRecipe": shares}
    return {"version": peers.version_of("nvflare", python), "ended": status, "not_finite_by_round": by_round}


def main() -> int:
    options = parse(sys.argv[1:])
    peers.stop_on_sigterm()
    pythons = {name: getattr(options, name) for name in peers.PACKAGES}
    for name, python in pythons.items():
        if python is not None:
            peers.version_of(name, python)
    compare: dict[str, Callable[[Path, str], Outcome]] = {"flower": flower, "nvflare": nvflare}
    with tempfile.TemporaryDirectory(prefix="cutlayer-nan-") as folder:
        root = Path(folder)
        make_keys.make_publisher(root / "keys")
        make_keys.make_ca(root / "keys")
        make_keys.make_server(root / "keys", ["localhost", "127.0.0.1"])
        say("here")
        outcomes: dict[str, Outcome] = {"ours": ours(root)}
        for name, python in pythons.items():
            if python is None:
                outcomes[name] = {"left_out": peers.NOT_GIVEN.format(name=name, package=peers.PACKAGES[name])}
                continue
            say(name)
            outcomes[name] = compare[name](root, python)
    if options.format == "json":
        print_document("compare-nan", outcomes)
    else:
        for name, outcome in outcomes.items():
            print("\n".join([name, *(f"  {key:<24} {value}" for key, value in outcome.items())]))
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog="tools/compare_nan", description=(__doc__ or "").split("\n\n")[0])
    for name, package in peers.PACKAGES.items():
        parser.add_argument(f"--{name}", metavar="PYTHON", help=f"try it as well: an interpreter that has {package}")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default %(default)s")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(run_command(main))
