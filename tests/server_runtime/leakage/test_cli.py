"""leakage-profile from its command line: a table, a run that is stopped and goes on, and mistakes."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from contract.errors import ConfigError
from contract.image_folder import scan
from contract.leakage import Row, Settings, to_bytes
from contract.manifest import from_bytes
from server_runtime.leakage import cli as leakage_cli
from server_runtime.leakage.cli import main
from server_runtime.leakage.profiler import curve_of
from server_runtime.leakage.public import digest_of
from server_runtime.leakage.table import Table, kept_path, read_table
from tests import leakage_table

pytest.importorskip("piq", reason="SSIM and FSIM come from piq: install the extra attack")

QUICK = ("--attack", "ridge", "--noise", "0,0.5,2")


@pytest.fixture(scope="module")
def exports() -> Path:
    given = os.environ.get("CUTLAYER_TEST_PACKAGE")
    if given is None:
        pytest.skip("packages are made by tests.make_package: run tools/test, or set CUTLAYER_TEST_PACKAGE")
    return Path(given)


@pytest.fixture(autouse=True)
def short_classifier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server_runtime.leakage.classifier.STEPS", (20, 20))


def profile(exports: Path, output: Path, *more: str, name: str = "front") -> int:
    given = ["--package", str(exports / name), "--public", str(exports / "public"), "-o", str(output)]
    return main([*given, *(more or QUICK)])


def without_times(table: Table) -> Table:
    rows = tuple(
        dataclasses.replace(row, attacks=tuple(dataclasses.replace(each, time_s=0.0) for each in row.attacks))
        for row in table.rows
    )
    return dataclasses.replace(table, rows=rows, attacks_s=0.0)


def test_a_table_of_a_frontend(exports: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "leakage.json"
    assert profile(exports, output) == 0
    table = read_table(output)
    assert [(row.strength, row.protected) for row in table.rows] == [
        (0.0, False),
        (0.0, True),
        (0.5, True),
        (2.0, True),
    ]
    assert table.unit == "kappa" and len(table.curve) == 41
    for name in ("psnr_db", "ssim", "fsim"):
        values = [getattr(point, name) for point in table.curve]
        assert all(later <= earlier + 1e-12 for earlier, later in zip(values, values[1:], strict=False))
    first, last = (table.rows[place].attacks[0].figures for place in (0, -1))
    assert first.psnr_db > last.psnr_db + 2.0 and first.ssim > last.ssim
    assert first.psnr_db > table.baselines.mean_colour.psnr_db + 3.0
    assert table.threshold.fsim is None and "too few" in table.threshold.reason or "chance" in table.threshold.reason
    assert first.lpips is None and table.lpips_unknown
    printed = capsys.readouterr().out
    assert "unprotected" in printed and "mean colour" in printed and "unrelated image" in printed
    assert "9 images attacked" in printed
    assert not kept_path(output).exists()


def test_parts_that_devices_train_have_a_row_for_every_cut(
    exports: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "leakage.json"
    assert profile(exports, output, *QUICK, "--format", "json", name="parts") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema_version"], document["kind"], document["unit"]) == (1, "leakage-profile", "sigma")
    assert [(row["split"], row["strength"]) for row in document["rows"]] == [
        (split, strength) for split in (1, 2) for strength in (0.0, 0.5, 2.0)
    ]
    assert json.loads(output.read_bytes()) == document


def test_a_run_that_was_stopped_goes_on_and_ends_alike(
    exports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, halted = tmp_path / "whole.json", tmp_path / "halted.json"
    assert profile(exports, whole) == 0
    keep = leakage_cli.keep_rows

    def keep_and_stop(output: Path, settings: Settings, rows: list[Row]) -> None:
        keep(output, settings, rows)
        if len(rows) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(leakage_cli, "keep_rows", keep_and_stop)
    assert profile(exports, halted) == 130
    assert not halted.exists() and kept_path(halted).exists()
    monkeypatch.setattr(leakage_cli, "keep_rows", keep)
    capsys.readouterr()
    assert profile(exports, halted) == 0
    assert "going on after 2 rows" in capsys.readouterr().err
    assert without_times(read_table(halted)) == without_times(read_table(whole))


def test_rows_of_other_flags_are_not_mixed_in(
    exports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "leakage.json"

    def stop(*arguments: object) -> None:
        keep(*arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    keep = leakage_cli.keep_rows
    monkeypatch.setattr(leakage_cli, "keep_rows", stop)
    assert profile(exports, output) == 130
    assert profile(exports, output, *QUICK, "--seed", "7") == 2
    said = capsys.readouterr().err
    assert "other settings (seed)" in said and "to begin anew" in said


def test_a_white_box_attack_uses_the_backend_beside_the_package(exports: Path, tmp_path: Path) -> None:
    output = tmp_path / "leakage.json"
    more = ("--attack", "ridge", "--attack", "unsplit_white_box", "--noise", "0", "--steps", "5", "--images", "4")
    assert profile(exports, output, *more) == 0
    rows = read_table(output).rows
    assert [each.attack for each in rows[0].attacks] == ["ridge", "unsplit_white_box"]
    assert rows[0].images == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--attack", "rigde"), "did you mean 'ridge'"),
        (("--attack", "averaging"), "finds images and needs uploads; a table is of images"),
        (("--attack", "label_inference"), "finds labels"),
        (("--noise", "a,b"), "expected strengths"),
        (("--noise", "-1"), "expected"),
        (("--images", "0"), "expected a number of 1 or more"),
        (("--steps", "9" * 5000), "expected a number of 1 or more"),
        (("--seed", "\u00b2"), "expected a number of 0 or more"),
        (("--seed", "-1"), "expected a number of 0 or more"),
        (("-o", "/"), "is a folder"),
        (("-o", "/proc/table.json"), "-o /proc/table.json cannot be written"),
        (("-o", "/dev/null"), "is a pipe or a device"),
    ],
)
def test_mistakes_on_the_command_line_are_explained(
    exports: Path, tmp_path: Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile(exports, tmp_path / "leakage.json", *words) == 2
    shown = capsys.readouterr().err
    assert said in shown and len(shown) < 1000


def test_bad_folders_are_explained(exports: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "leakage.json")
    public, front = str(exports / "public"), str(exports / "front")
    for none in (public, str(tmp_path / "none")):  # as edge-run and edge-profile say it
        assert main(["--package", none, "--public", public, "-o", output]) == 2
        assert "is no package" in capsys.readouterr().err
    assert main(["--package", front, "--public", str(tmp_path / "none"), "-o", output]) == 5
    assert "cannot be read" in capsys.readouterr().err
    few = exports / "device-a" / "test" / "north"
    assert main(["--package", front, "--public", str(few), "-o", output]) == 5
    assert "takes 20" in capsys.readouterr().err


def sound_table(exports: Path) -> Table:
    manifest = from_bytes((exports / "front" / "manifest.json").read_bytes())
    table = leakage_table.leakage_table(manifest)
    curve = tuple(curve_of(table.rows, table.rows[0].split))
    settings = dataclasses.replace(
        table.settings, alpha=manifest.transforms.alpha, public_digest=digest_of(scan(exports / "public", None))
    )
    return dataclasses.replace(table, curve=curve, settings=settings)


def test_a_table_is_checked_and_what_was_checked_is_said(
    exports: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, path = sound_table(exports), tmp_path / "leakage.json"
    path.write_bytes(to_bytes(table))
    against = ["--package", str(exports / "front"), "--public", str(exports / "public")]
    assert main(["--check", str(path)]) == 0
    assert "not checked: which package" in capsys.readouterr().out
    assert main(["--check", str(path), *against]) == 0
    said = capsys.readouterr().out
    for each in ("completeness: 3 rows", "as they follow from the rows", "weight noise are those of", "public images:"):
        assert each in said
    higher = (dataclasses.replace(table.curve[0], psnr_db=30.0), *table.curve[1:])
    for harm, words, expected in (
        ({"curve": higher}, [], "does not follow from its rows"),
        ({"curve": table.curve[::-1]}, [], "the noise should rise"),
        ({"least_noise": (dataclasses.replace(table.least_noise[0], strength=0.5),)}, [], "the least noise of split"),
        ({"settings": dataclasses.replace(table.settings, package_digest="0" * 64)}, against, "is of a package"),
        ({"settings": dataclasses.replace(table.settings, public_digest="0" * 64)}, against, "other images"),
        ({"model": "vit_base_patch16_224"}, against, "model should be"),
    ):
        path.write_bytes(to_bytes(dataclasses.replace(table, **harm)))  # type: ignore[arg-type]
        assert main(["--check", str(path), *words]) == 4
        assert expected in capsys.readouterr().err
    assert main(["--check", str(path), "--noise", "0"]) == 2
    assert "--noise has no part in --check FILE" in capsys.readouterr().err
    assert main(["--check", str(tmp_path / "none")]) == 2


def test_flags_and_folders_are_checked_without_an_attack(
    exports: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    front, public = str(exports / "front"), str(exports / "public")
    assert main(["--check", "--attack", "ridge"]) == 0
    assert capsys.readouterr().out == "flags: attacks ridge can make a table\n"
    assert main(["--package", front, "--public", public, "-o", str(tmp_path / "t.json"), "--check"]) == 0
    assert capsys.readouterr().out.count("\n") == 4 and not (tmp_path / "t.json").exists()
    for words, said in (
        (["--attack", "averaging"], "a table is of images"),
        (["--package", public], "is no package"),
        (["-o", "/proc/t.json"], "cannot be written"),
    ):
        assert main(["--check", *words]) == 2
        assert said in capsys.readouterr().err
    assert main(["--package", front, "--public", public]) == 2
    assert "--output is missing" in capsys.readouterr().err


def test_a_table_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"schema_version":1,"kind":"edge-profile"}')
    with pytest.raises(ConfigError, match="expected a document of kind leakage-profile"):
        read_table(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_table(tmp_path / "none.json")
