"""The one rule for names of sites, devices and runs: they become names of files and folders, on both sides of the wire.

Which names are known is left to the roster and the run directories.
"""

from __future__ import annotations

import re

from contract.errors import ConfigError

CHARACTERS_MOST = 64
NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{CHARACTERS_MOST - 1}}}")


def is_name(text: str) -> bool:
    """No separators, no leading dot: nothing that could leave a folder."""
    return NAME.fullmatch(text) is not None


def check_name(name: str, what: str, cure: str = "rename it") -> str:
    """Return `name` when it is safe as a file name.

    Raises: ConfigError for another character than letters, digits, dot, dash and underscore, or more than 64.
    """
    if not is_name(name):
        raise ConfigError(
            f"{what} {name!r} is not a name: letters, digits, '.', '-' and '_' only, at most {CHARACTERS_MOST}, no "
            "leading dot",
            cure,
        )
    return name
