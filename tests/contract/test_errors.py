"""The error tree: what is drawn is what exists, and an error survives a process boundary."""

from __future__ import annotations

import copy
import inspect
import re

import pytest

import contract.errors as errors
from contract.errors import CutlayerError, RefusedError, suggest

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
