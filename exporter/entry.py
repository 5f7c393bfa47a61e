"""Where export-frontend begins, before torch is loaded."""

from __future__ import annotations

from contract.console import run_module


def export_frontend() -> int:
    """export-frontend."""
    return run_module("exporter.cli")
