"""Commands of a command, such as `edge-run status`: each is a file of one folder, and its name is the command's.

What each does is its own file's part: `configure(parser)` adds its flags, `run(arguments)` gives the exit code, and the
first sentence of its docstring is its help. They are imported only when they are called.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Sequence
from types import ModuleType

from contract.console import ArgumentParser
from contract.errors import UsageError, suggest


def names(folder: ModuleType) -> tuple[str, ...]:
    """The commands of a folder, as they are typed."""
    found = (entry.name for entry in pkgutil.iter_modules(folder.__path__) if not entry.name.startswith("_"))
    return tuple(sorted(name.replace("_", "-") for name in found if not name.startswith("_")))


def run_named(prog: str, folder: ModuleType, arguments: Sequence[str]) -> int | None:
    """Run the command that the first argument names; None where it is a flag, or there is none.

    Raises: CutlayerError of the command; UsageError where there is no such command.
    """
    if not arguments or arguments[0].startswith("-"):
        return None
    if arguments[0] not in names(folder):
        raise UsageError(
            f"there is no command {arguments[0]!r} of {prog}{suggest(arguments[0], names(folder))}",
            f"see {prog} --help",
        )
    module = importlib.import_module(f"{folder.__name__}.{arguments[0].replace('-', '_')}")
    parser = ArgumentParser(f"{prog} {arguments[0]}", (module.__doc__ or "").split("\n\n")[0])
    module.configure(parser)
    code: int = module.run(parser.parse_args(arguments[1:]))
    return code


def epilog(prog: str, known: Iterable[str]) -> str:
    """What the help of the command says of its commands."""
    return f"Other commands: {', '.join(f'{prog} {name}' for name in known)} (each has --help)."
