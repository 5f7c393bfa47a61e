"""The commands that pyproject.toml installs: each exists, answers --help, and names a mistyped verb's nearest."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
SCRIPTS: dict[str, str] = tomllib.loads(PYPROJECT.read_text())["project"]["scripts"]
OF_SERVERS = ("exporter", "server_runtime")


def call(script: str, *words: str) -> int:
    """The entry point, as the installed script calls it."""
    module, _, function = SCRIPTS[script].partition(":")
    if module.startswith(OF_SERVERS):
        pytest.importorskip("torch")
        pytest.importorskip("timm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *words])
        try:
            return int(getattr(importlib.import_module(module), function)())
        except SystemExit as left:
            return int(left.code or 0)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_installed_command_exists_and_helps(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(script, "--help") == 0
    assert capsys.readouterr().out.startswith(f"usage: {script}")


@pytest.mark.parametrize(
    ("script", "typed", "meant"),
    [
        ("server-run", "foget", "forget"),
        ("edge-run", "stauts", "status"),
        ("edge-run", "enroll", "enrol"),
    ],
)
def test_a_mistyped_verb_gets_the_nearest(
    script: str, typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(script, typed, "--state", "x") == 2
    assert f"no command {typed!r} of {script} (did you mean {meant!r}?)" in capsys.readouterr().err
