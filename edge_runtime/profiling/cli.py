"""edge-profile: what each split point costs on this device, in time, bytes and joules.

The command line and the files; the device itself is `session`'s part. Nothing that it finds leaves the device.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import profiles
from contract.canonical import encode
from contract.config import REQUIRED, find_file, resolve
from contract.console import ArgumentParser, run_command, say
from contract.errors import ConfigError, CutlayerError, UsageError
from contract.output import check_output_file
from contract.scratch import scratch_folder
from contract.signature import key_id, load_public
from edge_runtime.config import FIELDS, FILES, SECTION, DeviceConfig, device_config, require_range, resolve_config
from edge_runtime.cpus import allowed_affinity, usable_cpus
from edge_runtime.meters import Meter, PowerModel, open_plug, probe, read_model
from edge_runtime.profiling import cap as caps
from edge_runtime.profiling.cap import CapPlan
from edge_runtime.profiling.frontends import DRAWN, Images, Verified, frontends, verify
from edge_runtime.profiling.measuring import Candidate, Plan
from edge_runtime.profiling.output import draw, keep, publish
from edge_runtime.profiling.parts import parts
from edge_runtime.profiling.rows import BLOCKS_LEAST
from edge_runtime.profiling.session import Place, find_cap, measure_all
from edge_runtime.profiling.table import KIND, Work, merge, read_table, to_document, to_text
from edge_runtime.stopping import stop_on_sigterm
from edge_runtime.threads import workers_left
from profiles import Profile, ProfileError
from profiles.detect import detect

SLOW_SENSOR_S = 1.0  # of window and doubt; a smart plug's or a battery's are more
BLOCK_S, SLOW_BLOCK_S = 10.0, 30.0  # devices.md 2.2: under 1 % error
BATCH = 32
DRAWN_MOST = 4096  # pictures


def parser() -> ArgumentParser:
    """Every flag; settings that edge-run has as well come from where it takes them, too."""
    commands = ArgumentParser(
        "edge-profile",
        "Measure time, bytes and energy of every split point on this device, or draw what was measured.",
        "--trust, --threads, --plug and --plug-account come from edge.toml and CUTLAYER_DEVICE_* as well.",
    )
    add = commands.add_argument
    add("--engine", action="append", metavar="DIR", help="package folder, or DIR/front.onnx; repeat it for more splits")
    add("--trust", metavar="FILE", help="public key (PEM) of the packages' publisher")
    add("--profile", metavar="NAME", help=f"{', '.join(profiles.names())}, or a file; default: what is detected")
    add("--label", action="append", metavar="KEY=VALUE", help="what it is measured in: ambient=21C, fan=on; repeat it")
    add("-o", "--output", type=Path, metavar="FILE", help="write the table (JSON), or with --plot the picture or page")
    add("--format", choices=("table", "json"), default="table", help="form of the answer on stdout (default: table)")
    add("--blocks", type=int, default=BLOCKS_LEAST, metavar="N", help=f"blocks of each split, {BLOCKS_LEAST} or more")
    add("--block-s", type=float, metavar="S", help=f"of each block; default: {BLOCK_S:g}, {SLOW_BLOCK_S:g} for a plug")
    add("--baseline-s", type=float, default=30.0, metavar="S", help="idle before and after each split (default: 30)")
    add("--warm-up-s", type=float, default=30.0, metavar="S", help="at most, before each split (default: 30)")
    add("--cool-down-s", type=float, default=60.0, metavar="S", help="at most, between two splits (default: 60)")
    add("--seed", type=int, metavar="N", help="of the order of the splits; default: drawn, and printed")
    add("--images", default=str(DRAWN), metavar="N|DIR", help=f"so many drawn pictures, or a folder's ({DRAWN})")
    add("--threads", metavar="N", help="threads of the engine; 0, the default: as many CPUs as this program may use")
    add("--train", action="store_true", help="measure steps of training of a package's parts")
    add("--batch", type=int, default=BATCH, metavar="N", help=f"images of a training step (default: {BATCH})")
    add("--find-cap", action="store_true", help="hold ever deeper splits until the device slows down or gets too hot")
    add("--hold-s", type=float, default=300.0, metavar="S", help="how long each split is held for --find-cap (300)")
    add("--limit-c", type=float, metavar="C", help="temperature that ends --find-cap; default: the profile's, if any")
    add("--plug", metavar="HOST[:PORT][/OUTLET]", help="TP-Link smart plug that feeds this device")
    add("--plug-account", metavar="FILE", help="two lines: its owner's name and password")
    add("--power-model", metavar="IDLE:BUSY|profile", help="watts to model energy by where nothing measures it")
    add("--root", type=Path, default=Path("/"), metavar="DIR", help="file system to read the meter in, as a recording")
    add("--plot", action="append", type=Path, metavar="TABLE", help="draw tables instead of measuring; repeat it")
    add("--config", type=Path, metavar="FILE", help="configuration file instead of ./edge.toml or ./cutlayer.toml")
    run = commands.add_argument_group("a real run, with --train --server", "the settings of edge-run")
    own = {action.dest for action in commands._actions}
    for field in FIELDS:
        if field.name not in own:
            run.add_argument("--" + field.name.replace("_", "-"), metavar=field.name.upper(), help=field.described)
    return commands


def edge_profile(arguments: argparse.Namespace, environ: Mapping[str, str], directory: Path) -> int:
    """The command behind its command line. Raises: CutlayerError."""
    refuse_idle_flags(arguments)
    if arguments.output is not None:
        check_output_file(arguments.output, may_be_pipe=True)  # measuring may take hours
    if arguments.plot:
        draw(merge([read_table(path) for path in arguments.plot]), arguments.output)
        return 0
    check_numbers(arguments)
    settings = resolve_settings(arguments, environ, directory)
    config = None if arguments.server is None else run_config(arguments, environ, directory)
    profile, environment = find_profile(arguments.profile, arguments.root), read_labels(arguments.label or [])
    plug, model = open_plug(settings.plug, settings.plug_account), power_model(settings.power_model, profile)
    is_json = arguments.format == "json"
    place = Place(profile, environment, arguments.root, probe(arguments.root, plug, model))
    seed = secrets.randbelow(1 << 31) if arguments.seed is None else arguments.seed
    key = load_public(settings.trust)
    with scratch_folder("cutlayer-edge-profile-") as workplace:
        packages = verify(settings.engines, {key_id(key): key}, workplace, settings.threads, say)
        candidates = find_work(packages, arguments, settings.threads, seed)
        if arguments.find_cap:
            cap = find_cap(candidates, plan_cap(arguments, profile), place)
            publish(arguments.output, is_json, caps.KIND, encode(cap), caps.to_text(cap))
            return 0
        plan = plan_of(arguments, place.found.meter, seed)
        work: Work = "training" if arguments.train else "frontend"
        table = measure_all(candidates, plan, work, place, lambda grown: keep(grown, arguments.output))
    if config is not None:
        from edge_runtime.profiling.server import join, with_away  # it loads the whole client

        say(f"joining a run of {config.server}")
        watts = None if model is None else f"{model.idle_w}:{model.busy_w}"
        try:
            joined = asyncio.run(join(replace(config, power_model=watts), say))
        except CutlayerError:  # what was measured before is not lost
            publish(arguments.output, is_json, KIND, to_document(table), to_text(table))
            raise
        table = replace(table, rows=tuple(with_away(row, joined) for row in table.rows))
    publish(arguments.output, is_json, KIND, to_document(table), to_text(table))
    return 0


def refuse_idle_flags(arguments: argparse.Namespace) -> None:
    """A flag that would change nothing was meant to. Raises: UsageError."""
    usual = vars(parser().parse_args([]))
    given = [name for name, value in vars(arguments).items() if value != usual[name]]
    run = {field.name for field in FIELDS} - {"engine", "trust", "threads", "plug", "plug_account", "power_model"}
    for is_idle, names, why in (
        (bool(arguments.plot), {*usual} - {"plot", "output"}, "has no part in --plot, which draws what was measured"),
        (not arguments.find_cap, {"hold_s", "limit_c"}, "is of --find-cap alone"),
        (arguments.find_cap, {"blocks", "baseline_s", "warm_up_s"}, "has no part in --find-cap, which holds splits"),
        (not arguments.train, {"batch"}, "is of --train alone"),
        (arguments.train, {"images"}, "has no part in --train, whose images are drawn"),
        (arguments.server is None, run, "is of a run that is joined with --train --server"),
    ):
        idle = [name for name in given if name in names]
        if is_idle and idle:
            raise UsageError(f"--{idle[0].replace('_', '-')} {why}", "leave it out, or correct the command")


def check_numbers(arguments: argparse.Namespace) -> None:
    """Raises: UsageError, ConfigError."""
    if not arguments.root.is_dir():
        raise UsageError(f"--root should be a folder, {str(arguments.root)!r} is none", "correct --root")
    require_range("blocks", arguments.blocks, BLOCKS_LEAST, 1000)
    require_range("batch", arguments.batch, 1, 4096)
    require_range("seed", arguments.seed, 0, 2**63 - 1)
    for name, lowest in (("block_s", 0.01), ("baseline_s", 0.01), ("warm_up_s", 0.01), ("cool_down_s", 0.0)):
        require_range(name, getattr(arguments, name), lowest, 86400.0)
    require_range("hold_s", arguments.hold_s, 0.01, 86400.0)
    require_range("limit_c", arguments.limit_c, 0.0, 150.0)


@dataclass(frozen=True)
class Settings:
    """What flags, environment and edge.toml come to."""

    engines: tuple[str, ...]
    trust: Path
    threads: int
    plug: str | None
    plug_account: Path | None
    power_model: str | None


def resolve_settings(arguments: argparse.Namespace, environ: Mapping[str, str], directory: Path) -> Settings:
    """As edge-run resolves its own, of which most do not matter here. Raises: ConfigError."""
    fields = [replace(field, default=None) if field.default is REQUIRED else field for field in FIELDS]
    flags = {field.name: getattr(arguments, field.name, None) for field in FIELDS} | {"engine": None}
    file = find_file(arguments.config, directory, FILES)
    values = resolve(SECTION, fields, flags, environ, file).values
    engines = arguments.engine or ([str(values["engine"])] if values["engine"] else [])
    for name, found in (("engine", engines), ("trust", values["trust"])):
        if not found:
            help_text = next(field.help for field in FIELDS if field.name == name)
            raise ConfigError(f"{name} is not set ({help_text})", f"give --{name}, or put it into edge.toml")
    require_range("threads", values["threads"], 0, 1024)
    threads = values["threads"] or usable_cpus(allowed_affinity())
    return Settings(
        tuple(engines), values["trust"], threads, values["plug"], values["plug_account"], values["power_model"]
    )


def run_config(arguments: argparse.Namespace, environ: Mapping[str, str], directory: Path) -> DeviceConfig:
    """The settings of the run that is joined. Raises: UsageError, ConfigError."""
    if not arguments.train or arguments.find_cap or arguments.root != Path("/") or len(arguments.engine or [""]) != 1:
        raise UsageError(
            "--server joins a run with one package on this very device", "give --train and one --engine, and no --root"
        )
    flags = {field.name: getattr(arguments, field.name) for field in FIELDS}
    flags["engine"] = arguments.engine[0] if arguments.engine else None
    return device_config(resolve_config(flags, environ, arguments.config, directory).values)


def find_profile(named: str | None, root: Path) -> Profile | None:
    """The profile that is named, a file of one's own, or the one that is detected; None: nothing fits.

    Raises: ConfigError.
    """
    try:
        if named is None:
            name = detect(root)
            return None if name is None else profiles.load(name)
        path = Path(named)
        return profiles.load_file(path) if path.suffix == ".toml" else profiles.load(named)
    except ProfileError as error:
        raise ConfigError(error.cause, error.cure) from error


def power_model(text: str | None, profile: Profile | None) -> PowerModel | None:
    """The model that was asked for: two figures, or the profile's. Raises: ConfigError."""
    if text != "profile":
        return read_model(text)
    power = None if profile is None else profile.power
    if profile is None or power is None or power.idle_w is None or power.busy_w is None:
        raise ConfigError(
            "the profile has no watts to model energy by" if profile else "there is no profile to take watts from",
            "give --power-model IDLE:BUSY in watts, measured once with a plug, or leave it out",
        )
    return PowerModel(power.idle_w, power.busy_w, f"profile {profile.name} ({power.watts_source})")


