"""Features made without a server, and sent later: the same bytes as those of a run, each counted once."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest

from contract.codec import Payload
from contract.console import run_command
from contract.errors import UsageError
from edge_runtime import cli, stored, worker
from edge_runtime.config import DeviceConfig
from edge_runtime.delivery import Stopped
from edge_runtime.offline import parse_until
from edge_runtime.spool import Spool, SpoolLimits
from edge_runtime.state import open_state
from edge_runtime.stored import open_spool
from tests.edge_runtime.fake_package import Package, write_device, write_package
from tests.edge_runtime.memory_server import MemoryServer
from tests.over_loopback.socket_server import SocketServer
from tests.over_loopback.test_edge_client import Run, images, memory_server, package, plain, run

__all__ = ["images", "package", "plain", "run"]

NOW = datetime(2026, 11, 28, 17, 30, tzinfo=timezone.utc)


@pytest.fixture
def config(tmp_path: Path, package: Package, images: Path, plain: SocketServer) -> DeviceConfig:
    made = write_device(tmp_path, package, images, plain.url)
    plain.memory = memory_server(tmp_path, package)
    return made


def sync(config: DeviceConfig, *more: str, name: str = "") -> int:
    words = ["sync", "--server", config.server, "--name", name or config.name, "--key", str(config.key), *more]
    words += [] if "--spool" in more else ["--state", str(config.state)]
    return run_command(lambda: cli.edge_run_or_command(words))


def codes(memory: MemoryServer) -> dict[int, bytes]:
    return {
        batch: features.codes.tobytes() + np.asarray(features.sources).tobytes() + np.asarray(features.labels).tobytes()
        for (_, batch), features in memory.stored.items()
    }


def test_what_was_made_offline_is_what_a_run_would_send(
    config: DeviceConfig, package: Package, tmp_path: Path, plain: SocketServer, run: Run,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """And what is synced again, from a copy and from a run, is not counted twice."""
    assert plain.memory is not None
    done = run(config, "--offline", "--format", "json")
    assert done.code == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["outcome"], report["bytes_on_wire"], plain.connections) == ("made", 0, 0)
    assert "batches are kept" in done.stderr
    copy = tmp_path / "stick"
    shutil.copytree(config.state / "offline", copy)
    capsys.readouterr()
    assert sync(config, "--format", "json", "--once") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["outcome"], told["images"], told["run"]) == ("collected", 20, "run-1")
    assert not (config.state / "offline").exists()
    connections = plain.connections
    assert sync(config, "--once") == 0 and plain.connections == connections  # nothing is left: done, and nobody asked
    assert "nothing to send" in capsys.readouterr().out
    first = codes(plain.memory)
    assert run(config).code == 0  # this server asks again what it has: the same upload, as the state knows
    assert codes(plain.memory) == first
    plain.memory.copies = 0

    plain.memory.last_seq.clear()  # as from a machine that the server has not seen
    assert sync(config, "--spool", str(copy), "--once") == 0
    assert plain.memory.copies == len(first) and codes(plain.memory) == first

    plain.memory = memory_server(tmp_path, package)
    shutil.rmtree(config.state / "spool")  # the run has no record of the upload
    assert run(config).code == 0
    assert codes(plain.memory) == first


def test_a_stopped_day_goes_on_where_it_was(
    config: DeviceConfig, run: Run, plain: SocketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, kept, most = Spool.append, [], 2

    def append(self: Spool, frame: Payload, *, durable: bool) -> int:
        if len(kept) >= most:
            raise Stopped
        kept.append(frame)
        return real(self, frame, durable=durable)

    monkeypatch.setattr(worker, "samples_per_batch", lambda *arguments: 4)
    monkeypatch.setattr(Spool, "append", append)
    done = run(config, "--offline", "--format", "json")
    assert (done.code, json.loads(done.stdout)["outcome"], len(kept)) == (0, "stopped", 2)
    assert "2 of 5 batches are kept" in done.stderr
    most = 99
    assert run(config, "--offline").code == 0
    assert run(config, "--offline").code == 0
    assert len(kept) == 5  # each was made once
    assert sync(config, "--once") == 0
    assert plain.memory is not None and plain.memory.images == 20


def test_the_time_ends_a_day(package: Package, tmp_path: Path, images: Path, run: Run) -> None:
    slow = write_package(tmp_path / "slow", delay_s=0.15)
    done = run(write_device(tmp_path / "device", slow, images), "--offline", "--until", "+0.1s", "--format", "json")
    assert (done.code, json.loads(done.stdout)["outcome"]) == (0, "until"), done.stderr


def test_other_images_are_never_mixed_with_what_was_kept(
    config: DeviceConfig, run: Run, images: Path, plain: SocketServer
) -> None:
    assert run(config, "--offline").code == 0
    next(images.glob("owl/*.png")).unlink()
    done = run(config, "--offline")
    assert "made anew" in done.stderr
    assert sync(config, "--once") == 0
    assert plain.memory is not None and plain.memory.images == 19


def test_other_noise_than_was_made_is_refused_by_the_device(
    config: DeviceConfig, run: Run, plain: SocketServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plain.memory is not None
    assert run(config, "--offline").code == 0
    plain.memory.welcome = replace(plain.memory.welcome, kappa=1.5)
    assert sync(config, "--once") == 6
    assert "kappa" in capsys.readouterr().err
    assert not plain.memory.stored
    assert sync(config, "--once", name="another") == 2
    assert "are of device" in capsys.readouterr().err


def test_a_budget_needs_a_meter_and_is_kept(package: Package, tmp_path: Path, images: Path, run: Run) -> None:
    slow = write_device(tmp_path / "device", write_package(tmp_path / "slow", delay_s=0.15), images)
    done = run(replace(slow, power_model="3:5"), "--offline", "--budget", "1e-5", "--format", "json")
    assert (done.code, json.loads(done.stdout)["outcome"]) == (0, "budget"), done.stderr
    done = run(slow, "--offline", "--budget", "5")
    assert done.code == 2 and "needs a meter" in done.stderr
    done = run(slow, "--budget", "5")
    assert done.code == 2 and "without --offline" in done.stderr


def test_the_cap_drops_whole_segments_oldest_first_and_counts_them(tmp_path: Path) -> None:
    spool = Spool(tmp_path, print, SpoolLimits(segment_bytes=250, pending_bytes=600))
    spool.begin("offline", "offline", 0)
    dropped = 0
    for number in range(12):
        spool.append(bytes([number]) * 100, durable=True)
        dropped += spool.drop_oldest_beyond_limit()
        assert spool.pending_bytes <= 600
    assert dropped == spool.acknowledged > 0
    again = open_spool(tmp_path, print, 600)
    assert (again.acknowledged, again.next_seq) == (dropped, 13)
    assert again.read(dropped + 1)[0] == dropped


def test_a_sync_with_holes_sends_the_rest_and_says_what_is_missing(
    config: DeviceConfig,
    run: Run,
    plain: SocketServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(worker, "samples_per_batch", lambda *arguments: 4)
    monkeypatch.setattr(stored, "SpoolLimits", lambda: SpoolLimits(segment_bytes=1))
    assert run(config, "--offline").code == 0
    state = open_state(config.state)
    open_spool(config.state / "offline", print, 1).acknowledge(2)
    state.close()
    assert plain.memory is not None
    assert sync(config, "--once") == 5
    assert "2 of 5 batches are not here" in capsys.readouterr().err
    assert sorted(batch for _, batch in plain.memory.stored) == [2, 3, 4]
    assert run(config).code == 0  # makes them again
    assert plain.memory.images == 20


@pytest.mark.parametrize(
    ("text", "hours"),
    [("18:30", 1.0), ("17:30", 24.0), ("7:00", 13.5), ("+8h", 8.0), ("+90m", 1.5), ("+1.5s", 1.5 / 3600)],
)
def test_until(text: str, hours: float) -> None:
    assert parse_until(text, NOW) == pytest.approx(hours * 3600)


@pytest.mark.parametrize("text", ["25:00", "8h", "", "+h", "tomorrow"])
def test_until_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="HH:MM or"):
        parse_until(text, NOW)


def test_de_02_a_time_of_day_needs_a_clock() -> None:
    early = datetime(1970, 1, 1, tzinfo=timezone.utc)
    with pytest.raises(UsageError, match="needs a clock"):
        parse_until("18:30", early)
    assert timedelta(seconds=parse_until("+1h", early)) == timedelta(hours=1)
