"""leakage-profile: what an attacker can read of the images behind each split of a package, at each strength of noise.

Flags, files and progress; everything that decides is left to `profiler`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from contract.console import ArgumentParser, print_document, progress, run_command, say
from contract.errors import CutlayerError, TrainingError, UsageError, why
from contract.image_folder import scan
from contract.output import check_output_file

from .. import attacks, backend_folder
from ..backend import choose_device
from ..files import DISK_ERRORS, remove
from . import profiler as leakage
from . import public as public_images
from .check import check_table
from .metrics import LEAST_PIXELS, load_lpips, load_piq
from .package import Package, read_package
from .table import Row, Settings, keep_rows, kept_path, read_rows, to_document, to_text, write_table

DEFAULT_ATTACKS = ("ridge", "inverse_net")
IMAGES = 1000
LEARN = 5000


def main(arguments: Sequence[str] | None = None) -> int:
    """The leakage-profile command; returns its exit code."""
    return run_command(partial(_main, arguments))


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="leakage-profile",
        description="Attack the features that a package makes of public images, split by split and noise by noise.",
        epilog="A run that is stopped goes on where it was when it is started again with the same flags.",
    )
    parser.add_argument("--package", type=Path, metavar="DIR", help="what export-frontend wrote")
    parser.add_argument(
        "--public", type=Path, metavar="DIR",
        help="public images, one folder per class; some are attacked, the attacker learns from the others",
    )  # fmt: skip
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="the table, as JSON")
    parser.add_argument(
        "--attack", action="append", metavar="NAME",
        help=f"may be given more than once; default: {', '.join(DEFAULT_ATTACKS)}. Known: {', '.join(attacks.names())}",
    )  # fmt: skip
    parser.add_argument(
        "--noise", type=_strengths, metavar="X,X,...",
        help="strengths to measure: kappa of a frontend, the deviation sigma of parts; default: "
        + ", ".join(f"{each:g}" for each in leakage.COARSE) + ", of a frontend up to its kappa_max",
    )  # fmt: skip
    parser.add_argument("--steps", type=_count, metavar="N", help="steps of each attack; default: the attack's own")
    parser.add_argument(
        "--images", type=_count, default=IMAGES, metavar="N",
        help=f"images to attack, at most a fifth of the public ones; default: {IMAGES}",
    )  # fmt: skip
    parser.add_argument("--learn", type=_count, default=LEARN, metavar="N", help=f"to learn from; default: {LEARN}")
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="of every draw; default: 0")
    parser.add_argument(
        "--backend", type=Path, metavar="DIR",
        help="the package's .backend folder, for attacks that know the weights; default: the one beside it, if any",
    )  # fmt: skip
    parser.add_argument(
        "--check", nargs="?", const="", metavar="FILE",
        help="attack nothing. With FILE, a table: is it whole, does it follow from its rows, is it of --package and of "
        "--public, where these are given. Without: mistakes of the other flags, and of folders that are named",
    )  # fmt: skip
    parser.add_argument("--format", choices=("text", "json"), default="text", help="json: the document on stdout")
    return parser


def _count(text: str) -> int:
    value = _whole(text)
    if value is None or value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, found {text!r}")
    return value


def _seed(text: str) -> int:
    value = _whole(text)
    if value is None:
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more, found {text!r}")
    return value


def _whole(text: str) -> int | None:
    """None: it is none, or more than anything here can be."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def _strengths(text: str) -> tuple[float, ...]:
    try:
        values = tuple(sorted({float(each) for each in text.split(",")}))
    except ValueError:
        values = ()
    if not values or not all(0.0 <= value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"expected strengths of 0 or more with commas between them, found {text!r}")
    return values


