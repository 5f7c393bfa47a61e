"""Settings that commands share with server-run: the same flags, variables and file, fewer of them needed.

What a setting means is left to `plan`.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from contract.config import REQUIRED, find_file, resolve
from contract.console import ArgumentParser

from ..plan import FIELDS


def add_settings(parser: ArgumentParser, *names: str) -> None:
    """Flags for these settings, and for the file that has them."""
    for field in FIELDS:
        if field.name in names:
            parser.add_argument("--" + field.name.replace("_", "-"), metavar="PATH", help=field.help)
    parser.add_argument("--config", type=Path, metavar="FILE", help="default: ./cutlayer.toml, where it exists")


def settle(arguments: argparse.Namespace, *needed: str) -> dict[str, Any]:
    """All settings by name; only those needed must be somewhere.

    Raises: ConfigError.
    """
    known = [
        replace(field, default=None) if field.default is REQUIRED and field.name not in needed else field
        for field in FIELDS
    ]
    flags = {field.name: getattr(arguments, field.name, None) for field in FIELDS}
    return resolve("server", known, flags, os.environ, find_file(arguments.config, Path())).values
