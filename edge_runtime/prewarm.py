"""edge-run --prewarm: everything that takes long is done before the first run: package installed, weights noised, plan
built. No server, no images.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from contract.signature import key_id, load_public
from edge_runtime.config import PrewarmConfig
from edge_runtime.cpus import allowed_affinity, usable_cpus
from edge_runtime.delivery import check_stop
from edge_runtime.engines import open_engine
from edge_runtime.engines.tensorrt import TensorRtEngine
from edge_runtime.equip import check_required
from edge_runtime.equip_engine import EngineFacts, engine_facts, installing_engine, open_chosen
from edge_runtime.install import install
from edge_runtime.package_choice import choose_package
from edge_runtime.state import open_secret, open_state
from edge_runtime.terms import protection


@dataclass(frozen=True)
class Prewarmed:
    """What the next run will find ready."""

    package: str
    package_version: int
    package_digest: str
    engine: str
    engine_fallback: str | None
    int8_layers: int | None
    linear_layers: int | None
    alpha: float
    plans: tuple[str, ...]


def prewarm(config: PrewarmConfig, stop: threading.Event, say: Callable[[str], None]) -> Prewarmed:
    """Raises: PackageError and the other errors of `install`; EngineError; ConfigError; DeviceError; Stopped."""
    publisher = load_public(config.trust)
    choice = choose_package(config.engine)
    check_required(choice, config.require)
    threads = config.threads or usable_cpus(allowed_affinity())
    state = open_state(config.state)
    try:
        secret, _ = open_secret(state.device_secret, "device secret")
        name = installing_engine(choice.engine)
        installed = install(
            choice.folder, state.packages, {key_id(publisher): publisher},
            lambda path: open_engine(name, path, threads), say,
        )  # fmt: skip
        _, alpha = protection(None, config.alpha, installed.manifest)
        opened = open_chosen(
            choice, installed, alpha, secret, threads, state.engines, state.plans, config.require,
            lambda: check_stop(stop), say,
        )  # fmt: skip
        facts: EngineFacts = engine_facts(opened, installed)
        if isinstance(opened.engine, TensorRtEngine):
            opened.engine.close()
    finally:
        state.close()
    manifest = installed.manifest
    return Prewarmed(
        manifest.name, manifest.version, installed.digest.hex(), facts.name, opened.choice.fallback_reason,
        facts.int8_layers, facts.linear_layers, alpha, facts.plans,
    )  # fmt: skip


def in_words(ready: Prewarmed) -> str:
    """For a person on a terminal."""
    count = "an unknown number" if ready.int8_layers is None else str(ready.int8_layers)
    lines = [
        f"package   {ready.package} version {ready.package_version} ({ready.package_digest[:12]})",
        f"engine    {ready.engine}, int8 in {count} of {ready.linear_layers} linear layers, alpha {ready.alpha}",
    ]
    return "\n".join([*lines, *(f"          {text}" for text in (ready.engine_fallback, *ready.plans) if text)])
