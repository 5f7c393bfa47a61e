"""export-frontend from its command line: mistakes that are told before a model is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from exporter.cli import main


@pytest.mark.parametrize("more", [(), ("--for", "sequential_split", "--cuts", "1-2")], ids=["frontend", "parts"])
@pytest.mark.parametrize("output", ["FILE/front", "/proc/front"])
def test_a_place_that_cannot_be_written_is_told_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    output: str,
    more: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").touch()
    split = more or ("--split", "1")
    assert main(["--model", "no_such_model", *split, "-o", output]) == 2
    said = capsys.readouterr().err
    assert f"-o {output} cannot be written" in said and "signing key" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["FILE"]


def test_of_a_model_that_nobody_knows_the_nearest_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list-splits", "nonesuch"]) == 2
    said = capsys.readouterr().err
    assert "has no model 'nonesuch' (the nearest of " in said and len(said) < 500
