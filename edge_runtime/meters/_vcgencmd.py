"""What a Raspberry Pi's firmware answers to `vcgencmd`; under another root, what a recording of one says it answered.

What the words mean is left to the callers.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

TIMEOUT_S = 2.0
RECORDED = Path("vcgencmd")  # folder of a recording, one file per question

Ask = Callable[[str], str]  # the question -> the answer; raises OSError or ValueError


def vcgencmd_of(root: Path) -> Ask:
    """Asks this machine's firmware, or the recording under `root`."""
    return _ask_firmware if root == Path("/") else lambda question: (root / RECORDED / question).read_text()


def _ask_firmware(question: str) -> str:
    command = shutil.which("vcgencmd")
    if command is None:
        raise OSError("there is no vcgencmd; install the package libraspberrypi-bin or raspi-utils")
    try:
        done = subprocess.run([command, question], capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"vcgencmd did not answer within {TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()[:200]
        raise OSError(f"vcgencmd failed ({said}); let this user into the group video, which may open /dev/vcio")
    return done.stdout
