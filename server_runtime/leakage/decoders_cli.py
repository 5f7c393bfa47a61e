"""Train the decoders of a package's preview: the command that export-frontend --preview runs.

Flags, files and progress; everything that decides is left to `decoders`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from contract.canonical import encode, to_json
from contract.console import ArgumentParser, run_command, say
from contract.errors import TrainingError, why
from contract.image_folder import scan
from contract.preview import RECORDS_NAME, Decoders

from ..backend import choose_device
from ..files import DISK_ERRORS, write_atomic
from .cli import show_progress
from .decoders import Trained, Training, train_decoders
from .package import read_package
from .profiler import Profiler
from .public import digest_of, read_public
from .table import Settings


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    return run_command(partial(_main, arguments))


def _parser() -> ArgumentParser:
    parser = ArgumentParser("python -m server_runtime.leakage.decoders_cli", "Train decoders for the owner's preview.")
    parser.add_argument("--package", type=Path, required=True, metavar="DIR", help="a frontend's package")
    parser.add_argument("--public", type=Path, required=True, metavar="DIR", help="public images")
    parser.add_argument("--kappa", type=float, nargs="+", required=True, metavar="X", help="strengths, the first first")
    parser.add_argument("--steps", type=int, required=True, metavar="N", help="of each decoder")
    parser.add_argument("--minutes", type=float, required=True, metavar="X", help="that training may take in all")
    parser.add_argument("--learn", type=int, required=True, metavar="N", help="most images to learn from")
    parser.add_argument("--images", type=int, default=100, metavar="N", help="most images to measure on; default: 100")
    parser.add_argument("--opset", type=int, required=True, metavar="N", help="of the graphs")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of every draw; default: 0")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="an existing folder")
    return parser


def _main(arguments: Sequence[str] | None) -> int:
    flags = _parser().parse_args(arguments)
    package, folder = read_package(flags.package), scan(flags.public, None)
    settings = Settings(
        package_digest=package.digest.hex(), public_digest=digest_of(folder), attacks=(),
        strengths=tuple(flags.kappa), alpha=package.alpha, images=flags.images, learn_images=flags.learn,
        steps=flags.steps, seed=flags.seed,
    )  # fmt: skip
    device = choose_device(len(os.sched_getaffinity(0)))
    public = read_public(folder, package.image, flags.images, flags.learn, flags.seed, show_progress)
    profiler = Profiler(package, public, settings, device, show_progress, None, None)
    training = Training(flags.steps, flags.seed, flags.opset, 60.0 * flags.minutes, time.monotonic)
    trained = []
    for each in train_decoders(package, public, profiler, settings.strengths, training, show_progress):
        _keep(flags.output, each)
        trained.append(each.record)
        if each.record.steps < flags.steps:
            say(f"the time for this decoder was over after {each.record.steps} of {flags.steps} steps")
    _write(flags.output / RECORDS_NAME, to_json(encode(Decoders(tuple(trained)))))
    return 0


def _keep(folder: Path, trained: Trained) -> None:
    _write(folder / trained.record.onnx, trained.graph)


def _write(path: Path, data: bytes) -> None:
    try:
        write_atomic(path, data)
    except DISK_ERRORS as error:
        raise TrainingError(
            f"{path} cannot be written: {why(error, path)}", "make room on the disk, then start again"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
