"""Settings that commands share with a run: the same flags, variables and file, fewer of them needed.

What a setting means is left to `config`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from contract.console import ArgumentParser
from contract.names import check_name
from edge_runtime.config import FIELDS, NAME_CURE, resolve_config


def add_settings(parser: ArgumentParser, *names: str) -> None:
    """Flags for these settings, and for the file that has them."""
    for field in FIELDS:
        if field.name in names:
            parser.add_argument("--" + field.name.replace("_", "-"), metavar=field.name.upper(), help=field.help)
    parser.add_argument("--config", type=Path, metavar="FILE", help="default: ./edge.toml or ./cutlayer.toml")


def settle(arguments: argparse.Namespace, *needed: str) -> dict[str, Any]:
    """All settings by name; only those needed must be somewhere.

    Raises: ConfigError.
    """
    flags = {field.name: getattr(arguments, field.name, None) for field in FIELDS}
    values = dict(resolve_config(flags, os.environ, arguments.config, Path.cwd(), needed).values)
    if "name" in needed:
        check_name(values["name"], "the device's name", NAME_CURE)
    return values
