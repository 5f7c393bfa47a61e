"""What the command lines of reproductions have in common: where rows are kept and how they are shown, lists, and
defaults that depend on the world. What a reproduction runs is its own.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contract.canonical import INT_MAX
from contract.console import ArgumentParser
from contract.errors import UsageError, suggest
from tools.share import WHOLE, read_share


def study_parser(name: str, doc: str | None, lasts: str = "minutes") -> ArgumentParser:
    """The parser of `tools/reproduce NAME`, described by the first line of `doc`; the quick form `lasts` so long."""
    parser = ArgumentParser(prog=f"tools/reproduce {name}", description=(doc or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"digits and a very small model: {lasts}, no archive")
    return parser


def add_seeds(parser: argparse.ArgumentParser, full: str = "0,1,2") -> None:
    parser.add_argument("--seeds", type=numbers, help=f"default: 0 with --quick, else {full}")


def add_test_images(parser: argparse.ArgumentParser, default: int) -> None:
    """None where it is not given, so that `refuse_with_quick` can tell; then `default`."""
    parser.add_argument("--test-images", type=int, metavar="N", help=f"default: {default}")


def add_place(parser: argparse.ArgumentParser, holds: str) -> argparse._MutuallyExclusiveGroup:
    """Engine, threads, world, rows and form of the answer; `holds` names the archives that --shared has. Returns the
    group of what to do instead of computing."""
    parser.add_argument("--engine", choices=["torch", "onnxruntime"], help="default: onnxruntime with --quick")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--shared", type=Path, metavar="DIR", help=f"holds {holds} (default: ../shared)")
    parser.add_argument("--world", type=Path, metavar="DIR", help="images and packages; made where missing")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--prepare", action="store_true", help="make images and packages, and stop")
    action.add_argument("--table", action="store_true", help="compute nothing: the rows that are finished")
    add_output(parser)
    return action


def add_output(parser: argparse.ArgumentParser, folder: str = "cutlayer-reproduce") -> None:
    """Where rows are kept, and how they are shown."""
    parser.add_argument("--format", choices=["table", "json"], default="table")
    default = Path(tempfile.gettempdir()) / folder
    parser.add_argument("-o", "--output", type=Path, default=default, metavar="DIR", help="(default: %(default)s)")


def add_share(parser: argparse.ArgumentParser) -> None:
    """Which rows are computed by this of several commands."""
    parser.add_argument(
        "--share", type=read_share, metavar="I/N", default=WHOLE, help="compute part I of N of the rows"
    )
    add_time_limit(parser)


def add_time_limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stop-after-s", type=float, metavar="S", help="begin no further row then")


def take_defaults(options: argparse.Namespace, defaults: Mapping[str, Any]) -> None:
    """Fill in what was not given."""
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def world_of(options: argparse.Namespace) -> str:
    return "quick" if options.quick else "full"


def read_only(text: str, form: str, example: str) -> list[str]:
    """The parts of --only, the last of them a seed. Raises: UsageError."""
    parts = text.split("/")
    if len(parts) != len(form.split("/")) or not parts[-1].isdecimal():
        raise UsageError(f"--only should be {form}, found {text!r}", f"as in --only {example}")
    return parts


def check_known(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    """Raises: UsageError for a name that is not known."""
    for name in given:
        if name not in known:
            raise UsageError(f"there is no {what} {name!r} here{suggest(name, known)}", f"known: {', '.join(known)}")


def check_counts(options: argparse.Namespace, lowest: Mapping[str, int]) -> None:
    """Raises: UsageError for a whole number, or one of a list, that is too small or too large."""
    for flag, least in lowest.items():
        given = getattr(options, flag.replace("-", "_"))
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not least <= value <= INT_MAX:
                expected = f"{least} or more" if value < least else f"{INT_MAX} or less"
                raise UsageError(f"--{flag} should be {expected}, found {value}", "correct it")


def check_rate(options: argparse.Namespace, flag: str = "--learning-rate") -> None:
    """Raises: UsageError."""
    rate = getattr(options, flag[2:].replace("-", "_"))
    if not (math.isfinite(rate) and rate > 0):
        raise UsageError(f"{flag} should be more than 0, found {rate}", "correct it")


def refuse_with_quick(options: argparse.Namespace, *flags: str) -> None:
    """Raises: UsageError."""
    for flag in flags:
        if options.quick and getattr(options, flag[2:].replace("-", "_")) is not None:
            raise UsageError(f"{flag} belongs to the full reproduction", f"leave out --quick, or {flag}")


def check_test_images(count: int | None, classes: int) -> None:
    """Raises: UsageError."""
    if count is not None and (count < 1 or count % classes):
        raise UsageError(
            f"--test-images should be a multiple of {classes}, found {count}", "the same number is drawn of each class"
        )


def texts(text: str) -> list[str]:
    """Comma-separated names, each once."""
    return list(dict.fromkeys(text.split(",")))


def numbers(text: str) -> list[int]:
    """Comma-separated whole numbers, each once."""
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected numbers separated by commas, found {text!r}") from error
