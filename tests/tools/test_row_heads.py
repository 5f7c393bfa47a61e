"""Names and heads of the rows that studies compute by default: rows from elsewhere are found and believed by them.

`row_heads.json` has, for each study and world, the first row's, and a digest of all in their order. Where one changes
on purpose, rows of before are no longer read: raise that study's ROW_SCHEMA, and write the file anew.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("timm")

GOLDEN = json.loads(Path(__file__).with_name("row_heads.json").read_text())
MODULES = {
    "eeft": "reproduce_eeft", "p3sl": "reproduce_p3sl", "prototypes": "reproduce_prototypes",
    "eft_vit": "reproduce_eft", "split": "reproduce_split",
}  # fmt: skip
PACKAGE = hashlib.sha256(b"{}").hexdigest()


def heads(study: str, world_name: str) -> list[Any]:
    """(file name, head) of all rows, JSON's way."""
    module: Any = importlib.import_module(f"tools.{MODULES[study]}")
    epochs = {name: SimpleNamespace(local_epochs=count) for name, count in (("task", 1), ("user", 2))}
    scenarios = {**epochs, "environment": SimpleNamespace(local_epochs=3)}
    world = SimpleNamespace(name=world_name, names=lambda part: ["image"] * 7, scenarios=scenarios)
    world.split = world
    options = module.parse(["--quick"] if world_name == "quick" else [])
    cells = module.cells_of(options, module.RATES) if study == "eft_vit" else module.cells_of(options)
    found = []
    for cell in cells:
        head = module.head_of(options, world, cell, PACKAGE)
        found.append([module.path_of(Path("rows"), options, world, cell).name, head])
    return found


@pytest.mark.parametrize("world_name", ["quick", "full"])
@pytest.mark.parametrize("study", MODULES)
def test_rows_keep_their_names_and_heads(study: str, world_name: str) -> None:
    found, golden = heads(study, world_name), GOLDEN[study][world_name]
    assert found[0] == [golden["first_file"], golden["first_head"]]
    assert len(found) == golden["rows"]
    assert hashlib.sha256(json.dumps(found).encode()).hexdigest() == golden["sha256"]