def _main(arguments: Sequence[str] | None) -> int:
    flags = _parser().parse_args(arguments)
    if flags.check:
        return _check_table(flags)
    names = tuple(dict.fromkeys(flags.attack or DEFAULT_ATTACKS))
    leakage.check_attacks(names)
    load_piq()
    for name in ("package", "public", "output"):
        if getattr(flags, name) is None and flags.check is None:
            raise UsageError(f"--{name} is missing", "give it; see leakage-profile --help")
    if flags.output is not None:
        check_output_file(flags.output)  # attacks may take hours
    if flags.check is not None:
        return _check_flags(flags, names)
    package, folder = _open(flags.package), scan(flags.public, None)
    kept = _backend(flags.backend, package)
    settings = Settings(
        package_digest=package.digest.hex(),
        public_digest=public_images.digest_of(folder),
        attacks=names,
        strengths=flags.noise or leakage.default_strengths(package),
        alpha=package.alpha,
        images=flags.images,
        learn_images=flags.learn,
        steps=flags.steps,
        seed=flags.seed,
    )
    done = list(read_rows(flags.output, settings))
    if done:
        say(f"going on after {len(done)} rows in {kept_path(flags.output)}")
    device = choose_device(len(os.sched_getaffinity(0)))
    lpips, lpips_unknown = load_lpips(device)
    public = public_images.read_public(folder, package.image, flags.images, flags.learn, flags.seed, show_progress)
    profiler = leakage.Profiler(package, public, settings, device, show_progress, lpips, kept)
    planned = len(profiler.planned())
    for row in profiler.rows(done):
        done.append(row)
        _keep(flags.output, settings, done)
        say(f"row {len(done)} of {planned} is done")
    table = profiler.table(done, lpips_unknown)
    try:
        write_table(flags.output, table)
        remove(kept_path(flags.output))
    except DISK_ERRORS as error:
        raise _no_disk(flags.output, error) from error
    if flags.format == "json":
        document = to_document(table)
        print_document(str(document.pop("kind")), {k: v for k, v in document.items() if k != "schema_version"})
    else:
        print(to_text(table), end="")
    return 0


def _open(root: Path) -> Package:
    """Raises: UsageError for pictures that no attack can be judged by."""
    package = read_package(root)
    if min(package.image.height, package.image.width) < LEAST_PIXELS:
        raise UsageError(
            f"pictures of {package.image.height} x {package.image.width} are too small to compare",
            f"a side needs {LEAST_PIXELS} pixels",
        )
    return package


def _check_flags(flags: argparse.Namespace, names: Sequence[str]) -> int:
    """Everything that can be wrong before the first attack, of what is named."""
    print(f"flags: attacks {', '.join(names)} can make a table")
    if flags.output is not None:
        print(f"-o: {flags.output} can be written")
    if flags.package is not None:
        print(f"package: {_open(flags.package).digest.hex()[:16]}, files are those that its manifest lists")
    if flags.backend is not None:
        print(f"backend: {backend_folder.read(flags.backend).root}")
    if flags.public is not None:
        print(f"public images: {len(scan(flags.public, None).images)} in {flags.public}")
    return 0


def _check_table(flags: argparse.Namespace) -> int:
    """The table after --check, against the package and the images that are given. Raises: CutlayerError."""
    usual = vars(_parser().parse_args([]))
    idle = [name for name, value in vars(flags).items() if value != usual[name]]
    idle = [name for name in idle if name not in ("check", "package", "public")]
    if idle:
        raise UsageError(f"--{idle[0]} has no part in --check FILE, which attacks nothing", "leave it out")
    for line in check_table(Path(flags.check), flags.package, flags.public):
        print(line)
    return 0


def _backend(
    given: Path | None, package: Package
) -> backend_folder.BackendFolder | backend_folder.TrainingFolder | None:
    """The folder that was given, or the one beside the package where there is one."""
    beside = leakage.backend_beside(package.root)
    if given is None and not beside.is_dir():
        return None
    return backend_folder.read(given or beside)


def _keep(output: Path, settings: Settings, rows: Sequence[Row]) -> None:
    try:
        keep_rows(output, settings, rows)
    except DISK_ERRORS as error:
        raise _no_disk(output, error) from error


def _no_disk(output: Path, error: Exception) -> CutlayerError:
    return TrainingError(
        f"{output} cannot be written: {why(error, output)}",
        "make room, or give another -o; rows that were kept are not lost",
    )


@contextmanager
def show_progress(what: str, total: int, unit: str) -> Iterator[Callable[[int], object]]:
    with progress(None, total=total, description=what, unit=unit) as shown:
        yield shown.update


if __name__ == "__main__":
    sys.exit(main())
