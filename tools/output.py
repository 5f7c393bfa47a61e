"""The folder that a tool works in: the one rule of all commands, under the name by which tools ask for it."""

from __future__ import annotations

from contract.output import open_output

__all__ = ["open_output"]
