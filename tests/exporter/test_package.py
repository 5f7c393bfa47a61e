from dataclasses import replace
from pathlib import Path

import pytest

from contract.errors import ExportError, UsageError
from contract.manifest import to_bytes
from exporter.package import backend_path, next_version, previous_manifest, publish, staging, write_table
from tests.golden.samples import MANIFEST


def _fill(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_bytes(to_bytes(replace(MANIFEST, version=int(text))))
    (folder / "export.json").write_text(text)


def _publish(output: Path, text: str) -> None:
    with staging(output) as staged:
        _fill(staged.package, text)
        _fill(staged.backend, text)
        publish(staged, output)


def test_both_folders_appear_together_and_nothing_else(tmp_path: Path) -> None:
    _publish(tmp_path / "deep" / "front", "1")
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["front", "front.backend"]


def test_a_later_export_replaces_both(tmp_path: Path) -> None:
    output = tmp_path / "front"
    _publish(output, "1")
    (output / "left over").touch()
    _publish(output, "2")
    assert (output / "export.json").read_text() == (backend_path(output) / "export.json").read_text() == "2"
    assert not (output / "left over").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["front", "front.backend"]


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    output = tmp_path / "front"
    _publish(output, "1")
    with pytest.raises(RuntimeError), staging(output) as staged:
        _fill(staged.package, "2")
        raise RuntimeError
    assert (output / "export.json").read_text() == "1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["front", "front.backend"]


def test_a_failed_move_puts_the_earlier_folders_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "front"
    _publish(output, "1")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name == "package":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(ExportError, match="Input/output error"):
        _publish(output, "2")
    monkeypatch.undo()
    assert (output / "export.json").read_text() == (backend_path(output) / "export.json").read_text() == "1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["front", "front.backend"]


def test_versions_count_up_and_never_back(tmp_path: Path) -> None:
    output = tmp_path / "front"
    assert previous_manifest(output) is None
    assert next_version(None, None, output) == 1 and next_version(None, 7, output) == 7
    _publish(output, "7")
    previous = previous_manifest(output)
    assert next_version(previous, None, output) == 8 and next_version(previous, 9, output) == 9
    for wanted in (7, 3):
        with pytest.raises(ExportError, match="holds version 7"):
            next_version(previous, wanted, output)


@pytest.mark.parametrize("name", ["front", "front.backend"])
def test_foreign_folders_and_files_are_never_replaced(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.mkdir()
    assert previous_manifest(tmp_path / "front") is None  # an empty folder may be taken
    (path / "thesis.txt").write_text("years of work")
    with pytest.raises(ExportError, match="not a package"):
        previous_manifest(tmp_path / "front")
    (path / "manifest.json").write_text("{}")
    with pytest.raises(ExportError, match="not a package"):
        previous_manifest(tmp_path / "front")


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "front").write_text("a file")
    with pytest.raises(ExportError, match="front exists"):
        previous_manifest(tmp_path / "front")


def test_a_parent_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written"), staging(tmp_path / "file" / "front"):
        pass


def test_tables_are_toml(tmp_path: Path) -> None:
    import tomllib

    table = {"path": 'a "quoted"\\ path', "classes": ["ünï", "tab\t", "line\n", "\x7f"], "count": 3}
    write_table(tmp_path / "t.toml", table)
    assert tomllib.loads((tmp_path / "t.toml").read_text(encoding="utf-8")) == table
