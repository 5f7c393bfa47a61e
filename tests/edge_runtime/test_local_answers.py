"""What a device keeps to answer alone: learned in a run, and anew from images and classes that come later."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from contract.console import run_command
from contract.errors import DataError
from edge_runtime import cli, local_answers
from edge_runtime.config import FIELDS, DeviceConfig, LocalConfig
from edge_runtime.learning import learn
from edge_runtime.local_record import Basis, Compared, Facts, LocalRecord, from_bytes, to_bytes
from edge_runtime.report import Report
from edge_runtime.worker import Worker
from tests.edge_runtime.fake_package import SIZE, Package, write_device, write_images, write_package
from tests.edge_runtime.line import Line

COLOURS = {"blue": (60, 60, 190), "red": (190, 60, 60)}
GREEN = {"a green": (60, 190, 60)}  # before the others, by name


def write_colours(
    root: Path, colours: dict[str, tuple[int, ...]], count: int, seed: int = 0, folder: str = "{}"
) -> Path:
    """Pictures whose class is their colour."""
    rng = np.random.default_rng(seed)
    for name, colour in colours.items():
        place = root / folder.format(name)
        place.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = rng.normal(colour, 12, (SIZE, SIZE, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(place / f"{name}-{seed}-{number}.png")
    return root


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return write_package(tmp_path / "front")


@pytest.fixture
def config(tmp_path: Path, package: Package) -> DeviceConfig:
    return write_device(tmp_path, package, write_colours(tmp_path / "images", COLOURS, 6))


def learned(config: DeviceConfig) -> tuple[Report, list[str]]:
    said: list[str] = []
    report = learn(config, threading.Event(), said.append)
    assert report is not None and report.local is not None
    return report, said


Answers = Callable[..., dict[str, object]]


@pytest.fixture
def answers(capsys: pytest.CaptureFixture[str]) -> Answers:
    """`edge-run --infer --local` in this process: its document, or what it wrote to stderr."""

    def call(config: LocalConfig, code: int = 0) -> dict[str, object]:
        capsys.readouterr()
        words = ["--infer", "--local", "--format", "json"]
        for field in FIELDS:
            has_part = field.name in LocalConfig.__dataclass_fields__ and field.name not in cli.LOCAL_IDLE
            value = getattr(config, field.name) if has_part else None
            words += [] if value in (None, "") else ["--" + field.name.replace("_", "-"), str(value)]
        assert run_command(lambda: cli.edge_run_or_command(words)) == code
        shown = capsys.readouterr()
        return {"stderr": shown.err} | (json.loads(shown.out) if shown.out else {})

    return call


def uploaded(tmp_path: Path, config: DeviceConfig, package: Package) -> Line:
    """A run that is over: the server has the twelve images."""
    line = Line(tmp_path, config, package)
    line.server.on_open = lambda server: server.ask_features()
    line.run(until=lambda: line.server.images == 12)
    line.equipment.remember_site()
    line.close()
    return line


def record_of(config: DeviceConfig) -> LocalRecord:
    return from_bytes((config.state / "checkpoints" / "local_head").read_bytes())


def test_a_run_leaves_a_head_that_answers_alone(
    tmp_path: Path, package: Package, config: DeviceConfig, answers: Answers
) -> None:
    line = uploaded(tmp_path, config, package)
    record = record_of(config)
    assert record.facts.classes == ("blue", "red") and record.facts.held_out_accuracy == 1.0
    assert {row.tobytes() for row in record.sample_ids} == {s.sample_id for s in line.equipment.dataset.samples}
    assert record.facts.basis == Basis(package.digest.hex(), 1, 0.1)

    new = replace(config, data=write_colours(tmp_path / "new", COLOURS, 4, seed=9, folder=""))
    document = answers(new)
    given = document["predictions"]
    assert isinstance(given, list) and len(given) == 8 and document["outcome"] == "done"
    assert all(each["answered_by"] == "local" and each["file"].startswith(each["class_name"]) for each in given)
    assert document["accuracy"] is None and document["bytes_on_wire"] == 0  # unlabelled, and nobody was asked


def test_who_asks_no_server_names_none(
    tmp_path: Path, package: Package, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No server, name, key or certificate: --learn and --infer --local need four settings, and say which is missing."""
    monkeypatch.chdir(tmp_path)
    device = write_device(tmp_path, package, write_colours(tmp_path / "images", COLOURS, 6))
    flags = {"--engine": device.engine, "--trust": device.trust, "--state": device.state, "--data": device.data}

    def call(*purpose: str, without: str = "") -> tuple[int, str, str]:
        words = [str(word) for flag, value in flags.items() if flag != without for word in (flag, value)]
        code = run_command(lambda: cli.edge_run_or_command([*purpose, *words, "--format", "json"]))
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    code, out, err = call("--learn")
    assert code == 0 and json.loads(out)["outcome"] == "learned", err
    assert "site" not in err and not (device.state / "identity" / "site_secret").exists()  # it has to do with a server
    code, out, err = call("--infer", "--local")
    assert code == 0 and {each["answered_by"] for each in json.loads(out)["predictions"]} == {"local"}, err
    assert json.loads(out)["accuracy"] == 1.0 and json.loads(out)["connections"] == 0
    for purpose in (("--learn",), ("--infer", "--local")):
        for flag in flags:
            code, out, err = call(*purpose, without=flag)
            assert code == 2 and out == "" and f"{flag[2:]} is not set" in err, (flag, code, err)
    code, out, err = call("--infer")
    assert code == 2 and "server is not set" in err, err
    code, out, err = call("--local")
    assert code == 2 and "--local means nothing without --infer" in err, err


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--server", "wss://x:1"], "--server has no part in"),
        (["--name", "pi", "--key", "k"], "--key and --name have no part in"),
        (["--once", "--ca", "c", "--max-mb-per-day", "5"], "--ca, --max-mb-per-day and --once have no part in"),
        (["--noise", "fresh"], "--noise has no part in"),
        (["--split", "3", "--sigma-floor", "1"], "--sigma-floor and --split have no part in"),
    ],
)
@pytest.mark.parametrize("purpose", [["--learn"], ["--infer", "--local"]], ids=["learn", "local"])
def test_a_flag_that_only_a_server_needs_is_refused_where_none_is_asked(
    config: DeviceConfig, capsys: pytest.CaptureFixture[str], purpose: list[str], words: list[str], fault: str
) -> None:
    needed = ["--engine", config.engine, "--trust", str(config.trust), "--data", str(config.data)]
    given = [*purpose, *needed, "--state", str(config.state), *words]
    assert run_command(lambda: cli.edge_run_or_command(given)) == 2
    shown = capsys.readouterr()
    assert f"error: {fault} {' '.join(purpose)}\n  cure: leave" in shown.err and shown.out == ""
    assert not config.state.exists()  # told before anything was done


