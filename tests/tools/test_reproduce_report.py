"""What all studies of tools/reproduce do alike."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("timm")

from contract.errors import UsageError

STUDIES = ("eeft", "eft", "p3sl", "prototypes", "split")


@pytest.mark.parametrize("study", STUDIES)
def test_a_table_of_no_rows_is_refused_before_a_world_is_made(study: str, tmp_path: Path) -> None:
    command = importlib.import_module(f"tools.reproduce_{study}")
    with pytest.raises(UsageError, match="holds no finished row"):
        command.main(["--quick", "--table", "-o", str(tmp_path / "new")])
    assert list((tmp_path / "new").iterdir()) == []
