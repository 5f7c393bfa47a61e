"""export-frontend from its command line: mistakes that are told before a model is made."""

from __future__ import annotations

import signal
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


@pytest.mark.parametrize(
    "flags", [("--sent-patches", "none"), ("--kappa", "1"), ("--alpha", "0.3"), ("--no-hilbert",), ("--tune", "none")]
)
def test_protection_that_parts_on_devices_do_not_have_is_refused(
    flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "vit_tiny_patch16_224", "--for", "sequential_split", "--split", "1", *flags]
    assert main([*words, "-o", str(tmp_path / "parts")]) == 2
    assert f"{flags[0]} is of frontends" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("seed", ["-5", "99999999999999999999999"])
def test_a_seed_that_no_generator_takes_is_refused(
    seed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "vit_tiny_patch16_224", "--seed", seed, "-o", str(tmp_path / "front")]
    assert main(words) == 2
    assert "63 bits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--list-splits", "vit_tiny_patch16_224", "--int8"], "--int8 has no part in --list-splits"),
        (["--add-table", "t.json", "front", "--kappa", "1"], "--kappa has no part in --add-table"),
        (["--model", "vit_tiny_patch16_224", "-o", "front", "--preview-steps", "5"], "--preview-steps is of --preview"),
    ],
)
def test_flags_that_would_change_nothing_are_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag", ["--weights", "--calibration", "--signing-key"])
def test_files_that_options_name_are_looked_for_first(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--model", "no_such_model", "--split", "1", "-o", "out/front", flag, "nowhere"]) == 2
    said = capsys.readouterr().err
    assert f"nowhere ({flag[2:].replace('-', '_')})" in said and f"cure: correct {flag}" in said
    assert not list(tmp_path.iterdir())


def test_a_model_that_nobody_knows_leaves_no_key_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    previous = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["--model", "no_such_model", "--split", "1", "-o", "out/front"]) == 2
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert "signing key" not in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.pem"))
