"""Write a hardened systemd unit that runs edge-run with a settings file, and say how to start it."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

from contract.config import find_file
from contract.console import ArgumentParser, say
from contract.errors import ConfigError, UsageError
from edge_runtime.commands._settings import settle
from edge_runtime.config import FILES, SECTION, device_config
from edge_runtime.unit import NAME, Service, unit_text

UNITS = Path("/etc/systemd/system")

_RULES = (
    ("--user", r"[A-Za-z_][A-Za-z0-9_-]{0,30}", "the name of a user"),
    ("--allow-device", r"(/dev/|char-|block-)[A-Za-z0-9_./:*-]+", "a device node such as /dev/vcio, or char-NAME"),
    ("--memory-max", r"[0-9]+[KMGT%]?", "a number with K, M, G, T or %"),
)


def configure(parser: ArgumentParser) -> None:
    """Which settings, and what the service may use."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="default: ./edge.toml or ./cutlayer.toml")
    parser.add_argument("--infer", action="store_true", help="predict instead of adapting")
    parser.add_argument("--user", metavar="NAME", help="run as this user; default: one of the service's own")
    parser.add_argument(
        "--allow-device", action="append", default=[], metavar="NODE", help="such as /dev/vcio; repeat for more"
    )
    parser.add_argument("--memory-max", metavar="SIZE", help="such as 800M; default: no limit")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help=f"default: {UNITS / (NAME + '.service')}; - prints it"
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises: ConfigError where settings are missing, or the unit cannot be written."""
    for flag, pattern, wanted in _RULES:
        given = getattr(arguments, flag.removeprefix("--").replace("-", "_"))
        for value in given if isinstance(given, list) else [given] * (given is not None):
            if not re.fullmatch(pattern, value):  # a line break here would be a directive of its own
                raise UsageError(f"{flag} should be {wanted}, found {value!r}", f"correct {flag}")
    service = plan_service(arguments)
    text = unit_text(service)
    if arguments.output == Path("-"):
        print(text, end="")
        return 0
    path: Path = arguments.output or UNITS / f"{NAME}.service"
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}", "run it as root (sudo), or give -o FILE and copy it yourself"
        ) from error
    say(f"wrote {path}")
    say(f"start it: systemctl daemon-reload && systemctl enable --now {path.stem}")
    say(f"watch it: journalctl -u {path.stem} -o cat; edge-run status --state /var/lib/{NAME}")
    return 0


def plan_service(arguments: argparse.Namespace) -> Service:
    """What the unit depends on, from the settings file: nothing that only this shell knows is used.

    Raises: ConfigError.
    """
    file = find_file(arguments.config, Path.cwd(), FILES)
    if file is None:
        raise ConfigError(
            f"there is no settings file: a service takes its settings from [{SECTION}] of one",
            "write edge.toml and give it with --config",
        )
    values = settle(argparse.Namespace(config=file), "engine", "data", "server", "trust", "key", "name")
    config = device_config(values | {"state": values["state"] or Path("/var/lib") / NAME})
    program = shutil.which("edge-run") or str(Path(sys.argv[0]).resolve())
    readable = [Path(config.engine), config.data, config.trust, file]
    readable += [
        path for path in (config.ca, config.certificate, config.classes, config.plug_account) if path is not None
    ]
    return Service(
        command=(program, *(["--infer"] if arguments.infer else []), "--config", str(file.resolve())),
        key=config.key.resolve(),
        site_secret=None if config.site_secret is None else config.site_secret.resolve(),
        certificate_key=None if config.certificate_key is None else config.certificate_key.resolve(),
        readable=tuple(path.resolve() for path in readable),
        user=arguments.user,
        devices=tuple(arguments.allow_device),
        memory_max=arguments.memory_max,
    )
