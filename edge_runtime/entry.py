"""Where the device's installed commands begin, before the modules that do the work are loaded."""

from __future__ import annotations

from contract.console import run_module
from edge_runtime.stopping import stop_on_sigterm


def edge_run() -> int:
    """edge-run."""
    stop_on_sigterm()
    return run_module("edge_runtime.cli")


def edge_profile() -> int:
    """edge-profile."""
    stop_on_sigterm()
    return run_module("edge_runtime.profiling.cli")


def edge_doctor() -> int:
    """edge-doctor."""
    return run_module("edge_runtime.doctor")
