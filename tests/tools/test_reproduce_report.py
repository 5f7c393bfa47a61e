"""What all studies of tools/reproduce do alike."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("timm")

from contract.errors import UsageError
from tools.reproduce_report import gather

STUDIES = ("eeft", "eft", "p3sl", "prototypes", "split")


@pytest.mark.parametrize("study", STUDIES)
def test_a_table_of_no_rows_is_refused_before_a_world_is_made(study: str, tmp_path: Path) -> None:
    command = importlib.import_module(f"tools.reproduce_{study}")
    with pytest.raises(UsageError, match="holds no finished row"):
        command.main(["--quick", "--table", "-o", str(tmp_path / "new")])
    assert list((tmp_path / "new").iterdir()) == []


def test_rows_that_another_command_is_at_are_no_missing_table(tmp_path: Path) -> None:
    options = argparse.Namespace(table=False, stop_after_s=None)
    with pytest.raises(UsageError, match="another command is at every row"):
        gather(options, tmp_path, ["cell"], 0.0, lambda cell, may_compute, which: None, str)
    options.table = True
    with pytest.raises(UsageError, match="holds no finished row"):
        gather(options, tmp_path, ["cell"], 0.0, lambda cell, may_compute, which: None, str)
