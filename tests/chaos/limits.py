"""Starts one of the product's commands with other limits than its own, so that a test need not wait for them.

    python -m tests.chaos.limits contract.session:SessionLimits.silence_s=4 ... -- edge_runtime.cli ARGUMENTS

A name is a field of a frozen dataclass of limits, or a constant of a module (`edge_runtime.pipeline:CONSTANT=0`); its
default is replaced before the command begins. `write_command` writes such starts as scripts, called like the commands.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = {"edge-run": "edge_runtime.cli", "server-run": "server_runtime.cli"}
SILENCE_S = 3.0
SHORT_SILENCE = (
    f"contract.session:SessionLimits.silence_s={SILENCE_S}",
    "server_runtime.admission:Terms.heartbeat_s=1.0",
)
DEVICE_SHORT_SILENCE = (SHORT_SILENCE[0], "edge_runtime.client:ClientLimits.open_s=2.0")
# Of a test's two devices no server is knocked down.
QUICK_RETURN = tuple(f"edge_runtime.reconnect:BackoffLimits.{each}" for each in ("first_s=0.1", "early_longest_s=0.5"))
SMALL_BATCHES = ("edge_runtime.pipeline:BATCH_SAMPLES_MAX=2",)  # an upload of twelve images is six messages, not one


def write_command(folder: Path, name: str, limits: tuple[str, ...]) -> Path:
    """An executable `name` in `folder` that starts that command under these limits."""
    folder.mkdir(exist_ok=True)
    script = folder / name
    start = f'"{sys.executable}" -m tests.chaos.limits {" ".join(limits)} -- {MODULES[name]} "$@"'
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec {start}\n')
    script.chmod(0o755)
    return script


def replace_default(setting: str) -> None:
    name, value = setting.split("=")
    module, _, path = name.partition(":")
    owner, _, field = path.rpartition(".")
    found = importlib.import_module(module)
    if not owner:
        setattr(found, field, type(getattr(found, field))(value))
        return
    limits = getattr(found, owner)
    default = next(each.default for each in dataclasses.fields(limits) if each.name == field)
    with_default = [each.name for each in dataclasses.fields(limits) if each.default is not dataclasses.MISSING]
    values = list(limits.__init__.__defaults__)
    values[with_default.index(field)] = type(default)(value)
    limits.__init__.__defaults__ = tuple(values)


def main() -> int:
    split = sys.argv.index("--")
    settings, module, arguments = sys.argv[1:split], sys.argv[split + 1], sys.argv[split + 2 :]
    for setting in settings:
        replace_default(setting)
    sys.argv = [module, *arguments]
    code: int = importlib.import_module(module).main()
    return code


if __name__ == "__main__":
    sys.exit(main())
