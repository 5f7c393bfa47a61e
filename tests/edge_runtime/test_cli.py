"""The command line in other processes or none: help, configuration, errors, what is imported, what it weighs."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from contract.console import run_command
from contract.errors import ConfigError, UsageError
from edge_runtime.cli import edge_run, edge_run_or_command, parser, print_report
from edge_runtime.config import FIELDS
from edge_runtime.local_record import Compared
from edge_runtime.predictions import Prediction
from edge_runtime.report import LocalFigures, Report, to_csv, to_table
from edge_runtime.state import open_state
from tests.edge_runtime.fake_package import write_device, write_images, write_package

ROOT = Path(__file__).parents[2]
BANNED = {"torch", "torchvision", "timm", "onnx", "onnxscript", "exporter", "server_runtime"}

REPORT = Report(
    outcome="collected",
    run="run-1",
    images=2,
    classes=2,
    class_counts=(1, 1),
    skipped=({"file": "cat/x.png", "reason": "is empty"},),
    duplicates=(),
    ignored=1,
    bytes_sent_payload=100,
    bytes_per_image=50.0,
    bytes_on_wire=300,
    bytes_received=120,
    connections=2,
    messages_sent_again=1,
    sent_again_most=1,
    round_trips=1,
    codes_changed=0.34,
    saturated=0.0,
    stages_s={"extract": 1.0},
    stages_energy_j={"extract": None},
    stages_energy_bound_j={"extract": None},
    energy_j=None,
    energy_bound_j=None,
    energy_per_upload_j=None,
    energy_per_upload_bound_j=None,
    energy_reason="rapl: none here",
    energy_scope=None,
    mean_power_w=None,
    peak_power_w=None,
    peak_window_s=None,
    slowed_down=(),
    engine="fake 1",
    engine_fallback=None,
    threads=1,
    int8_layers=None,
    linear_layers=1,
    plans=(),
    int8_lost=None,
    golden_snr_db=40.0,
    label_mode="permuted-label",
    kappa=1.0,
    alpha=0.1,
    noise="keyed",
    sigma=0.0,
    package="tiny",
    package_version=1,
    package_digest="ab" * 32,
    peak_rss_mb=50.0,
)
PREDICTED = replace(REPORT, predictions=(Prediction("a, b.png", "cat", 0.75),), accuracy=0.5)


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=60
    )


def test_every_setting_has_a_flag_with_help() -> None:
    text = parser().format_help()
    for field in FIELDS:
        assert "--" + field.name.replace("_", "-") in text and field.help
    for flag in ("--infer", "--once", "--format", "--output", "--config", "--show-config"):
        assert flag in text


def test_an_unknown_choice_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="permuted-label"):
        parser().parse_args(["--label-mode", "permuted-lable"])


def test_show_config_shows_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert edge_run(parser().parse_args(["--show-config", "--name", "pi-1"]), {}, tmp_path) == 0
    shown = capsys.readouterr().out
    assert "# server is not set, and must be" in shown and 'name = "pi-1"  # --name' in shown


def test_show_config_tells_where_each_value_comes_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "edge.toml").write_text(
        "[device]\nengine='f'\ndata='d'\nserver='wss://x:1'\ntrust='t'\nkey='k'\nstate='s'\n"
    )
    arguments = parser().parse_args(["--show-config", "--name", "pi-1"])
    assert edge_run(arguments, {"CUTLAYER_DEVICE_THREADS": "3"}, tmp_path) == 0
    shown = capsys.readouterr().out
    assert 'name = "pi-1"  # --name' in shown and "threads = 3  # CUTLAYER_DEVICE_THREADS" in shown
    assert "edge.toml" in shown and "# alpha is not set" in shown


def test_the_json_report_is_one_versioned_document(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(REPORT, "json", None)
    document = json.loads(capsys.readouterr().out)
    assert (document["schema_version"], document["kind"]) == (1, "edge-run")
    assert document["energy_j"] is None and document["energy_reason"] == "rapl: none here"
    assert document["skipped"] == [{"file": "cat/x.png", "reason": "is empty"}]
    assert "predictions" not in document
    print_report(PREDICTED, "json", None)
    document = json.loads(capsys.readouterr().out)
    assert document["predictions"] == [
        {"file": "a, b.png", "class_name": "cat", "probability": 0.75, "answered_by": "server"}
    ]
    assert document["accuracy"] == 0.5


def test_the_csv_report_reads_back() -> None:
    (row,) = csv.DictReader(io.StringIO(to_csv(REPORT)))
    assert (row["images"], row["energy_j"], row["label_mode"]) == ("2", "", "permuted-label")
    (row,) = csv.DictReader(io.StringIO(to_csv(PREDICTED)))
    assert row == {"file": "a, b.png", "class": "cat", "probability": "0.750000", "answered_by": "server"}


def test_joules_come_with_their_bound_and_with_what_they_are_those_of() -> None:
    measured = replace(
        REPORT,
        energy_j=12.34,
        energy_bound_j=0.51,
        energy_per_upload_j=3.085,
        energy_per_upload_bound_j=0.1275,
        round_trips=4,
        energy_reason=None,
        energy_scope="ina: module input (VDD_IN)",
        stages_energy_j={"extract": 12.0, "upload": 0.34},
        stages_energy_bound_j={"extract": 0.5, "upload": 0.9},
        mean_power_w=5.5,
        peak_power_w=9.25,
        peak_window_s=0.007,
        slowed_down=({"name": "throttled", "words": "the firmware slowed the clock down"},),
    )
    table = to_table(measured)
    assert "12.3 J ± 0.5 (ina: module input (VDD_IN))" in table
    assert "extract 12.0 J ± 0.5, upload 0.3 J ± 0.9, too short to tell" in table
    assert "3.1 J ± 0.1 for each of the uploads" in table
    assert "5.50 W mean, 9.25 W peak over 7 ms" in table
    assert "throttled: the firmware slowed the clock down" in table
    assert "peak in one conversion" in to_table(replace(measured, peak_window_s=0.0))


def test_what_energy_leaves_out_is_said() -> None:
    partial = replace(REPORT, energy_j=12.3, energy_bound_j=1.0, energy_reason="partial: no dram", energy_scope="rapl")
    assert "partial: no dram" in to_table(partial)


def test_the_table_says_what_is_unknown() -> None:
    table = to_table(PREDICTED)
    assert "unknown: rapl: none here" in table and "cat/x.png: is empty" in table and "a, b.png" in table
    assert "0 J" not in table and "\x1b" not in table


def test_the_table_says_who_answered_and_how_good_answers_alone_are() -> None:
    alone = LocalFigures(25, 5, 0.48, 25, Compared(400, 0.83, 0.555))
    given = (Prediction("a.png", "cat", 0.75), Prediction("b.png", "dog", 0.5, "local"))
    table = to_table(replace(PREDICTED, predictions=given, local=alone, link_down="no network"))
    assert "50.0% of the answers below" in table and "no network" in table
    assert "48.0% of 25 left out, from 25 images of 5 classes" in table
    assert "last compared on 400 new images: server 83.0%, alone 55.5%" in table
    assert "server  cat" in table and "local   dog" in table
    assert "accuracy unknown" in to_table(replace(REPORT, local=LocalFigures(3, 3)))
    assert "no: no head" in to_table(replace(REPORT, local=LocalFigures(reason="no head")))


def test_the_report_can_go_into_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(REPORT, "json", tmp_path / "report.json")
    assert capsys.readouterr().out == ""
    assert json.loads((tmp_path / "report.json").read_text())["images"] == 2


def test_a_run_imports_nothing_of_the_servers_or_of_torch() -> None:
    done = python(
        "import sys, pkgutil, importlib, edge_runtime, edge_runtime.cli\n"
        "for entry in pkgutil.walk_packages(edge_runtime.__path__, 'edge_runtime.'):\n"
        "    importlib.import_module(entry.name)\n"
        "print(*{name.split('.')[0] for name in sys.modules})\n"
    )
    assert done.returncode == 0, done.stderr
    assert not BANNED & set(done.stdout.split())


def test_a_whole_run_works_where_they_cannot_be_imported(tmp_path: Path) -> None:
    package = write_package(tmp_path / "front")
    config = write_device(tmp_path, package, write_images(tmp_path / "images", {"a": 2}), "ws://127.0.0.1:9")
    flags = [part for field in FIELDS if (value := getattr(config, field.name)) not in (None, "", ())
             for part in ("--" + field.name.replace("_", "-"), str(value))]  # fmt: skip
    done = python(
        "import sys\n"
        "class Wall:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {BANNED!r}:\n"
        "            raise ImportError('forbidden on a device: ' + name)\n"
        "sys.meta_path.insert(0, Wall())\n"
        "from edge_runtime.cli import main\n"
        "raise SystemExit(main())\n",
        *flags,
        "--once",
    )
    assert done.returncode == 8, done.stderr
    assert "cannot be reached" in done.stderr


def test_help_needs_neither_numpy_nor_sockets() -> None:
    done = python("import sys, edge_runtime.cli; edge_runtime.cli.parser().format_help(); print(*sys.modules)")
    assert done.returncode == 0 and not {"onnxruntime", "websockets"} & set(done.stdout.split())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc on this system")
def test_an_idle_device_without_an_engine_stays_small() -> None:
    done = python("import edge_runtime.run\nprint(open('/proc/self/status').read())")
    resident_kb = next(int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("VmRSS"))
    assert resident_kb * 1024 < 75e6  # the goal is 60 MB; the margin is for other builds of numpy and OpenSSL


def test_errors_are_one_line_of_cause_and_one_of_cure(tmp_path: Path) -> None:
    done = python(
        "from edge_runtime.cli import main; raise SystemExit(main())", "--config", str(tmp_path / "none.toml")
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[0].startswith("error: ") and "cure: " in done.stderr.splitlines()[1]


@pytest.mark.parametrize("output", [".", "", "FILE/report.json"])
def test_a_report_that_could_not_be_written_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").touch()
    config = write_device(tmp_path, write_package(tmp_path / "front"), tmp_path)
    flags = [part for field in FIELDS if (value := getattr(config, field.name)) not in (None, "", ())
             for part in ("--" + field.name.replace("_", "-"), str(value))]  # fmt: skip
    with pytest.raises(UsageError, match="-o"):
        edge_run(parser().parse_args([*flags, "-o", output]), {}, tmp_path)
    assert not config.state.exists()


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--plug", each) for each in (
            " ", "a b", "http://plug", "plug:0", "plug:65536", "plug:x", "plug/0", "plug/100", "plug/x", "a/1/2",
            "[::1]",
        )),
        *(("--power-model", each) for each in (
            "5", "5:", ":5", "9:5", "-1:5", "0:0", "nan:nan", "1:nan", "1:inf", "1:2:3", "1;2", "profile", "1:1e6",
        )),
        ("--plug-account", "nowhere"),
    ],
    ids=lambda each: each[:20],
)  # fmt: skip
def test_an_odd_meter_is_a_mistake_of_the_command_line_before_anything_is_installed(
    tmp_path: Path, flag: str, value: str
) -> None:
    config = write_device(tmp_path, write_package(tmp_path / "front"), tmp_path)
    flags = [part for field in FIELDS if (found := getattr(config, field.name)) not in (None, "", ())
             for part in ("--" + field.name.replace("_", "-"), str(found))]  # fmt: skip
    with pytest.raises(ConfigError) as error:
        edge_run(parser().parse_args([*flags, f"{flag}={value}", "--once"]), {}, tmp_path)
    setting = flag.removeprefix("--").replace("-", "_")
    assert setting in error.value.cause.replace("-", "_")
    assert flag in error.value.cure and not list((config.state / "packages").glob("*"))


def test_a_report_follows_a_link_and_leaves_a_pipe_a_pipe(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    print_report(REPORT, "json", link)
    assert link.is_symlink() and '"kind": "edge-run"' in target.read_text()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    print_report(REPORT, "json", pipe)
    assert b'"kind": "edge-run"' in os.read(reader, 1 << 16)
    os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["enrol", "--name", "a/b"], "the device's name 'a/b' is not a name"),
        (["rotate-key", "--name", ".hidden"], "the device's name '.hidden' is not a name"),
        (["--energy-table", "nofile", "--once"], "there is no file nofile (energy_table)"),
        (["--classes", "nofile", "--once"], "there is no file nofile (classes)"),
        (["--ca", "nofile", "--infer"], "there is no file nofile (ca)"),
        (["--name", "a/b", "--once"], "the device's name 'a/b' is not a name"),
        (
            ["--require", "nonsense", "--once"],
            "is called 'nonsense' (known: onnxruntime, openvino, tensorrt)",
        ),
    ],
)
def test_mistakes_are_told_before_anything_is_asked_or_made(
    words: list[str], cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_device(tmp_path, write_package(tmp_path / "front"), write_images(tmp_path / "images", {"a": 1}))
    names = ("engine", "data", "server", "trust", "key", "name", "state")
    Path("edge.toml").write_text("[device]\n" + "".join(f"{name} = '{getattr(config, name)}'\n" for name in names))
    monkeypatch.setattr("socket.socket.connect", lambda *arguments: pytest.fail("it connects"))
    assert run_command(lambda: edge_run_or_command(words)) == 2
    said = capsys.readouterr()
    assert cause in said.err and "cure: " in said.err and not said.out
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_sync_with_nothing_left_to_send_is_done(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("socket.socket.connect", lambda *arguments: pytest.fail("it connects"))
    words = ["sync", "--server", "ws://127.0.0.1:1", "--name", "pi", "--key", "none", "--state", str(tmp_path)]
    assert run_command(lambda: edge_run_or_command(words)) == 2  # no state: a wrong path is no success
    assert "is no state of a device" in capsys.readouterr().err
    open_state(tmp_path).close()
    assert run_command(lambda: edge_run_or_command([*words, "--format", form])) == 0
    said = capsys.readouterr()
    if form == "json":
        told = json.loads(said.out)
        assert (told["outcome"], told["run"], told["images"]) == ("nothing to send", None, 0)
    else:
        assert said.out.startswith("nothing to send: ") and said.out.count("\n") == 1
    assert said.err == ""


@pytest.mark.parametrize(
    ("typed", "meant"), [("stauts", "status"), ("enroll", "enrol"), ("install_service", "install-service")]
)
def test_a_mistyped_command_gets_the_nearest(typed: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"no command '{typed}' of edge-run .did you mean '{meant}'"):
        edge_run_or_command([typed, "--state", "x"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("words", [["--releases"], ["report"]], ids=["a run's", "a command's"])
def test_a_full_disk_behind_the_output_is_told_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    open_state(tmp_path / "state").close()
    given = [*words, "--state", str(tmp_path / "state"), "-o", "/dev/full"]
    assert run_command(lambda: edge_run_or_command(given)) == 2
    assert "error: /dev/full cannot be written: No space left on device\n  cure: " in capsys.readouterr().err


def test_a_pipe_of_the_output_whose_reader_went_away_is_as_quiet_as_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_state(tmp_path / "state").close()
    os.mkfifo(tmp_path / "pipe")

    def gone(path: Path, data: bytes) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(Path, "write_bytes", gone)
    given = ["--releases", "--state", str(tmp_path / "state"), "-o", str(tmp_path / "pipe")]
    with monkeypatch.context() as patch:
        patch.setattr("contract.console._discard", lambda stream: None)  # it would be that of the tests
        assert run_command(lambda: edge_run_or_command(given)) == 141
    assert capsys.readouterr().err == ""
