"""edge-run over real sockets on this machine: TLS, lost connections, signals, refusals, clocks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from contract.canonical import encode, to_json
from contract.console import run_command
from contract.exposition import to_text
from contract.messages import Bye, Heartbeat, Message, Refuse, Welcome
from contract.signature import load_public
from edge_runtime.allowance import Allowance, Record
from edge_runtime.cli import edge_run, parser
from edge_runtime.config import FIELDS, DeviceConfig
from edge_runtime.meters import probe
from edge_runtime.meters.modelled import open_modelled
from edge_runtime.standing import Link, Standing, families, in_words
from edge_runtime.status_file import read_status
from tests.edge_runtime.fake_package import Package, write_device, write_images, write_package
from tests.edge_runtime.memory_server import MemoryServer
from tests.over_loopback.socket_server import SocketServer, certificate_digest, write_certificate

ROOT = Path(__file__).parents[2]
CLASSES = {"apple": 8, "Zebra": 5, "owl": 7}


def welcome_of(package: Package, **changes: object) -> Welcome:
    welcome = Welcome(
        session="s1",
        run="run-1",
        site="clinic",
        strategy="split_adaptation",
        label_mode="permuted-label",
        class_count=len(CLASSES),
        class_list_hash=None,
        package_digest=package.digest.hex(),
        kappa=1.0,
        seed=7,
        credit=4,
        heartbeat_s=0.5,
        last_seq=0,
    )
    return replace(welcome, **changes)  # type: ignore[arg-type]


def memory_server(root: Path, package: Package, channel_binding: bytes = b"", **changes: object) -> MemoryServer:
    server = MemoryServer(load_public(root / "device.pub"), welcome_of(package, **changes))
    server.channel_binding = channel_binding
    server.on_open = lambda server: server.ask_features()
    server.on_message = lambda server, message: server.say_bye_when_complete(message)
    return server


def flags_of(config: DeviceConfig, names: Collection[str] | None = None) -> list[str]:
    flags: list[str] = []
    for field in FIELDS:
        value = getattr(config, field.name) if names is None or field.name in names else None
        if value not in (None, "", ()):
            flags += ["--" + field.name.replace("_", "-"), str(value)]
    return flags


@dataclass(frozen=True)
class Done:
    """How a run in this process ended."""

    code: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process: starting an interpreter for each run would take most of the time."""

    def call(config: DeviceConfig, *more: str, names: Collection[str] | None = None) -> Done:
        capsys.readouterr()
        arguments = parser().parse_args([*flags_of(config, names), *more])
        code = run_command(lambda: edge_run(arguments, {}, ROOT))
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return write_package(tmp_path / "front")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_images(tmp_path / "images", CLASSES)


@pytest.fixture
def plain() -> Iterator[SocketServer]:
    server = SocketServer().start()
    yield server
    server.stop()


def test_a_whole_run_over_tls_reports_what_it_did(tmp_path: Path, package: Package, images: Path, run: Run) -> None:
    certificate = write_certificate(tmp_path / "tls")
    server = SocketServer(certificate).start()
    config = write_device(tmp_path, package, images, server.url, ca=certificate[0])
    server.memory = memory_server(tmp_path, package, certificate_digest(certificate[0]))
    done = run(config, "--format", "json")
    server.stop()
    assert done.code == 0, done.stderr
    assert "may be switched off" in done.stderr
    report = json.loads(done.stdout)
    assert (report["schema_version"], report["kind"], report["outcome"]) == (1, "edge-run", "collected")
    assert report["images"] == server.memory.images == 20
    assert report["class_counts"] == [5, 8, 7]
    payload = sum(array.nbytes for batch in server.memory.stored.values() for array in (batch.codes, batch.sources))
    assert report["bytes_sent_payload"] == payload and report["bytes_per_image"] == payload / 20
    assert payload < report["bytes_on_wire"] == sum(map(len, server.memory.wire))
    assert report["bytes_received"] > 0 and report["connections"] == server.connections
    assert report["round_trips"] == 1  # one ask for all features
    assert set(report["stages_s"]) == {"extract", "learn", "retrieve", "upload"}
    assert report["energy_j"] is not None or report["energy_reason"]
    assert report["engine"] == "fake 1" and 0.0 < report["codes_changed"] < 1.0
    assert report["peak_rss_mb"] > 1


