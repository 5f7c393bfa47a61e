"""Which extra of this package brings a library that a device's install lacks, and what to say where it is missing."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from contract.errors import ConfigError

EXTRAS: Mapping[str, str] = {
    "onnx": "export", "onnxscript": "export", "torch": "server", "timm": "server", "piq": "attack",
}  # fmt: skip


def lacks(module: str) -> ConfigError | None:
    """What to say of a module that could not be imported; None of one that no extra brings."""
    name = module.split(".")[0]
    if name not in EXTRAS:
        return None
    cure = f"pip install 'cutlayer[{EXTRAS[name]}]'"
    return ConfigError(f"this command needs {name}, which is not installed here", cure)


def require(*modules: str) -> None:
    """Raises: ConfigError for the first that is not installed."""
    for module in modules:
        if find_spec(module) is None and (found := lacks(module)) is not None:
            raise found
