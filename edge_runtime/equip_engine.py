"""The engine that a device runs: the one asked for on this device's own weights, or another with the reason said.

Which one is asked for is `package_choice`'s part, what an engine does its own file's. TensorRT differs from the others:
it runs a plan, which `plans` keeps or builds, and what passed the golden vectors when the package was installed is
onnxruntime, by which the plan is judged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from contract.errors import ConfigError, EngineError
from contract.images import normalise
from edge_runtime.engines import Engine, open_engine
from edge_runtime.install import GOLDEN_NAME, Installed, read_golden
from edge_runtime.int8_check import int8_lost, quantized_layers
from edge_runtime.package_choice import DEFAULT_ENGINE, PLANNED_ENGINE, PackageChoice
from edge_runtime.transforms.weight_noise import keys_of, noise_frontend

Say = Callable[[str], None]


@dataclass(frozen=True)
class EngineFacts:
    """What runs the package's graphs, for the report; None where it does not apply."""

    name: str
    threads: int
    int8_layers: int | None
    linear_layers: int | None
    int8_lost: str | None  # why fewer layers ran as int8 than were quantized
    plans: tuple[str, ...] = ()  # what was measured of each TensorRT plan, in words


@dataclass(frozen=True)
class Opened:
    """The engine, the choice with the reason when it is another than asked for, the share of weight codes that noise
    changed, and what was measured of TensorRT's plans."""

    engine: Engine
    choice: PackageChoice
    changed_share: float
    plans: tuple[str, ...] = ()


def installing_engine(engine: str) -> str:
    """The engine that runs a package's golden vectors."""
    return DEFAULT_ENGINE if engine == PLANNED_ENGINE else engine


def noised_file(installed: Installed, alpha: float, secret: bytes, engines: Path, say: Say) -> tuple[Path, float]:
    """The frontend with this device's noise on its weights, in the folder `engines`, and the share of changed codes.

    Raises: ConfigError when the package has no weights that noise can act on; DeviceError.
    """
    if alpha <= 0.0:
        return installed.onnx, 0.0
    if not installed.cut.weights:
        raise ConfigError(
            f"alpha {alpha} asks for weight noise, and the package has no int8 weights",
            "set alpha = 0, or export the package with --int8",
        )
    path, noise = noise_frontend(
        installed.onnx, installed.cut.weights, alpha, keys_of(secret, installed.digest), engines, say
    )
    return path, noise.changed_share


def open_noised(
    engine: str, installed: Installed, alpha: float, secret: bytes, threads: int, engines: Path, say: Say
) -> tuple[Engine, float]:
    """An engine that opens the file itself, and the share of changed codes. Raises: as `noised_file`; EngineError."""
    path, changed_share = noised_file(installed, alpha, secret, engines, say)
    return open_engine(engine, path, threads), changed_share


def open_chosen(
    choice: PackageChoice, installed: Installed, alpha: float, secret: bytes, threads: int, engines: Path, plans: Path,
    required: str | None, check: Callable[[], None], say: Say,
) -> Opened:  # fmt: skip
    """The engine of `choice`; where TensorRT cannot serve, onnxruntime with the reason, unless it is `required`.

    `check` raises to stop. Raises: as `open_noised`; what `check` raises.
    """
    path, changed_share = noised_file(installed, alpha, secret, engines, say)
    if choice.engine != PLANNED_ENGINE:
        return Opened(open_engine(choice.engine, path, threads), choice, changed_share)
    try:
        engine, words = open_plan(path, installed, secret, threads, plans, check, say)
    except EngineError as error:
        if required == PLANNED_ENGINE:
            raise
        reason = f"TensorRT cannot serve, {DEFAULT_ENGINE} runs instead: {error.cause}"
        say(f"{reason}\n  cure: {error.cure}")
        instead = replace(choice, engine=DEFAULT_ENGINE, fallback_reason=reason)
        return Opened(open_engine(DEFAULT_ENGINE, path, threads), instead, changed_share)
    return Opened(engine, choice, changed_share, words)


def open_plan(
    path: Path, installed: Installed, secret: bytes, threads: int, plans: Path, check: Callable[[], None], say: Say
) -> tuple[Engine, tuple[str, ...]]:
    """TensorRT on a plan of the file, and a line about each plan that was tried. Raises: EngineError."""
    from edge_runtime.plans.choose import Frontend, in_words, open_planned  # for the few devices that have TensorRT
    from edge_runtime.plans.store import PlanStore

    manifest, cut, mark = installed.manifest, installed.cut, keys_of(secret, installed.digest)
    pixels, _ = read_golden(installed.folder / GOLDEN_NAME, manifest, cut)
    images = normalise(pixels, manifest.image)

    def reference() -> NDArray[np.float32]:
        return open_engine(DEFAULT_ENGINE, path, threads).run(images)

    store = PlanStore(plans, lambda data: mark("plan", data).hex())
    engine, record = open_planned(Frontend(path, cut.tokens.patches, images, reference), store, check, say)
    return engine, tuple(map(in_words, record.tried))


def engine_facts(opened: Opened, installed: Installed) -> EngineFacts:
    """What the engine that was opened is and does."""
    engine = opened.engine
    quantized = quantized_layers((each.name, each.shape) for each in installed.cut.weights)
    linear = quantized + len(installed.manifest.quantization.float_weights)
    ran = None if engine.kernels is None else engine.kernels.int8
    lost = int8_lost(engine.kernels, quantized)
    return EngineFacts(f"{engine.name} {engine.version}", engine.threads, ran, linear, lost, opened.plans)
