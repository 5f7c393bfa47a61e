"""edge-run: the command line of a device. Flags, configuration, and how the report is printed.

What a run does is `run`'s part; errors and exit codes are contract.console's.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from contract import commands
from contract.config import check_inputs
from contract.console import ArgumentParser, print_document, run_command, say
from contract.errors import UsageError
from contract.output import check_output_file
from edge_runtime import commands as edge_commands
from edge_runtime.config import (
    FIELDS,
    LABEL_MODES,
    NOISE_MODES,
    AccountConfig,
    DeviceConfig,
    LocalConfig,
    PreviewConfig,
    PrewarmConfig,
    account_config,
    device_config,
    local_config,
    preview_config,
    prewarm_config,
    resolve_config,
)
from edge_runtime.state import write_output
from edge_runtime.stopping import stop_on_sigterm
from edge_runtime.threads import workers_left

if TYPE_CHECKING:
    from edge_runtime.report import Report

FORMATS = ("table", "csv", "json")
PREVIEW_NEEDS = ("engine", "trust", "state")
LOCAL_NEEDS = (*PREVIEW_NEEDS, "data")
RELEASES_NEEDS = ("state",)
# Settings of LocalConfig that change nothing where nothing is sent and no part is trained.
LOCAL_IDLE = frozenset(
    ("noise", "kappa_floor", "sigma_floor", "energy_table", "privacy_weight", "power_cap_w", "remeasure_s", "split")
)
LEARN_IDLE = LOCAL_IDLE | {"site_secret"}  # the answers of a whole model are numbered by it
CHOICES = {"label_mode": LABEL_MODES, "noise": NOISE_MODES}
KEEP_MB = 1024
JOULES_PER_WH = 3600.0
EPILOG = "Settings that are not given come from CUTLAYER_DEVICE_* variables, edge.toml or cutlayer.toml [device]."


def parser() -> ArgumentParser:
    """Every setting of the configuration is a flag; the rest is about this one call."""
    flags = ArgumentParser(
        "edge-run",
        "Run a model's frontend on this device's images and adapt with the server.",
        f"{EPILOG} {commands.epilog('edge-run', commands.names(edge_commands))}",
    )
    for field in FIELDS:
        flags.add_argument(
            "--" + field.name.replace("_", "-"),
            dest=field.name,
            choices=CHOICES.get(field.name),
            metavar=None if field.name in CHOICES else field.name.upper(),
            help=field.described,
        )
    purposes = flags.add_mutually_exclusive_group()
    purposes.add_argument(
        "--infer", action="store_true", help="predict the classes of the images instead of adapting to them"
    )
    purposes.add_argument(
        "--preview",
        type=Path,
        nargs="+",
        metavar="IMAGE",
        help="show what an attacker would get of these images with this device's settings, in the folder -o "
        "(default: preview); nothing is sent. Needs --engine, --trust and --state",
    )
    purposes.add_argument(
        "--releases",
        action="store_true",
        help="tell what of each image has ever left this device, and stop. Needs --state; with --data files have names",
    )
    purposes.add_argument(
        "--offline",
        action="store_true",
        help="make features without a server and keep them for edge-run sync; the settings are those of a run",
    )
    purposes.add_argument(
        "--learn",
        action="store_true",
        help="learn anew to answer without a server, from the labelled images of --data; nothing is sent. A run does "
        "so too; this is for images and classes that came later. Needs --engine, --trust, --state and --data",
    )
    purposes.add_argument(
        "--prewarm",
        action="store_true",
        help="install the package and build the TensorRT plan now, and stop. Needs --engine, --trust and --state",
    )
    flags.add_argument("--budget", type=float, metavar="WH", help="with --offline: stop after so many watt-hours")
    flags.add_argument("--until", metavar="TIME", help="with --offline: stop at HH:MM, or after +N s, m or h")
    flags.add_argument(
        "--keep-mb",
        type=int,
        metavar="N",
        help=f"with --offline: most MB that are kept, oldest go first and are counted (default: {KEEP_MB})",
    )
    flags.add_argument(
        "--once",
        action="store_true",
        help="give up when the server cannot be reached (exit code 8; with --infer this device answers if it can)",
    )
    flags.add_argument(
        "--local",
        action="store_true",
        help="with --infer: this device answers, and no server is asked. Needs --engine, --trust, --state and --data",
    )
    flags.add_argument(
        "--format", choices=FORMATS, default="table", help="form of the report on stdout (default: table)"
    )
    flags.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write the report to FILE instead of stdout; with --preview a folder",
    )
    flags.add_argument(
        "--config", type=Path, metavar="FILE", help="configuration file instead of ./edge.toml or ./cutlayer.toml"
    )
    flags.add_argument(
        "--show-config", action="store_true", help="print every setting and where it comes from, and stop"
    )
    return flags


def edge_run(arguments: argparse.Namespace, environ: Mapping[str, str], directory: Path) -> int:
    """The command behind its command line. Raises: CutlayerError."""
    flags = {field.name: getattr(arguments, field.name) for field in FIELDS}
    needed: tuple[str, ...] | None = None
    settle: Callable[[Mapping[str, Any]], LocalConfig | PreviewConfig | PrewarmConfig | AccountConfig] = device_config
    if arguments.local and not arguments.infer:
        raise UsageError("--local means nothing without --infer", "leave it out")
    if arguments.prewarm:
        needed, settle = PREVIEW_NEEDS, prewarm_config
    elif arguments.preview:
        needed, settle = PREVIEW_NEEDS, preview_config
        refuse_idle_flags(arguments, "--preview", PreviewConfig)
    elif arguments.releases:
        needed, settle = RELEASES_NEEDS, account_config
        refuse_idle_flags(arguments, "--releases", AccountConfig)
    elif arguments.learn or arguments.local:
        needed, settle = LOCAL_NEEDS, local_config
        if arguments.learn:
            refuse_idle_flags(arguments, "--learn", LocalConfig, LEARN_IDLE)
        else:
            refuse_idle_flags(arguments, "--infer --local", LocalConfig, LOCAL_IDLE)
    resolved = resolve_config(flags, environ, arguments.config, directory, needed, arguments.show_config)
    if resolved.missing:
        print(resolved.show())
        return 0
    config = settle(resolved.values)
    if arguments.show_config:
        print(resolved.show())
        return 0
    check_inputs(FIELDS, resolved, {field.name for field in fields(config)})
    if isinstance(config, PreviewConfig):
        return show_preview(config, arguments)
    for name in ("budget", "until", "keep_mb"):
        if getattr(arguments, name) is not None and not arguments.offline:
            raise UsageError(f"--{name.replace('_', '-')} means nothing without --offline", "leave it out")
    if arguments.output is not None:
        check_output_file(arguments.output, may_be_pipe=True)  # the run may take hours
    if isinstance(config, PrewarmConfig):
        return show_prewarmed(config, arguments)
    if isinstance(config, AccountConfig):
        return show_releases(config, arguments)
    if arguments.learn:
        return learn_alone(config, arguments)
    if not isinstance(config, DeviceConfig):
        return answer_alone(config, arguments)
    if arguments.offline:
        return work_offline(config, arguments)
    from edge_runtime.run import run_device  # only now: --help and --show-config need no numpy

    purpose: Literal["infer", "adapt"] = "infer" if arguments.infer else "adapt"
    report = asyncio.run(run_device(config, purpose, arguments.once, say))
    if report is not None:
        print_report(report, arguments.format, arguments.output)
    return 0


def answer_alone(config: LocalConfig, arguments: argparse.Namespace) -> int:
    """Predictions of this device alone. Raises: CutlayerError."""
    from edge_runtime.alone import run_alone  # as above

    report = asyncio.run(run_alone(config, say))
    if report is not None:
        print_report(report, arguments.format, arguments.output)
    return 0


def learn_alone(config: LocalConfig, arguments: argparse.Namespace) -> int:
    """Learning to answer without a server; stops on SIGTERM. Raises: CutlayerError."""
    from edge_runtime.learning import learn

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    report = learn(config, stop, say)
    if report is not None:
        print_report(report, arguments.format, arguments.output)
    return 0


def work_offline(config: DeviceConfig, arguments: argparse.Namespace) -> int:
    """A day without a server. Raises: CutlayerError."""
    from edge_runtime.offline import Bounds, parse_until, run_offline

    for name in ("budget", "keep_mb"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < 1e9:
            raise UsageError(f"--{name.replace('_', '-')} should be more than 0, found {value}", "correct it")
    until_s = None
    if arguments.until is not None:
        until_s = time.monotonic() + parse_until(arguments.until, datetime.now().astimezone())
    energy_j = None if arguments.budget is None else arguments.budget * JOULES_PER_WH
    bounds = Bounds(energy_j, until_s, (arguments.keep_mb or KEEP_MB) * 1_000_000)
    report = asyncio.run(run_offline(config, bounds, say))
    if report is not None:
        print_report(report, arguments.format, arguments.output)
    return 0


def refuse_idle_flags(
    arguments: argparse.Namespace, purpose: str, config: type, idle: frozenset[str] = frozenset()
) -> None:
    """A flag that would change nothing was meant to; settings of files are there for other calls as well.

    `idle` are fields of the configuration that this purpose makes no use of. Raises: UsageError.
    """
    known = {field.name for field in fields(config)} - idle
    names = [field.name for field in FIELDS if field.name not in known and getattr(arguments, field.name) is not None]
    if arguments.once:
        names.append("once")
    if names:
        *others, last = ("--" + name.replace("_", "-") for name in names)
        if others:
            raise UsageError(f"{', '.join(others)} and {last} have no part in {purpose}", "leave them out")
        raise UsageError(f"{last} has no part in {purpose}", "leave it out")


def show_preview(config: PreviewConfig, arguments: argparse.Namespace) -> int:
    """Previews of some images, and what they show on stdout. Raises: CutlayerError."""
    if arguments.format == "csv":
        raise UsageError("previews are told as a table or as json", "use --format json")
    from edge_runtime.preview import cli as previews  # it needs numpy, as below

    shown = previews.preview(config, arguments.preview, arguments.output or Path("preview"), say)
    if arguments.format == "json":
        print_document("edge-run-preview", previews.document(shown))
    else:
        print(previews.in_words(shown))
    return 0


def show_prewarmed(config: PrewarmConfig, arguments: argparse.Namespace) -> int:
    """What the next run finds ready, on stdout or in -o; stops on SIGTERM. Raises: CutlayerError."""
    if arguments.format == "csv":
        raise UsageError("what was made ready is told as a table or as json", "use --format json")
    from edge_runtime import prewarm  # as below
    from edge_runtime.delivery import Stopped

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    try:
        ready = prewarm.prewarm(config, stop, say)
    except Stopped:
        return 0
    if arguments.format == "json":
        print_text(arguments.output, lambda: print_document("edge-run-prewarm", asdict(ready)))
    else:
        print_text(arguments.output, lambda: print(prewarm.in_words(ready)))
    return 0


def show_releases(config: AccountConfig, arguments: argparse.Namespace) -> int:
    """The account of releases, on stdout or in -o. Raises: CutlayerError."""
    from edge_runtime import releases  # as below
    from edge_runtime.release_book import read_account

    found = read_account(config, say)
    if arguments.format == "json":
        print_text(arguments.output, lambda: print_document("edge-run-releases", releases.document(found)))
    else:
        text = releases.to_csv(found) if arguments.format == "csv" else releases.to_table(found)
        print_text(arguments.output, lambda: print(text, end=""))
    return 0


def print_report(report: Report, form: str, output: Path | None) -> None:
    """To stdout, or whole into a file."""
    from edge_runtime.report import document, to_csv, to_table  # as above

    if form == "json":
        print_text(output, lambda: print_document("edge-run", document(report)))
    else:
        print_text(output, lambda: print(to_csv(report) if form == "csv" else to_table(report), end=""))


def print_text(output: Path | None, write: Callable[[], None]) -> None:
    """What `write` prints, to stdout or whole into a file."""
    text = io.StringIO()
    with redirect_stdout(text):
        write()
    if output is None:
        sys.stdout.write(text.getvalue())
    else:
        write_output(output, text.getvalue().encode())


def edge_run_or_command(words: Sequence[str]) -> int:
    """A command beside running, or a run. Raises: CutlayerError."""
    code = commands.run_named("edge-run", edge_commands, words)
    return edge_run(parser().parse_args(words), os.environ, Path.cwd()) if code is None else code


def main() -> int:
    """Entry point of edge-run."""
    stop_on_sigterm()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names in a terminal that lacks their letters
    code = run_command(lambda: edge_run_or_command(sys.argv[1:]))
    if workers_left():
        sys.stderr.flush()  # stdout was flushed above
        os._exit(code)  # a worker left behind in native code must not crash the interpreter's end
    return code


if __name__ == "__main__":
    sys.exit(main())
