"""The commands that pyproject.toml installs: each exists and answers --help."""

from __future__ import annotations

import importlib
import signal
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


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_installed_command_exists_and_helps(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, _, function = SCRIPTS[script].partition(":")
    if module.startswith(OF_SERVERS):
        pytest.importorskip("torch")
        pytest.importorskip("timm")
    entry = getattr(importlib.import_module(module), function)
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)  # this process keeps its own
    with pytest.raises(SystemExit) as left:
        entry()
    assert not left.value.code
    assert capsys.readouterr().out.startswith(f"usage: {script}")