def test_energy_is_in_the_device_s_own_report_and_nowhere_else(
    tmp_path: Path, package: Package, images: Path, plain: SocketServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_runtime.equip.probe", lambda **asked: probe(tmp_path / "no meters", **asked))
    monkeypatch.setattr("edge_runtime.meters.open_modelled", lambda model, root: open_modelled(model))
    config = write_device(tmp_path, package, images, plain.url, power_model="3.2539:9.515625")
    plain.memory = memory_server(tmp_path, package)
    done = run(config, "--format", "json")
    assert done.code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["energy_scope"].startswith("modelled: model of this device's configuration")
    assert report["energy_reason"] == "modelled, not measured"
    energies_j, bounds_j = report["stages_energy_j"], report["stages_energy_bound_j"]
    assert set(energies_j) == set(bounds_j) == {"extract", "learn", "retrieve", "upload"}
    for name, seconds in report["stages_s"].items():
        assert bounds_j[name] >= energies_j[name] / 2
        assert (
            energies_j[name] - bounds_j[name] <= 9.5 * seconds and energies_j[name] + bounds_j[name] >= 3.25 * seconds
        )
    assert report["energy_j"] <= sum(energies_j.values()) + 1e-6
    assert (report["round_trips"], report["energy_per_upload_j"]) == (1, report["energy_j"])
    wire = b"".join(frame[:4096] for frame in plain.memory.wire)
    for word in (b"energy", b"joule", b"watt", b"power", b"model of", b"9.515625", b"3.2539", b"slowed"):
        assert word not in wire


def test_lost_connections_lose_and_repeat_nothing(
    tmp_path: Path, package: Package, plain: SocketServer, run: Run
) -> None:
    images = write_images(tmp_path / "images", dict.fromkeys(CLASSES, 200))
    config = write_device(tmp_path, package, images, plain.url)
    plain.memory = memory_server(tmp_path, package, credit=1)
    plain.closed_after = lambda frames: plain.connections < 4 and frames >= 3
    done = run(config, "--format", "json")
    assert done.code == 0, done.stderr
    assert plain.connections == 4 and (plain.memory.images, plain.memory.copies) == (600, 0)
    assert "trying again in" in done.stderr


def test_a_name_that_two_machines_fight_for_ends_with_exit_code_6(
    tmp_path: Path, package: Package, images: Path, plain: SocketServer, run: Run
) -> None:
    config = write_device(tmp_path, package, images, plain.url)
    plain.memory = memory_server(tmp_path, package)
    plain.close_code = 4000
    plain.closed_after = lambda frames: frames >= 2
    done = run(config)
    assert done.code == 6 and plain.connections == 3, done.stderr
    assert (
        "another program joins under this device's name" in done.stderr and "cure: stop one of the two" in done.stderr
    )


def test_images_that_are_not_those_of_the_running_upload_end_with_exit_code_6(
    tmp_path: Path, package: Package, images: Path, plain: SocketServer, run: Run
) -> None:
    config = write_device(tmp_path, package, images, plain.url)
    plain.memory = memory_server(tmp_path, package)
    assert run(config).code == 0
    write_images(images, {"apple": 1}, seed=9)
    plain.memory.on_open = lambda server: server.session.send(Bye("collected", True))
    done = run(config)
    assert done.code == 6 and "another upload under this device's name" in done.stderr, done.stderr


def test_predictions_come_as_csv(tmp_path: Path, package: Package, images: Path, plain: SocketServer, run: Run) -> None:
    config = write_device(tmp_path, package, images, plain.url)
    plain.memory = memory_server(tmp_path, package)
    assert run(config).code == 0
    plain.memory = MemoryServer(load_public(tmp_path / "device.pub"), welcome_of(package, session="s2"))
    plain.memory.on_message = lambda server, message: server.score(message, len(CLASSES))
    done = run(config, "--infer", "--format", "csv", "-o", str(tmp_path / "predictions.csv"))
    assert done.code == 0 and done.stdout == "", done.stderr
    lines = (tmp_path / "predictions.csv").read_text().splitlines()
    assert lines[0] == "file,class,probability,answered_by" and len(lines) == 21
    assert lines[1].startswith("Zebra/Zebra_0.png,")


def test_once_gives_up_with_exit_code_8(tmp_path: Path, package: Package, images: Path, run: Run) -> None:
    done = run(write_device(tmp_path, package, images, "ws://127.0.0.1:9"), "--once")
    assert done.code == 8 and "cannot be reached" in done.stderr
    assert done.stdout == "" and "Traceback" not in done.stderr


@pytest.mark.parametrize("code", ["unknown-device", "class-list"])
def test_a_fatal_refusal_ends_with_exit_code_6(
    tmp_path: Path, package: Package, images: Path, plain: SocketServer, code: str, run: Run
) -> None:
    config = write_device(tmp_path, package, images, plain.url)
    plain.memory = memory_server(tmp_path, package)
    plain.memory.refusal = Refuse(code, "not this device", "enrol it", None)
    done = run(config)
    assert done.code == 6 and "not this device" in done.stderr and "cure: enrol it" in done.stderr


def test_a_refusal_for_now_is_waited_out(
    tmp_path: Path, package: Package, images: Path, plain: SocketServer, run: Run
) -> None:
    config = write_device(tmp_path, package, images, plain.url)
    plain.memory = memory_server(tmp_path, package)
    plain.memory.refusal = Refuse("busy", "too many devices", "wait", 0.2)

    def relent(server: MemoryServer, message: Message) -> None:
        server.refusal = None if plain.connections >= 1 else server.refusal
        server.say_bye_when_complete(message)

    plain.memory.on_message = relent
    done = run(config)
    assert done.code == 0 and plain.connections == 2, done.stderr


def test_an_untrusted_certificate_is_never_accepted(tmp_path: Path, package: Package, images: Path, run: Run) -> None:
    server = SocketServer(write_certificate(tmp_path / "tls")).start()
    other, _ = write_certificate(tmp_path / "other")
    config = write_device(tmp_path, package, images, server.url, ca=other)
    done = run(config, "--once")
    server.stop()
    assert done.code == 8 and "not trusted" in done.stderr and server.connections == 0


def test_de_02_a_certificate_from_the_future_names_the_clock(
    tmp_path: Path, package: Package, images: Path, run: Run
) -> None:
    certificate = write_certificate(tmp_path / "tls", datetime.now(timezone.utc) + timedelta(days=365))
    server = SocketServer(certificate).start()
    config = write_device(tmp_path, package, images, server.url, ca=certificate[0])
    done = run(config, "--once")
    server.stop()
    assert done.code == 8 and "clock" in done.stderr


def test_de_01_a_server_that_comes_late_is_waited_for(tmp_path: Path, package: Package, images: Path) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = write_device(tmp_path, package, images, f"ws://127.0.0.1:{port}")
    edge = start(config)
    edge.wait_for("cannot be reached")
    server = SocketServer(port=port)
    server.memory = memory_server(tmp_path, package)
    server.start()
    assert edge.end() == 0, edge.text
    assert server.memory.images == 20
    server.stop()


def test_heartbeats_go_on_while_the_worker_computes(
    tmp_path: Path, images: Path, plain: SocketServer, run: Run
) -> None:
    package = write_package(tmp_path / "slow", delay_s=0.15)
    config = write_device(tmp_path, package, images, plain.url)
    plain.memory = memory_server(tmp_path, package, heartbeat_s=0.1)
    beats: list[Heartbeat] = []

    def listen(server: MemoryServer, message: Message) -> None:
        if isinstance(message, Heartbeat):
            beats.append(message)
        server.say_bye_when_complete(message)

    plain.memory.on_message = listen
    done = run(config)
    assert done.code == 0 and plain.connections == 1, done.stderr
    assert sum(beat.busy for beat in beats) >= 5
    steps = [beat.step for beat in beats]
    assert steps == sorted(steps) and len(set(steps)) >= 5  # slow work is told from none


class Edge:
    """A running edge-run, and what it said so far."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log

    @property
    def text(self) -> str:
        return self._log.read_text()

    def wait_for(self, text: str, limit_s: float = 30.0) -> None:
        wait_until(lambda: text in self.text, limit_s)

    def end(self, limit_s: float = 30.0) -> int:
        return self.process.wait(limit_s)


def start(config: DeviceConfig, *more: str) -> Edge:
    log = config.state.parent / "edge.log"
    with log.open("wb") as stream:
        environ = os.environ | {"PYTHONUNBUFFERED": "1"}
        start = [sys.executable, "-c", "from edge_runtime.cli import main; raise SystemExit(main())"]
        process = subprocess.Popen(
            [*start, *flags_of(config), *more], cwd=ROOT, stdout=stream, stderr=stream, env=environ
        )
    return Edge(process, log)


def wait_until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("reading", signal.SIGTERM),
        ("inferring", signal.SIGTERM),
        ("inferring", signal.SIGINT),
        ("reconnecting", signal.SIGTERM),
        ("waiting", signal.SIGTERM),
    ],
)
def test_de_03_a_signal_ends_the_run_well_and_nothing_is_lost(
    tmp_path: Path, plain: SocketServer, moment: str, number: signal.Signals, run: Run
) -> None:
    package = write_package(tmp_path / "slow", delay_s=0.02)
    images = write_images(tmp_path / "images", dict.fromkeys(CLASSES, 30))
    url = plain.url if moment in ("inferring", "waiting") else "ws://127.0.0.1:9"
    config = write_device(tmp_path, package, images, url)
    plain.memory = memory_server(tmp_path, package)
    if moment == "waiting":
        plain.memory.on_open = lambda server: None  # lets it in, and asks nothing
    edge = start(config)
    if moment == "reading":
        wait_until(lambda: (config.state / "identity" / "device_secret").exists())
    elif moment == "inferring":
        wait_until(lambda: (config.state / "features" / "clean.f16").exists())
    elif moment == "reconnecting":
        edge.wait_for("trying again")
    else:
        wait_until(lambda: len(plain.memory.wire) >= 2)  # type: ignore[union-attr]
    edge.process.send_signal(number)
    started_s = time.monotonic()
    assert edge.end(10) == 0, edge.text
    assert time.monotonic() - started_s < 10
    assert "Traceback" not in edge.text
    assert not list((config.state / "features").glob("*"))
    plain.memory.on_open = lambda server: server.ask_features()
    assert run(replace(config, server=plain.url)).code == 0
    assert (plain.memory.images, plain.memory.copies) == (90, 0)


def test_de_03_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    package = write_package(tmp_path / "slow", delay_s=5.0)
    images = write_images(tmp_path / "images", CLASSES)
    edge = start(write_device(tmp_path, package, images))
    wait_until(
        lambda: (
            (tmp_path / "state" / "packages").exists()
            and bool(list((tmp_path / "state" / "packages").glob(".incoming*")))
        )
    )
    edge.process.send_signal(signal.SIGTERM)
    edge.wait_for("stopping")
    edge.process.send_signal(signal.SIGTERM)
    assert edge.end(2) == 128 + signal.SIGTERM


def test_kill_9_at_any_moment_loses_nothing_and_counts_once(tmp_path: Path, plain: SocketServer, run: Run) -> None:
    package = write_package(tmp_path / "slow", delay_s=0.003)
    images = write_images(tmp_path / "images", dict.fromkeys(CLASSES, 200))
    config = write_device(tmp_path, package, images, plain.url)
    plain.memory = memory_server(tmp_path, package, credit=1)
    for moment_s in (1.0, 1.6, 2.2):
        edge = start(config)
        time.sleep(moment_s)  # not to synchronise: the moment itself is what is tried
        edge.process.kill()
        edge.end()
    done = run(config)
    assert done.code == 0, done.stderr
    assert (plain.memory.images, plain.memory.copies) == (600, 0)
    assert not list((tmp_path / "state" / "features").iterdir())


def test_a_spent_budget_of_bytes_is_waited_out_and_nothing_is_lost(
    tmp_path: Path, package: Package, images: Path, plain: SocketServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first day has bytes for a handshake, the next one for everything."""
    clock = datetime(2026, 11, 29, 12, tzinfo=timezone.utc)

    class Tight(Allowance):
        def in_words(self, largest_bytes: int = 0) -> tuple[str, str]:
            nonlocal clock
            assert self.is_spent
            words = super().in_words()
            clock, self.limit_bytes = clock + timedelta(days=1), 1_000_000
            return words

    def tight(*words: object) -> Allowance:
        return Tight(11_000, None, lambda record: None, lambda: clock, time.monotonic, clock)

    monkeypatch.setattr("edge_runtime.run.open_allowance", tight)
    config = write_device(tmp_path, package, images, plain.url, max_mb_per_day=1.0)
    plain.memory = memory_server(tmp_path, package)
    heard: list[Message] = []
    complete = plain.memory.on_message
    plain.memory.on_message = lambda server, message: (heard.append(message), complete(server, message))  # type: ignore[func-returns-value]
    done = run(config, "--format", "json")
    assert done.code == 0, done.stderr
    assert "the 0.011 MB of this day are spent: disconnected until 00:00 UTC" in done.stderr
    assert plain.connections == 2 and plain.memory.images == 20
    assert [message.reason for message in heard if isinstance(message, Bye)][0] == "budget"
    status = read_status(config.state)
    assert status["run"]["budget_bytes"] == 1_000_000 and status["run"]["budget_spent_bytes"] > 9000
    assert "budget    0.01 of 1 MB of this day" in in_words(status)
    assert "cutlayer_device_budget_spent_bytes" in to_text(
        families(Standing(**{**status["run"], "link": Link(True, 0.0)}))
    )


def test_a_budget_that_no_day_can_meet_is_told(
    tmp_path: Path, package: Package, plain: SocketServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that is larger than a whole day's budget would be tried for ever, and be the user's riddle."""

    def tight(limit_mb: float, clock_floor: datetime, say: object) -> Allowance:
        return Allowance(20_000, None, lambda record: None, lambda: clock_floor, time.monotonic, clock_floor)

    monkeypatch.setattr("edge_runtime.run.open_allowance", lambda root, *rest: tight(*rest))
    images = write_images(tmp_path / "images", dict.fromkeys(CLASSES, 200))
    config = write_device(tmp_path, package, images, plain.url, max_mb_per_day=1.0)
    plain.memory = memory_server(tmp_path, package)
    done = run(config, "--once")
    assert done.code == 8 and "the 0.02 MB of a day never let a message of 0.0" in done.stderr, done.stderr
    assert "give --max-mb-per-day 0.1 at the least" in done.stderr and plain.memory.images == 0


def test_a_spent_budget_ends_a_single_attempt(
    tmp_path: Path, package: Package, images: Path, plain: SocketServer, run: Run
) -> None:
    config = write_device(tmp_path, package, images, plain.url, max_mb_per_day=0.1)
    config.state.mkdir()
    now = datetime.now(timezone.utc)
    (config.state / "traffic.json").write_bytes(to_json(encode(Record(f"{now:%Y-%m-%d}", 100_000, 60.0))))
    done = run(config, "--once")
    assert done.code == 8 and "are spent" in done.stderr and plain.connections == 0


def test_a_device_whose_budget_is_spent_says_that_it_waits_for_the_next_day(
    tmp_path: Path, package: Package, images: Path, plain: SocketServer
) -> None:
    """No ask would help: the server is not even called."""
    config = write_device(tmp_path, package, images, plain.url, max_mb_per_day=0.1)
    config.state.mkdir()
    now = datetime.now(timezone.utc)
    (config.state / "traffic.json").write_bytes(to_json(encode(Record(f"{now:%Y-%m-%d}", 100_000, 60.0))))
    edge = start(config)
    try:
        edge.wait_for("are spent: disconnected until")
        wait_until(lambda: bool((read_status(config.state)["run"] or {"link": {}})["link"].get("cause")))
        status = read_status(config.state)
        assert status["run"]["link"]["budget_spent"] and plain.connections == 0
        work = next(line for line in in_words(status).splitlines() if line.startswith("work "))
        wanted = "work      waits for the next day: the bytes of this one are spent, goes on in "
        assert re.fullmatch(wanted + r"(\d+ h )?\d+ min, step 0", work), work
        status["age_s"] = status["run"]["link"]["retry_at_s"] - status["run"]["taken_s"] - 3700.0  # asked later
        assert f"{wanted}62 min, step 0" in in_words(status)
    finally:
        edge.process.send_signal(signal.SIGTERM)
        assert edge.end(10) == 0, edge.text