def read_labels(texts: Sequence[str]) -> dict[str, str]:
    """The environment's labels. Raises: UsageError."""
    labels: dict[str, str] = {}
    for text in texts:
        found = re.fullmatch(r"([a-z][a-z0-9_]*)=(\S(?:.*\S)?)", text)
        if found is None or found[1] in labels:
            raise UsageError(f"--label should be KEY=VALUE, each key once, found {text!r}", "such as fan=on")
        labels[found[1]] = found[2]
    return labels


def read_images(text: str) -> Images:
    """A number, or a folder. Raises: UsageError."""
    if re.fullmatch(r"[1-9][0-9]{0,3}", text) and int(text) <= DRAWN_MOST:
        return Images(None, int(text))
    if not os.path.isdir(text):  # a text that is too long for a name is no folder either
        raise UsageError(f"--images should be 1 to {DRAWN_MOST} or a folder, found {text!r}", "correct --images")
    return Images(Path(text))


def find_work(packages: Sequence[Verified], arguments: argparse.Namespace, threads: int, seed: int) -> list[Candidate]:
    """Every split point that the packages have. Raises: PackageError, UsageError."""
    if arguments.train:
        return parts(packages, arguments.batch, threads, seed)
    return frontends(packages, read_images(arguments.images), threads, seed)


