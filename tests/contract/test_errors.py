"""The error tree: what is drawn is what exists, and an error survives a process boundary."""

from __future__ import annotations

import ast
import copy
import inspect
import re
from pathlib import Path

import pytest

import contract.errors as errors
from contract.errors import CutlayerError, RefusedError, suggest, why

ROOT = Path(__file__).parents[2]

CLASSES = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, CutlayerError)]


def make(kind: type[CutlayerError]) -> CutlayerError:
    if kind is RefusedError:
        return RefusedError("the run is full", "ask later", code="full", retry_after_s=30.0)
    return kind("the file is empty", "give another")


def test_the_drawn_tree_is_the_real_one() -> None:
    drawn = {}
    above: list[str] = []
    for indent, name, code in re.findall(r"^( +)(\w+) +(\d)", inspect.getdoc(errors) or "", re.MULTILINE):
        depth = len(indent) // 4 - 1
        above = [*above[:depth], name]
        drawn[name] = (above[-2] if depth else "Exception", int(code))
    assert drawn == {each.__name__: (each.__mro__[1].__name__, each.exit_code) for each in CLASSES}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_is_named_documented_and_says_cause_and_cure(kind: type[CutlayerError]) -> None:
    error = make(kind)
    assert kind.__name__.endswith("Error") and kind.__doc__
    assert str(error) == error.cause and error.cure
    assert isinstance(error, CutlayerError) and 1 <= error.exit_code <= 9


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_survives_a_child_process(kind: type[CutlayerError]) -> None:
    error = make(kind)
    twin = copy.copy(error)  # by __reduce_ex__, which is how multiprocessing carries it
    assert type(twin) is kind and vars(twin) == vars(error) and str(twin) == str(error)


def test_suggestions_name_the_nearest_or_all() -> None:
    assert suggest("Tensorr", ["tensorrt", "openvino"]) == " (did you mean 'tensorrt'?)"
    assert suggest("zzz", ["b", "a"]) == " (known: a, b)"
    assert suggest("zzz", []) == ""


def test_of_very_many_names_the_nearest_few_are_named() -> None:
    names = [f"model_{number}" for number in range(1000)]
    assert suggest("modl_7", names) == " (did you mean 'model_7'?)"
    text = suggest("nonesuch", names)
    assert text.startswith(" (the nearest of 1000: model_") and text.count(",") == 4 and len(text) < 100


def test_what_an_operating_system_says_is_told_without_its_number(tmp_path: Path) -> None:
    path = tmp_path / "none"
    with pytest.raises(OSError) as caught:
        path.read_bytes()
    assert why(caught.value, path) == "No such file or directory"
    assert why(caught.value, tmp_path) == f"No such file or directory ({path})"
    assert why(ValueError("one\ntwo")) == "one" and why(TimeoutError()) == "TimeoutError"


ROOMS = ("contract", "profiles", "edge_runtime", "exporter", "server_runtime")
OF_SYSTEM = {"OSError", "FileNotFoundError", "PermissionError", "DISK_ERRORS"}


def caught_names(handler: ast.ExceptHandler) -> set[str]:
    return {each.id for each in ast.walk(handler.type) if isinstance(each, ast.Name)} if handler.type else set()


def test_no_cause_has_the_bare_text_of_an_operating_system_s_error() -> None:
    """`[Errno 2] No such file or directory: 'x'` is no sentence: `why` makes one."""
    found = []
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        text = path.read_text()
        for handler in ast.walk(ast.parse(text)) if any(name in text for name in OF_SYSTEM) else ():
            if not isinstance(handler, ast.ExceptHandler) or not caught_names(handler) & OF_SYSTEM:
                continue
            bare = (
                each.value
                for each in ast.walk(ast.Module(handler.body, []))
                if isinstance(each, ast.FormattedValue) and isinstance(each.value, ast.Name)
            )
            found += [f"{path.relative_to(ROOT)}:{each.lineno}" for each in bare if each.id == handler.name]
    assert found == []
