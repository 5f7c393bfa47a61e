"""Try a new package on this device's images and make it current, or stay with the one before (--back: go back)."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

from contract.console import ArgumentParser, say
from contract.errors import UsageError
from contract.signature import key_id, load_public
from edge_runtime.commands._settings import add_settings, settle

IMAGES_MAX = 10_000


def configure(parser: ArgumentParser) -> None:
    """Which package, what it is tried on, and what is put up with."""
    add_settings(parser, "state", "trust", "data", "threads")
    parser.add_argument("package", type=Path, nargs="?", help="its folder")
    parser.add_argument(
        "--back", action="store_true", help="make the package before current again, and ban the present one"
    )
    parser.add_argument("--images", type=int, default=16, metavar="N", help="pictures to try (default: %(default)s)")
    parser.add_argument(
        "--slower",
        type=float,
        default=1.5,
        metavar="X",
        help="most time of an image, in times of before (default: %(default)s)",
    )
    parser.add_argument(
        "--hungrier", type=float, default=1.5, metavar="X", help="the same of energy, where a meter tells"
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises: CutlayerError."""
    from edge_runtime.cpus import allowed_affinity, usable_cpus
    from edge_runtime.engines import open_engine
    from edge_runtime.install import QUARANTINE
    from edge_runtime.meters import probe
    from edge_runtime.package_choice import choose_package
    from edge_runtime.state import open_state
    from edge_runtime.update import Trial, go_back, update

    if (arguments.package is None) != arguments.back:
        raise UsageError("either a package or --back is to be given", "see edge-run update --help")
    if not 1 <= arguments.images <= IMAGES_MAX:
        raise UsageError(f"--images should be 1 to {IMAGES_MAX}, found {arguments.images}", "correct --images")
    for name in ("slower", "hungrier"):
        if not 0 < getattr(arguments, name) < math.inf:  # NaN would let every package pass
            raise UsageError(f"--{name} should be more than 0, found {getattr(arguments, name):g}", f"correct --{name}")
    values = settle(arguments, "state") if arguments.back else settle(arguments, "state", "trust", "data")
    if arguments.back and not values["state"].is_dir():
        raise UsageError(f"{values['state']} is no state folder of edge-run", "give the one that the device runs with")
    if values["threads"] is not None and values["threads"] < 0:
        raise UsageError(f"--threads should be 0 or more, found {values['threads']}", "correct --threads")
    state = open_state(values["state"])
    try:
        if arguments.back:
            before, banned = go_back(state.packages, "the operator went back")
            say(f"package {before[:12]} is current again")
            say(
                f"package {banned[:12]} is not tried again on this device, whoever sends it; to allow it, delete its "
                f"line in {state.packages / QUARANTINE}"
            )
            return 0
        meter, publisher = probe().meter, load_public(values["trust"])
        choice = choose_package(str(arguments.package))
        threads = values["threads"] or usable_cpus(allowed_affinity())
        done = update(
            choice.folder,
            state.packages,
            {key_id(publisher): publisher},
            lambda path: open_engine(choice.engine, path, threads),
            values["data"],
            Trial(arguments.images, arguments.slower, arguments.hungrier),
            lambda: meter.read(time.monotonic()).energy_j,
            say,
        )
    finally:
        state.close()
    compared = "" if done.slower is None else f", {done.slower:.2f} times the time of an image"
    compared += "" if done.hungrier is None else f", {done.hungrier:.2f} times its energy"
    say(f"version {done.version} ({done.digest[:12]}) is current{compared}; use it with --engine "
        f"{state.packages / 'current'}")  # fmt: skip
    return 0