def plan_of(arguments: argparse.Namespace, meter: Meter, seed: int) -> Plan:
    """Blocks as long as the meter needs, where nothing else was asked for."""
    timing = meter.timing
    needed_s = SLOW_BLOCK_S if timing.window_s + timing.doubt_s > SLOW_SENSOR_S else BLOCK_S
    block_s = needed_s if arguments.block_s is None else arguments.block_s
    if block_s < needed_s and meter.name != "none":
        say(f"blocks of {block_s:g} s are shorter than the {needed_s:g} s that the {meter.name} meter needs: the "
            "energy's bound says what that costs")  # fmt: skip
    return Plan(arguments.blocks, block_s, arguments.baseline_s, arguments.warm_up_s, arguments.cool_down_s, seed)


def plan_cap(arguments: argparse.Namespace, profile: Profile | None) -> CapPlan:
    """The limit that was given, or the profile's ceiling."""
    limit_c = arguments.limit_c
    if limit_c is None and profile is not None:
        limit_c = profile.ceilings.temperature_c
    block_s = min(BLOCK_S if arguments.block_s is None else arguments.block_s, arguments.hold_s)
    return CapPlan(block_s, arguments.hold_s, arguments.cool_down_s, limit_c)


def main() -> int:
    """Entry point of edge-profile."""
    stop_on_sigterm()  # so that no copy of a package stays behind
    code = run_command(lambda: edge_profile(parser().parse_args(), os.environ, Path.cwd()))
    if workers_left():
        sys.stderr.flush()  # stdout was flushed by run_command
        os._exit(code)  # a run's worker that is still in native code must not crash the interpreter's end
    return code


if __name__ == "__main__":
    sys.exit(main())