def test_settings_of_a_server_in_the_file_or_the_environment_are_no_fault_where_none_is_asked(
    tmp_path: Path, config: DeviceConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file serves runs and work alone. What an answer depends on may be a flag: not every package has each mode."""
    (tmp_path / "edge.toml").write_text('[device]\nserver = "wss://x:1"\nname = "pi"\nnoise = "fresh"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUTLAYER_DEVICE_MAX_MB_PER_DAY", "5")
    needed = ["--engine", config.engine, "--trust", str(config.trust), "--data", str(config.data)]
    given = [*needed, "--state", str(config.state), "--label-mode", "permuted-label"]
    for purpose in (["--learn"], ["--infer", "--local"]):
        code = run_command(lambda: cli.edge_run_or_command([*purpose, *given]))  # noqa: B023  # called at once
        assert code == 0, capsys.readouterr().err


def test_learning_that_is_stopped_says_so(config: DeviceConfig) -> None:
    said: list[str] = []
    stop = threading.Event()
    stop.set()
    assert learn(config, stop, said.append) is None
    assert said[-1] == "stopped before it had learned: what it had learned before stays"


def test_the_head_of_a_run_and_that_of_learning_alone_are_one(
    tmp_path: Path, package: Package, config: DeviceConfig
) -> None:
    line = Line(tmp_path, config, package)
    line.server.on_open = lambda server: server.ask_features()
    line.run(until=lambda: line.server.images == 12)
    line.close()
    first = (config.state / "checkpoints" / "local_head").read_bytes()
    report, said = learned(config)
    assert (config.state / "checkpoints" / "local_head").read_bytes() == first
    assert report.outcome == "learned" and report.bytes_on_wire == 0 and "0 of 12 images are new here" in said


def test_only_new_images_go_through_the_frontend(
    tmp_path: Path, config: DeviceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New is what its pixels say: a renamed file is not, and what is gone from the folder is forgotten."""
    seen: list[str] = []
    real = Worker.look_at

    def look_at(self: Worker, samples: list[object]) -> None:
        seen.extend(sample.relative for sample in samples)  # type: ignore[attr-defined]
        real(self, samples)  # type: ignore[arg-type]

    monkeypatch.setattr(Worker, "look_at", look_at)
    learned(config)
    assert len(seen) == 12
    seen.clear()
    (config.data / "blue" / "blue-0-0.png").rename(config.data / "blue" / "renamed.png")
    (config.data / "blue" / "blue-0-1.png").unlink()
    write_colours(config.data, {"red": (190, 60, 60)}, 1, seed=5)
    report, said = learned(config)
    assert seen == ["red/red-5-0.png"] and "1 of 12 images are new here" in said
    assert report.local is not None and report.local.images == 12 == len(record_of(config).sample_ids)


def test_a_class_that_came_later_is_learned_here_and_leaves_the_server_s_list_alone(
    tmp_path: Path, package: Package, config: DeviceConfig, answers: Answers
) -> None:
    uploaded(tmp_path, config, package)
    write_colours(config.data, GREEN, 6)
    again = Line(tmp_path, config, package)
    (told,) = (text for text in again.said if "a green" in text)
    again.close()
    assert "new since this device adapted to 2 classes, which that run keeps" in told and "--learn" in told
    report, _ = learned(config)
    assert record_of(config).facts.classes == ("blue", "red", "a green")
    assert report.local is not None and (report.local.classes, report.local.held_out_accuracy) == (3, 1.0)

    test = replace(config, data=write_colours(tmp_path / "test", COLOURS | GREEN, 3, seed=4))
    assert answers(test)["accuracy"] == 1.0
    line = Line(tmp_path, test, package, "infer")
    assert line.equipment.terms.class_count == 2 and line.equipment.terms == replace(
        again.equipment.terms, class_count=2, class_list_hash=line.equipment.terms.class_list_hash
    )
    line.close()


def test_unlabelled_images_are_answered_and_not_learned_from(
    tmp_path: Path, config: DeviceConfig, answers: Answers
) -> None:
    learned(config)
    loose = replace(config, data=write_colours(tmp_path / "loose", COLOURS, 2, seed=3, folder=""))
    with pytest.raises(DataError, match="needs a class for each image, 4 in .* have none"):
        learn(loose, threading.Event(), lambda text: None)
    camera = replace(config, data=write_colours(tmp_path / "camera", COLOURS, 2, seed=3, folder="2026-11"))
    for each in (loose, camera):
        document = answers(each)
        assert len(document["predictions"]) == 4 and document["accuracy"] is None  # type: ignore[arg-type]
    assert "'2026-11' in " in str(document["stderr"]) and "count as unlabelled" in str(document["stderr"])


def test_without_a_head_nothing_is_answered_alone(config: DeviceConfig, package: Package, answers: Answers) -> None:
    (config.state / "checkpoints").mkdir(parents=True)
    (config.state / "checkpoints" / "site.json").write_text('{"classes":["blue","red"]}')
    told = str(answers(config, code=2)["stderr"])
    assert "has learned no head for this package" in told and "cure: run edge-run --learn with labelled images" in told


def test_the_head_of_another_package_or_noise_does_not_answer(
    tmp_path: Path, config: DeviceConfig, answers: Answers
) -> None:
    learned(config)
    other = replace(config, engine=str(write_package(tmp_path / "next", version=2).folder / "front.fake"))
    for changed in (replace(config, alpha=0.2), other):
        assert "belongs to another package or noise" in str(answers(changed, code=2)["stderr"])
    report, said = learned(other)
    assert "12 of 12 images are new here" in said and report.local is not None


def test_more_images_than_it_can_learn_from_are_said(config: DeviceConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_answers, "LEARNED_MOST", 8)
    report, said = learned(config)
    assert "answers without a server are learned from 8 of 12 images" in said
    assert report.local is not None and report.local.images == 8
    report, said = learned(replace(config, data=write_colours(config.state.parent / "others", COLOURS, 5, seed=3)))
    assert "8 of 10 images are new here" in said and report.local is not None and report.local.images == 8


def a_record() -> LocalRecord:
    rng = np.random.default_rng(0)
    facts = Facts(Basis("ab", 2, 0.1), ("cat", "dog"), 0.75, 4, Compared(3, 1.0, 0.5))
    ids = rng.integers(0, 256, (4, 16), dtype=np.uint8)
    head = rng.normal(size=(2, 5)).astype(np.float32)
    return LocalRecord(facts, head, head[:, 0], ids, rng.normal(size=(4, 5)).astype(np.float16))


def test_a_record_comes_back_as_it_was() -> None:
    record = a_record()
    found = from_bytes(to_bytes(record))
    assert found.facts == record.facts and found.pooled.tobytes() == record.pooled.tobytes()
    assert found.weight.tobytes() == record.weight.tobytes() and found.bias.tobytes() == record.bias.tobytes()


def test_a_torn_record_is_recognised_wherever_it_was_torn() -> None:
    data = to_bytes(a_record())
    for length in range(len(data)):
        for torn in (data[:length], data[:length] + bytes(len(data) - length)):
            if torn != data:  # the last bytes may be zeros anyway
                with pytest.raises(ValueError, match="not whole"):
                    from_bytes(torn)


def test_a_torn_file_is_set_aside_and_learned_anew(config: DeviceConfig, answers: Answers) -> None:
    learned(config)
    place = config.state / "checkpoints" / "local_head"
    whole = place.read_bytes()
    place.write_bytes(whole[:-9])
    (config.state / "checkpoints" / "site.json").write_text('{"classes":["blue","red"]}')
    told = str(answers(config, code=2)["stderr"])
    assert "local_head was unreadable (not whole" in told and (place.parent / "local_head.bad").exists()
    learned(config)
    assert place.read_bytes() == whole


def test_images_of_a_run_are_the_only_ones_on_record(tmp_path: Path, config: DeviceConfig, answers: Answers) -> None:
    """What is asked about is not kept: neither features nor names."""
    learned(config)
    before = record_of(config).sample_ids
    answers(replace(config, data=write_images(tmp_path / "more", {"blue": 3})))
    np.testing.assert_array_equal(record_of(config).sample_ids, before)
