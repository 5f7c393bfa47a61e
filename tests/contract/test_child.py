"""A module of ours as a child: its exit code is told, and it does not outlive a parent that was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from contract.child import run_child

# A parent whose child says who it is and then waits for the end of a pipe that the test alone holds open.
PARENT = "from contract.child import run_child; run_child('holding', [], 1)"
HOLDING = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read(); print('outlived', flush=True)"


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[2])])}


def test_words_and_exit_code_pass_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaving.py").write_text("import sys; sys.exit(int(sys.argv[1]) + len(sys.argv))")
    monkeypatch.setenv("PYTHONPATH", environment(tmp_path)["PYTHONPATH"])
    assert run_child("leaving", ["5", "two words"], subprocess.DEVNULL) == 8


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_it_ends_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "holding.py").write_text(HOLDING)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(tmp_path)
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        assert int(parent.stdout.readline()) != parent.pid
        parent.kill()
        assert parent.stdout.read() == b""  # the child's end of the pipe is closed, and it never went on
