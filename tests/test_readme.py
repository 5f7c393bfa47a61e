"""The README names every tool, every installed command and every exit code."""

from __future__ import annotations

import re
from pathlib import Path

from contract import errors

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_every_tool_and_command_is_named() -> None:
    tools = [path for path in (ROOT / "tools").iterdir() if path.is_file() and path.read_bytes()[:2] == b"#!"]
    assert len(tools) >= 10
    words = set(re.findall(r"[\w/*-]+", README))
    missing = [path.name for path in tools if f"tools/{path.name}" not in words and path.name not in words]
    scripts = (ROOT / "pyproject.toml").read_text().split("[project.scripts]")[1].split("[tool")[0]
    missing += [name for name in re.findall(r"^([\w-]+) =", scripts, re.MULTILINE) if name not in words]
    assert not missing


def test_every_exit_code_is_in_the_table() -> None:
    classes = [each for each in vars(errors).values() if isinstance(each, type) and hasattr(each, "exit_code")]
    codes = {each.exit_code for each in classes} | {0, 130, 141, 143}
    assert set(map(int, re.findall(r"^\| (\d+) \|", README, re.MULTILINE))) == codes
