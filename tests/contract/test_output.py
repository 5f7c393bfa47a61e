"""Where -o may lead: folders are made, and a place that cannot be written is a usage error at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.errors import UsageError
from contract.output import check_output, check_output_file, open_output

IMPOSSIBLE = ["FILE/table.json", "FILE/sub/table.json", "/proc/table.json", "/proc/nope/table.json"]


def test_folders_are_made_and_nothing_else(tmp_path: Path) -> None:
    check_output_file(tmp_path / "a" / "table.json")
    check_output(tmp_path / "b" / "front")
    assert open_output(tmp_path / "c" / "d") == (tmp_path / "c" / "d").resolve()
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["a", "b", "c", "c/d"]


@pytest.mark.parametrize("output", IMPOSSIBLE)
@pytest.mark.parametrize("check", [check_output, check_output_file, open_output])
def test_a_place_that_cannot_be_written_is_a_usage_error(
    check: object, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if output.startswith("/proc") and not Path("/proc/self").exists():
        pytest.skip("there is no /proc here")
    (tmp_path / "FILE").write_text("mine")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"-o {output} cannot be") as error:
        check(Path(output))  # type: ignore[operator]
    assert error.value.exit_code == 2 and "may be written" in error.value.cure
    assert "File exists" not in error.value.cause  # it is the lack of a folder that is in the way
    assert (tmp_path / "FILE").read_text() == "mine"


@pytest.mark.parametrize("output", [".", "..", "", "FOLDER"])
def test_a_folder_is_no_file(output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "FOLDER").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="is a folder"):
        check_output_file(Path(output))


def test_a_file_that_is_there_a_link_and_a_device_are_taken(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("old")
    (tmp_path / "link.json").symlink_to(tmp_path / "elsewhere" / "new.json")
    for path in (tmp_path / "old.json", tmp_path / "link.json"):
        check_output_file(path)
    check_output_file(Path("/dev/null"), may_be_pipe=True)
    with pytest.raises(UsageError, match="pipe or a device"):
        check_output_file(Path("/dev/null"))
    assert (tmp_path / "elsewhere").is_dir() and (tmp_path / "old.json").read_text() == "old"
