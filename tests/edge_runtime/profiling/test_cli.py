"""edge-profile from its command line: a fake engine, made-up boards, and files that are whole or not there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from contract.errors import ConfigError, CutlayerError, DeviceError, UsageError
from contract.signature import save_public
from edge_runtime.meters import Timing, probe
from edge_runtime.profiling.cli import (
    edge_profile,
    find_profile,
    parser,
    plan_of,
    power_model,
    read_images,
    read_labels,
    resolve_settings,
)  # fmt: skip
from edge_runtime.profiling.measuring import Plan
from edge_runtime.profiling.output import as_json
from edge_runtime.profiling.table import KIND, MeterFacts, Table, to_document
from profiles import load
from tests.edge_runtime.fake_package import PUBLISHER, write_images, write_package
from tests.edge_runtime.test_power_sensors import ORIN_NANO, hwmon, write

QUICK = (
    "--block-s", "0.2", "--baseline-s", "0.3", "--warm-up-s", "0.2", "--cool-down-s", "0", "--threads", "1",
    "--seed", "3",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_package(tmp_path / "a", delay_s=0.01)
    write_package(tmp_path / "b", delay_s=0.02, seed=1)
    save_public(tmp_path / "publisher.pub", PUBLISHER.public_key())
    return tmp_path


def call(folder: Path, *words: str) -> int:
    return edge_profile(parser().parse_args(list(words)), {}, folder)


def board(root: Path) -> Path:
    """A Jetson Orin Nano that takes 9.25 W whatever happens."""
    hwmon(root, "1-0040", 1, ORIN_NANO)
    write(root, {"proc/device-tree/model": "NVIDIA Jetson Orin Nano Developer Kit"})
    return root


NO_ROWS = as_json(
    KIND,
    to_document(
        Table(
            "frontend", None, "no profile", {}, "/", MeterFacts("none", "nothing", "unknown", None, None, ()),
            Plan(5, 1.0, 1.0, 1.0, 0.0, 1), 1, (),
        )
    ),
)  # fmt: skip


def both(folder: Path) -> tuple[str, ...]:
    return (
        "--engine", str(folder / "a/front.fake"), "--engine", str(folder / "b/front.fake"),
        "--trust", str(folder / "publisher.pub"), *QUICK,
    )  # fmt: skip


def test_a_made_up_board_gives_joules_and_says_that_they_are_not_this_machines(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, root = folder / "table.json", board(folder / "tree")
    assert call(folder, *both(folder), "--root", str(root), "--label", "fan=on", "-o", str(out)) == 0
    shown = capsys.readouterr()
    assert "not the energy of this machine" in shown.out and "shorter than the 10 s" in shown.err
    assert "2 split points in an order drawn from seed 3" in shown.err and "left" in shown.err
    document = json.loads(out.read_text())
    assert (document["kind"], document["profile"], document["root"]) == ("edge-profile", "jetson_orin_nano", str(root))
    assert document["environment"] == {"fan": "on"} and document["meter"]["scope"] == "module input (VDD_IN)"
    assert len(document["rows"]) == 2 == document["planned"]
    for row in document["rows"]:
        power_w = row["energy"]["measured_j"]["mean"] / row["seconds_per_image"]["mean"]
        assert power_w == pytest.approx(4.984 * 1.856, rel=0.02)
        assert abs(row["energy"]["compute_j"]["mean"]) < 0.02 * row["energy"]["measured_j"]["mean"]
        assert row["communication_j"] is None and row["total_j"] is None and row["coverage"] > 0.99
    slow, fast = sorted(row["seconds_per_image"]["mean"] for row in document["rows"])
    assert 0.01 <= slow < fast
    page = folder / "page.html"
    assert call(folder, "--plot", str(out), "-o", str(page)) == 0 and "<svg" in page.read_text()


def test_without_a_meter_energy_is_unknown_and_the_rest_is_measured(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty").mkdir()
    assert call(folder, *both(folder), "--root", str(folder / "empty"), "--format", "json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["profile"] is None and document["meter"]["name"] == "none"
    for row in document["rows"]:
        assert row["energy"] is None and row["energy_reason"].startswith("no meter: ina:")
        assert row["seconds_per_image"]["mean"] > 0.0 and row["point"]["sent_bytes_per_image"] > 0


def test_a_model_of_the_profile_is_labelled_as_such(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = folder / "tree"
    busy = "\n".join(f"{cpu} 1 0 1 9 0 0 0 0 0 0" for cpu in ("cpu", "cpu0"))
    write(root, {"proc/device-tree/model": "Raspberry Pi 4 Model B Rev 1.4", "proc/stat": busy})
    words = ("--engine", str(folder / "a/front.fake"), "--trust", str(folder / "publisher.pub"), *QUICK)
    assert call(folder, *words, "--root", str(root), "--power-model", "profile", "--format", "json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["meter"]["name"], document["meter"]["quality"]) == ("modelled", "modelled")
    assert "profile raspberry_pi_4 (chipwired" in document["meter"]["scope"]
    assert document["rows"][0]["energy"]["measured_j"]["mean"] > 0.0


def test_a_cap_is_written_with_its_environment(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, out = board(folder / "tree"), folder / "cap.json"
    write(root, {"sys/class/thermal/thermal_zone0/temp": "85000", "sys/class/thermal/thermal_zone0/type": "cpu"})
    engines = both(folder)[: -len(QUICK)]
    quick = ("--block-s", "0.2", "--cool-down-s", "0", "--threads", "1", "--hold-s", "1")
    words = (*engines, "--root", str(root), "--find-cap", "--limit-c", "80", *quick)
    assert call(folder, *words, "--label", "fan=off", "-o", str(out)) == 0
    document = json.loads(out.read_text())
    assert (document["kind"], document["is_reached"], document["p_max_w"]) == ("edge-profile-cap", True, None)
    assert document["where"]["environment"] == {"fan": "off"} and document["splits"][0]["outcome"] == "too hot"
    assert "too hot" in capsys.readouterr().out


def test_settings_come_from_where_edge_run_takes_them(folder: Path) -> None:
    (folder / "edge.toml").write_text('[device]\nengine = "front"\ntrust = "publisher.pub"\nthreads = 3\n')
    found = resolve_settings(parser().parse_args([]), {}, folder)
    assert (found.engines, found.trust, found.threads) == ((str(folder / "front"),), folder / "publisher.pub", 3)
    flags = parser().parse_args(["--engine", "a", "--engine", "b", "--threads", "1"])
    found = resolve_settings(flags, {"CUTLAYER_DEVICE_TRUST": "other.pub"}, folder)
    assert (found.engines, found.trust, found.threads) == (("a", "b"), Path("other.pub"), 1)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ((), "engine is not set"),
        (("--engine", "front"), "trust is not set"),
        (("--blocks", "4"), "blocks should be 5 to 1000"),
        (("--block-s", "0"), "block_s should be"),
        (("--root", "nowhere"), "--root should be a folder"),
        (("--engine", "front", "--trust", "publisher.pub", "--label", "fan"), "--label should be KEY=VALUE"),
        (("--engine", "front", "--trust", "publisher.pub", "--profile", "pi"), "no profile 'pi'"),
        (("--engine", "front", "--trust", "publisher.pub", "--power-model", "profile"), "no profile to take watts"),
        (("--engine", "front", "--trust", "publisher.pub", "--server", "wss://host:1"), "--server joins a run"),
        (("--engine", "front", "--trust", "publisher.pub", "--train", "--server", "wss://host:1"), "data is not set"),
        (("--plot", "none.json", "-o", "x.html"), "cannot be read"),
        (("--plot", "empty.json", "-o", "x.html"), "nothing to draw"),
        (("--plot", "empty.json"), "-o is not given"),
        (("--plot", "empty.json", "-o", "x.html", "--engine", "a"), "--engine has no part in --plot"),
        (("--plot", "empty.json", "-o", "x.html", "--format", "json"), "--format has no part in --plot"),
        (("--hold-s", "5"), "--hold-s is of --find-cap alone"),
        (("--limit-c", "80"), "--limit-c is of --find-cap alone"),
        (("--find-cap", "--blocks", "6"), "--blocks has no part in --find-cap"),
        (("--batch", "4"), "--batch is of --train alone"),
        (("--train", "--images", "4"), "--images has no part in --train"),
        (("--train", "--data", "x"), "--data is of a run that is joined"),
        (("-o", "publisher.pub/all.json"), "cannot be written"),
        (("-o", "/proc/all.json"), "cannot be written"),
        (("--format", "xml"), "unknown 'xml'"),
        (("--blocks", "x"), "should be a whole number, found 'x'"),
        (("--blocks", "9" * 5000), "should be a whole number, found '9999"),
        (("--block-s", "one"), "should be a number, found 'one'"),
        (("--seed", "-3"), "seed should be 0 to"),
        (("--engine", "nowhere", "--trust", "publisher.pub"), "no package folder"),
        (("--engine", "empty", "--trust", "publisher.pub"), "is not a package"),
        (("--engine", "a/front.fake", "--trust", "publisher.pub", "--images", "empty"), "found none"),
        (("--engine", "a/front.fake", "--trust", "publisher.pub", "--images", "9" * 5000), "--images should be"),
        (("--engine", "a/front.fake", "--trust", "empty.json"), "expected an Ed25519 public key"),
    ],
    ids=lambda each: each[:40] if isinstance(each, str) else None,
)
def test_a_mistake_is_told_before_anything_is_measured(
    folder: Path,
    words: tuple[str, ...],
    cause: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "empty").mkdir()
    (folder / "empty.json").write_bytes(NO_ROWS)
    monkeypatch.chdir(folder)
    with pytest.raises(CutlayerError) as error:
        call(folder, *words)
    assert cause in error.value.cause and error.value.cure
    assert "or correct --data" not in error.value.cure and "new pair" not in error.value.cure
    is_usage = not {"found none", "expected an Ed25519 public key"} & {cause}
    assert error.value.exit_code == 2 or not is_usage
    assert "idle" not in capsys.readouterr().err and not (folder / "x.html").exists()


def test_a_plot_needs_a_name_that_says_what_it_is(folder: Path) -> None:
    out = folder / "t.json"
    words = ("--engine", str(folder / "a/front.fake"), "--trust", str(folder / "publisher.pub"), *QUICK)
    (folder / "empty").mkdir()
    assert call(folder, *words, "--root", str(folder / "empty"), "-o", str(out)) == 0
    with pytest.raises(UsageError, match="-o should name a file"):
        call(folder, "--plot", str(out), "-o", str(folder / "plot.bmp"))


def test_a_folder_of_the_output_is_made_and_a_full_disk_costs_no_row(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--engine", str(folder / "a/front.fake"), "--trust", str(folder / "publisher.pub"), *QUICK)
    out = folder / "deep" / "er" / "t.json"

    def refuse(path: Path, data: bytes) -> None:
        raise DeviceError(f"{path} cannot be written: No space left on device", "make room on the disk")

    monkeypatch.setattr("edge_runtime.profiling.output.write_output", refuse)
    (folder / "empty").mkdir()
    with pytest.raises(DeviceError):
        call(folder, *words, "--root", str(folder / "empty"), "-o", str(out), "--format", "json")
    shown = capsys.readouterr()
    assert len(json.loads(shown.out)["rows"]) == 1 and "warning: " in shown.err and out.parent.is_dir()
    assert "1 split point in an order" in shown.err


def test_a_stop_leaves_no_copy_of_a_package_and_a_kill_one_until_the_next_start(folder: Path) -> None:
    """SIGTERM is a clean stop; after kill -9 the next start, of whatever package, removes what was left."""
    place = folder / "tmp"
    place.mkdir()
    code = "import sys; from edge_runtime.profiling.cli import main; sys.exit(main())"
    words = [sys.executable, "-c", code, *both(folder), "--baseline-s", "600", "-o", str(folder / "t.json")]

    def start() -> tuple[subprocess.Popen[str], Path]:
        """A process that measures, and its copy."""
        process = subprocess.Popen(
            words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(place)}
        )
        assert process.stderr is not None
        said = []
        while "2 split points" not in (line := process.stderr.readline()):
            assert line, said
            said.append(line)
        (copy,) = place.iterdir()
        assert sorted(each.name for each in copy.iterdir()) == ["0", "1"]
        return process, copy

    for number, how in enumerate((signal.SIGKILL, signal.SIGTERM, signal.SIGINT)):
        process, copy = start()
        process.send_signal(how)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == (-9, 0, 130)[number] and out == ""
        assert list(place.iterdir()) == ([copy] if how == signal.SIGKILL else [])
    assert not (folder / "t.json").exists()


def test_labels_are_key_and_value() -> None:
    assert read_labels(["ambient=21 C", "power_mode=15W"]) == {"ambient": "21 C", "power_mode": "15W"}
    for bad in (["=1"], ["a="], ["A=1"], ["a= "], ["a=1", "a=2"]):
        with pytest.raises(UsageError):
            read_labels(bad)


def test_images_are_a_number_or_a_folder(tmp_path: Path) -> None:
    assert read_images("7").drawn == 7 and read_images(str(write_images(tmp_path, {"x": 1}))).folder == tmp_path
    for bad in ("0", "99999", "nowhere", "-1"):
        with pytest.raises(UsageError):
            read_images(bad)


def test_a_profile_is_named_detected_or_a_file(tmp_path: Path) -> None:
    assert find_profile(None, tmp_path) is None
    assert find_profile("jetson_nano", tmp_path) == load("jetson_nano")
    found = find_profile(None, board(tmp_path / "tree"))
    assert found is not None and found.name == "jetson_orin_nano"
    with pytest.raises(ConfigError, match="cannot be read"):
        find_profile("mine.toml", tmp_path)


def test_watts_are_modelled_only_where_they_were_asked_for() -> None:
    assert power_model(None, load("raspberry_pi_4")) is None
    given, known = power_model("2:8", None), power_model("profile", load("raspberry_pi_4"))
    assert given is not None and (given.idle_w, given.busy_w) == (2.0, 8.0)
    assert known is not None and (known.idle_w, known.busy_w) == (2.2, 5.4) and not known.calibrated
    with pytest.raises(ConfigError, match="no watts"):
        power_model("profile", load("raspberry_pi_5"))


@pytest.mark.parametrize(
    ("timing", "expected_s"),
    [(Timing(0.007, doubt_s=0.007), 10.0), (Timing(0.422, 0.211, 0.211), 10.0), (Timing(1.0, 1.25, 0.75), 30.0)],
)
def test_blocks_are_as_long_as_the_meter_needs(tmp_path: Path, timing: Timing, expected_s: float) -> None:
    meter = probe(tmp_path).meter
    meter.timing = timing  # type: ignore[misc]
    assert plan_of(parser().parse_args([]), meter, 1).block_s == expected_s
    assert plan_of(parser().parse_args(["--block-s", "2"]), meter, 1).block_s == 2.0


def test_the_command_is_one_line_of_cause_and_one_of_cure(tmp_path: Path) -> None:
    code = "import sys; from edge_runtime.profiling.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, "--engine", "front"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ") and "cure: " in done.stderr
