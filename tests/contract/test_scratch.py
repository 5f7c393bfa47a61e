"""A folder for work in hand: whose owner lives it is kept, whose owner was killed it is removed at the next start."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.scratch import remove_leftovers, scratch_folder

HOLD = """
import sys
from pathlib import Path
from contract.scratch import scratch_folder
with scratch_folder("copy-", parent=Path(sys.argv[1])) as folder:
    (folder / "package").mkdir()
    (folder / "package" / "front.onnx").write_text("a model")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process and the folder that it holds."""
    words = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_it_is_there_during_the_work_and_gone_after_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), scratch_folder(".front.", ".tmp", tmp_path) as folder:
        assert folder.parent == tmp_path and folder.name.startswith(".front.") and folder.name.endswith(".tmp")
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "deep" / "er").mkdir(parents=True)
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_a_living_process_stays(holder: tuple[subprocess.Popen[str], Path], tmp_path: Path) -> None:
    _, theirs = holder
    with scratch_folder("copy-", parent=tmp_path) as mine:
        assert (theirs / "package" / "front.onnx").is_file() and mine != theirs
    assert theirs.is_dir()


def test_what_a_killed_process_left_goes_at_the_next_start(
    holder: tuple[subprocess.Popen[str], Path], tmp_path: Path
) -> None:
    process, theirs = holder
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (theirs / "package" / "front.onnx").is_file()
    with scratch_folder("copy-", parent=tmp_path) as mine:
        assert list(tmp_path.iterdir()) == [mine]


def test_other_names_files_and_links_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "copy-file").write_text("mine")
    (tmp_path / "copy-link").symlink_to(tmp_path / "other")
    (tmp_path / "cop[y]-x").mkdir()
    remove_leftovers(tmp_path, "copy-")
    assert len(list(tmp_path.iterdir())) == 4
    remove_leftovers(tmp_path, "cop[y]-")
    assert not (tmp_path / "cop[y]-x").exists()
