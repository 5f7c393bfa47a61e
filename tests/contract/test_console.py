"""What commands say alike: exit codes, words on stderr, the JSON document, progress."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from contract.console import ArgumentParser, LineProgress, print_document, progress, run_command, run_module, say
from contract.errors import GateError, UsageError


def raising(error: BaseException) -> Callable[[], int]:
    def main() -> NoReturn:
        raise error

    return main


def test_a_command_that_returns_has_its_own_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda: 0) == 0
    assert run_command(lambda: 3) == 3
    assert capsys.readouterr() == ("", "")


def test_our_errors_are_one_line_of_cause_and_one_of_cure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(raising(GateError("the cut has 12.1 dB", "calibrate with more images"))) == 3
    assert capsys.readouterr() == ("", "error: the cut has 12.1 dB\n  cure: calibrate with more images\n")


def test_unknown_errors_are_one_line_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUTLAYER_DEBUG", raising=False)
    assert run_command(raising(KeyError("x"))) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "internal error: KeyError: 'x'",
        "  cure: run again with CUTLAYER_DEBUG=1 and report the traceback",
    ]


def test_a_name_that_is_too_long_is_a_mistake_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda: len(Path("x" * 5000).read_bytes())) == 2
    said = capsys.readouterr().err
    assert "too long for a file" in said and len(said) < 200


def test_a_value_that_fills_the_screen_is_shown_in_part(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        raise UsageError(f"--blocks should be a whole number, found '{'9' * 5000}'", "see --help")

    assert run_command(command) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --blocks should be a whole number, found '999") and len(said) < 200
    assert "...\n  cure: see --help\n" in said


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (("--n", "x"), "--n: should be a whole number, found 'x'"),
        (("--x", ""), "--x: should be a number, found ''"),
        (("--own", "5"), "--own: of its own"),
    ],
)
def test_numbers_are_asked_for_in_plain_words(words: tuple[str, ...], cause: str) -> None:
    def own(text: str) -> int:
        raise argparse.ArgumentTypeError("of its own")

    commands = ArgumentParser("tool")
    for name, kind in (("--n", int), ("--x", float), ("--own", own)):
        commands.add_argument(name, type=kind)
    with pytest.raises(UsageError) as error:
        commands.parse_args(list(words))
    assert cause in error.value.cause


@pytest.mark.parametrize("error", [KeyError("x"), GateError("cause", "cure")], ids=["unknown", "ours"])
def test_debug_shows_the_traceback(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUTLAYER_DEBUG", "1")
    assert run_command(raising(error)) in (1, 3)
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_is_130_and_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "")


def test_an_interrupt_while_a_command_is_still_loaded_is_as_quiet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_to_load.py").write_text("raise KeyboardInterrupt")
    (tmp_path / "quick_to_load.py").write_text("def main():\n    return 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert run_module("slow_to_load") == 130
    assert run_module("quick_to_load") == 7
    assert capsys.readouterr() == ("", "")


def test_help_is_not_an_error() -> None:
    with pytest.raises(SystemExit) as leaving:
        run_command(raising(SystemExit(0)))
    assert leaving.value.code == 0


def test_a_reader_that_went_away_is_quiet() -> None:
    program = (
        "import sys; from contract.console import print_document, run_command\n"
        "def main():\n    sys.stdin.read()\n    print_document('numbers', {'n': list(range(99999))})\n    return 0\n"
        "sys.exit(run_command(main))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdin and child.stdout and child.stderr
        child.stdout.close()
        child.stdin.close()
        assert child.stderr.read() == b""
        assert child.wait() == 141


PRINTING = (
    "import sys; from contract.console import run_command, say\n"
    "def main():\n    say('working')\n    print('x' * int(sys.argv[1]))\n    return 0\n"
    "sys.exit(run_command(main))"
)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("letters", ["1", "99999"], ids=["one write at the end", "more than the buffer holds"])
def test_a_full_disk_behind_stdout_is_one_line(letters: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", PRINTING, letters], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert lines[:2] == ["working", "error: stdout cannot be written: No space left on device"] and len(lines) == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_behind_stderr_ends_no_work() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", PRINTING, "3"], stdout=subprocess.PIPE, stderr=full)
    assert (done.returncode, done.stdout) == (0, b"xxx\n")


WRITING = (
    "import resource, sys; from pathlib import Path; from contract.console import run_command\n"
    "from contract.output import naming\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (9, 9))\n"  # as a disk that is full
    "def main():\n    print('kept')\n    path = Path(sys.argv[1])\n"
    "    with naming(path):\n        path.write_bytes(bytes(10))\n"
    "sys.exit(run_command(main))"
)


def test_a_full_disk_behind_a_file_is_told_by_its_name_and_takes_nothing_from_stdout(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", WRITING, path], capture_output=True, text=True, env=environ)
    assert done.stderr == f"error: {path} cannot be written: File too large\n  cure: make room on the disk\n"
    assert (done.returncode, done.stdout) == (2, "kept\n")


def test_closed_streams_are_no_error() -> None:
    words = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-c", PRINTING, "3"]
    assert subprocess.run(words, check=False).returncode == 0


def parser() -> ArgumentParser:
    parser = ArgumentParser(prog="server-run", description="Adapt.")
    parser.add_argument("--strategy", choices=["split_adaptation", "eeft"])
    parser.add_argument("--threads", type=int)
    return parser


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--strategy", "split_adaption"], "unknown 'split_adaption' (did you mean 'split_adaptation'?)"),
        (["--strategy", "x"], "unknown 'x' (known: eeft, split_adaptation)"),
        (["--threads", "two"], "should be a whole number, found 'two'"),
        (["--thread", "2"], "unrecognized arguments: --thread 2"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(
    arguments: list[str], cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError) as error:
        parser().parse_args(arguments)
    assert cause in error.value.cause
    assert error.value.cure == "see server-run --help"
    assert capsys.readouterr() == ("", "")


def test_a_right_command_line_parses() -> None:
    assert parser().parse_args(["--strategy", "eeft"]) == argparse.Namespace(strategy="eeft", threads=None)


def test_subcommands_raise_usage_errors_too() -> None:
    outer = ArgumentParser(prog="tool")
    outer.add_subparsers().add_parser("build").add_argument("--fast", action="store_true")
    with pytest.raises(UsageError, match="did you mean 'build'"):
        outer.parse_args(["biuld"])
    with pytest.raises(UsageError, match="unrecognized arguments"):
        outer.parse_args(["build", "--quick"])


def test_the_document_is_versioned_json_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    print_document("profile", {"energy_j": None, "name": "Zürich"})
    out, err = capsys.readouterr()
    assert json.loads(out) == {"schema_version": 1, "kind": "profile", "energy_j": None, "name": "Zürich"}
    assert out.isascii() and err == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_document_never_holds_a_number_that_is_none(value: float) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        print_document("profile", {"energy_j": value})


def test_words_for_people_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    say("3 images were skipped")
    assert capsys.readouterr() == ("", "3 images were skipped\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(progress([1, 2, 3], total=3, description="reading", unit="images")) == [1, 2, 3]
    assert "\r" in terminal.getvalue() and "3/3" in terminal.getvalue()


def test_elsewhere_progress_is_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress(iter("abc"), total=3, description="reading", unit="images")) == ["a", "b", "c"]
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("reading: 3/3 images, 0 s") and err.count("\n") == 1
    assert all(character.isprintable() for character in err.rstrip("\n"))


def test_lines_come_once_per_interval_and_at_the_end() -> None:
    now_s = iter([0.0, *range(4, 100, 4)]).__next__
    out = io.StringIO()
    with LineProgress[None](None, None, "training", "steps", clock=now_s, out=out) as bar:
        for _ in range(5):
            bar.update(2)
    lines = out.getvalue().splitlines()
    assert [line.split(" steps")[0] for line in lines] == ["training: 6", "training: 10"]
    assert lines[0] == "training: 6 steps, 16 s, 0.4 steps/s"


def test_progress_says_where_it_stopped_when_the_work_fails() -> None:
    out = io.StringIO()
    with pytest.raises(OSError), LineProgress[None](None, 5, "reading", "images", out=out) as bar:
        bar.update(2)
        raise OSError
    assert out.getvalue().startswith("reading: 2/5 images")


def test_progress_without_an_iterable_cannot_be_iterated() -> None:
    with pytest.raises(TypeError, match="call update"):
        iter(LineProgress(None, 5, "reading", "images")).__next__()
