"""Which Python owns TensorRT on this device, and what is missing for this one to use it. Nothing is imported."""

from __future__ import annotations

import importlib.metadata
import sys
from importlib.util import find_spec
from pathlib import Path

from edge_runtime.engines.tensorrt import LIBRARIES

PLACES = ("usr/lib/python3*/dist-packages", "usr/local/lib/python3*/dist-packages", "usr/lib/python3*/site-packages")


def look(root: Path) -> tuple[str, ...]:
    """Lines for a person: what this Python has, or which of the system's under `root` has it, and the cure."""
    here = next((name for name in LIBRARIES if find_spec(name)), None)
    if here is not None:
        lines = [f"{here} {version_of(here)} in this Python ({sys.executable})"]
    else:
        lines = list(elsewhere(root)) or ["not installed: a Jetson has it from JetPack, elsewhere pip install tensorrt"]
    if find_spec("pycuda"):
        lines.append(f"pycuda {version_of('pycuda')}")
    elif here is not None:
        lines.append("pycuda is missing: pip install 'cutlayer[tensorrt]' (compiles with CUDA's nvcc, some minutes)")
    return tuple(lines)


def elsewhere(root: Path) -> list[str]:
    """A line for each of the system's Pythons that has TensorRT and is not this one."""
    lines = []
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    for pattern in PLACES:
        for place in sorted(root.glob(f"{pattern}/tensorrt")):
            owner = place.parent.parent.name.removeprefix("python")
            cure = f"make the environment with python{owner} -m venv --system-site-packages"
            if "." in owner and owner != own:
                cure += f" (this one is {own}, for which there is no such TensorRT)"
            lines.append(f"the system's Python {owner} owns it ({place.parent}), this one does not see it: {cure}")
    return lines


def version_of(name: str) -> str:
    """As its installation tells."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"
