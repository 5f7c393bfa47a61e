"""Where the server's installed commands begin, before the modules that do the work are loaded."""

from __future__ import annotations

from contract.console import run_module


def server_run() -> int:
    """server-run."""
    return run_module("server_runtime.cli")


def server_status() -> int:
    """server-status."""
    return run_module("server_runtime.status_cli")


def leakage_profile() -> int:
    """leakage-profile."""
    return run_module("server_runtime.leakage.cli")
