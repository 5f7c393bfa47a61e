"""Write one file for whoever helps: versions, this device's kind, how the run stands and its last words, redacted."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from contract.console import ArgumentParser, print_document, say
from edge_runtime.commands._settings import add_settings, settle

PACKAGES = ("cutlayer", "numpy", "onnxruntime", "websockets", "pillow", "cryptography", "safetensors", "psutil")


def configure(parser: ArgumentParser) -> None:
    """Of which state; the other settings say which words are private."""
    add_settings(parser, "state", "server", "name", "data", "engine", "classes")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: stdout")


def run(arguments: argparse.Namespace) -> int:
    """Raises: ConfigError."""
    import io
    from contextlib import redirect_stdout

    from edge_runtime.state import write_output

    values = settle(arguments, "state")
    text = io.StringIO()
    with redirect_stdout(text):
        print_document("edge-run-report", bundle(values))
    if arguments.output is None:
        print(text.getvalue(), end="")
    else:
        write_output(arguments.output, text.getvalue().encode())
        say(f"wrote {arguments.output}: look through it before you send it")
    return 0


def bundle(values: dict[str, Any]) -> dict[str, Any]:
    """What the file says."""
    from edge_runtime.redaction import redact_all
    from edge_runtime.status_file import read_status
    from profiles.detect import detect

    status = read_status(values["state"])
    private = [str(value) for name, value in values.items() if name in ("server", "name", "data", "engine", "state")]
    run = status["run"] or {}
    private += [str(run[name]) for name in ("device", "server", "run") if run.get(name)]
    return {
        "versions": {"python": platform.python_version(), **{name: installed(name) for name in PACKAGES}},
        "system": {"machine": platform.machine(), "kernel": platform.release(), "profile": detect(Path("/"))},
        "status": redact_all(status, private),
    }


def installed(name: str) -> str | None:
    """None where the package is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
