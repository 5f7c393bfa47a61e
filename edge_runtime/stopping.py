"""SIGTERM to a command of the device: a clean stop, which unwinds like any error and ends with exit code 0.

What a command does about signals while an event loop runs is `stop_signals`'s part.
"""

from __future__ import annotations

import signal

from contract.console import say


def stop_on_sigterm() -> None:
    """From now on; call it first of all, from the main thread."""
    signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: object) -> None:
    say("stopped before the work was done; nothing half-written is left")
    raise SystemExit(0)
