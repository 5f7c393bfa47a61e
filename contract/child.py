"""A module of ours that runs as a child: on Linux it ends with its parent, also where that was killed.

A child whose parent is gone would go on for hours, and write into folders that the next start takes for its own. The
parent starts this file, which asks the system for that end and then becomes the module. What the module does is left to
it; it must bear being killed at any instant.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def run_child(module: str, arguments: Sequence[str], stdout: int) -> int:
    """Run `python -m module`, with its stdout to that descriptor; returns its exit code.

    Call it from the main thread: to the system, a child's parent is the thread that started it.
    """
    words = [sys.executable, "-m", "contract.child", str(os.getpid()), module, *arguments]
    return subprocess.run(words, stdout=stdout, check=False).returncode


def _become(parent: int, module: str, arguments: Sequence[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # where it is refused, nothing is worse
    if os.getppid() == parent:  # else it died before it could be asked for
        os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
