"""Which package and which engine `--engine` names, and why another engine than the one asked for will run.

The package's contents are not looked at; that is left to `install`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from contract.errors import ConfigError, suggest
from contract.manifest import MANIFEST_NAME
from edge_runtime.engines import engine_names, offered_engines
from edge_runtime.engines.tensorrt import LIBRARIES

DEFAULT_ENGINE = "onnxruntime"
PLANNED_ENGINE = "tensorrt"
PLANNED_NEEDS = ((LIBRARIES, "TensorRT's Python package is not installed"), (("pycuda",), "pycuda is not installed"))
ENGINE_OF_SUFFIX = {"onnx": DEFAULT_ENGINE, "plan": PLANNED_ENGINE}  # any other suffix is an engine's own name


@dataclass(frozen=True)
class PackageChoice:
    """The package folder, the engine that will run, and the reason when it is not the one asked for."""

    folder: Path
    engine: str
    fallback_reason: str | None


def choose_package(spec: str) -> PackageChoice:
    """Read `DIR`, `DIR/front.onnx`, `DIR/front.plan`, or `NAME.plan` for the package `NAME/` beside it.

    A plan is a cache of the package, built where it runs and kept in the device's state: the file itself need not
    exist, and one that lies there is not opened. The folder alone means TensorRT where it is installed.
    Raises: ConfigError when no package folder fits, or the suffix names no engine.
    """
    path = Path(spec)
    if (path / MANIFEST_NAME).is_file():
        return PackageChoice(path, DEFAULT_ENGINE if missing_for_plans() else PLANNED_ENGINE, None)
    if path.is_dir():
        raise ConfigError(
            f"{path} is not a package: it has no {MANIFEST_NAME}",
            "give the folder that export-frontend wrote (not its .backend twin)",
        )
    suffix = path.suffix.removeprefix(".")
    if not suffix:
        raise ConfigError(f"there is no package folder {path}", "give the folder that export-frontend wrote")
    folder = next((place for place in (path.parent, path.with_suffix("")) if (place / MANIFEST_NAME).is_file()), None)
    if folder is None:
        raise ConfigError(
            f"{path} names the package folder {path.with_suffix('')}/, which does not exist or has no {MANIFEST_NAME}",
            "copy the package folder that export-frontend wrote to the device; plans are built from it, never copied",
        )
    return choose_engine(folder, ENGINE_OF_SUFFIX.get(suffix, suffix))


def choose_engine(folder: Path, asked: str) -> PackageChoice:
    """The engine asked for if this device has it, else ONNX Runtime with the reason said."""
    if asked not in engine_names():
        raise ConfigError(f"no engine is called {asked!r}{suggest(asked, offered_engines())}", "correct --engine")
    reason = missing_for_plans() if asked == PLANNED_ENGINE else None
    if reason is None:
        return PackageChoice(folder, asked, None)
    return PackageChoice(folder, DEFAULT_ENGINE, f"TensorRT was asked for, {DEFAULT_ENGINE} runs instead: {reason}")


def missing_for_plans() -> str | None:
    """What TensorRT lacks here, without importing anything; None where nothing is missing to try it."""
    for names, reason in PLANNED_NEEDS:
        if not any(find_spec(name) for name in names):
            return reason
    return None
