"""The folder given with -o: whatever cannot be one is a usage error, before anything takes time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="the demo's data comes with scikit-learn")

from contract.console import run_command  # noqa: E402  (after the skip)
from contract.errors import UsageError  # noqa: E402
from contract.output import open_output  # noqa: E402
from tools import bench_recovery, demo, make_keys, reproduce  # noqa: E402

IMPOSSIBLE = ["FILE", "FILE/sub", "/dev/null", "/proc", "/proc/nope"]


def test_a_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    root = open_output(tmp_path / "a" / "b")
    assert root == (tmp_path / "a" / "b").resolve() and list(root.iterdir()) == []
    (root / "kept").touch()
    assert open_output(root) == root and (root / "kept").exists()


@pytest.mark.parametrize("output", IMPOSSIBLE)
@pytest.mark.parametrize("tool", ["reproduce", "bench_recovery", "demo", "make_keys"])
def test_what_cannot_be_a_folder_ends_with_exit_code_2(
    tool: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if output.startswith("/proc") and not Path("/proc/self").exists():
        pytest.skip("there is no /proc here")
    (tmp_path / "FILE").write_text("mine")
    monkeypatch.chdir(tmp_path)
    words = ["sa", "--quick"] if tool == "reproduce" else []
    monkeypatch.setattr(sys, "argv", [tool, *words, "-o", output])
    tools = {"reproduce": reproduce, "bench_recovery": bench_recovery, "demo": demo, "make_keys": make_keys}
    assert run_command(tools[tool].main) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and f"-o {output} cannot be used" in said[0] and said[1].startswith("  cure: give -o")
    assert (tmp_path / "FILE").read_text() == "mine"


def test_a_deployment_of_another_seed_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "deployment.json").write_text('{"seed": 1}')
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(UsageError, match="seed 1, not of 2") as error:
        bench_recovery.deploy(tmp_path, 2)
    assert "--seed 1" in error.value.cure
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("mark", ["", "[]", '{"seed": "x"}', '{"seed"'])
def test_a_spoiled_deployment_is_left_as_it_is(tmp_path: Path, mark: str) -> None:
    (tmp_path / "deployment.json").write_text(mark)
    with pytest.raises(UsageError, match="holds no deployment"):
        bench_recovery.deploy(tmp_path, 2)
    assert (tmp_path / "deployment.json").read_text() == mark


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--seed", "-1"), ("--seed", "9" * 20), ("--kappa", "-0.1"), ("--kappa", "1.1"), ("--kappa", "nan")],
)
def test_bench_recovery_refuses_a_number_that_it_cannot_run_with(flag: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{flag} is"):
        bench_recovery.parse([flag, value])
