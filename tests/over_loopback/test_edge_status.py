"""What a device tells of itself while it runs, and afterwards: edge-run status, and /metrics on this machine."""

from __future__ import annotations

import json
import socket
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contract.console import run_command
from contract.errors import ConfigError
from contract.messages import Features, Message
from edge_runtime import cli
from edge_runtime.config import check_metrics
from edge_runtime.status_file import read_status
from tests.edge_runtime.fake_package import Package, write_device
from tests.edge_runtime.memory_server import MemoryServer
from tests.over_loopback.socket_server import SocketServer
from tests.over_loopback.test_edge_client import Run, images, memory_server, package, plain, run

__all__ = ["images", "package", "plain", "run"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_run_tells_of_itself_while_it_goes_on_and_after(
    tmp_path: Path, package: Package, images: Path, plain: SocketServer, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    config = replace(write_device(tmp_path, package, images, plain.url), metrics=f"127.0.0.1:{port}")
    plain.memory = memory_server(tmp_path, package)
    seen: list[tuple[dict[str, Any], str, dict[str, Any]]] = []

    def look(server: MemoryServer, message: Message) -> None:
        if isinstance(message, Features) and not seen:
            pages = [
                urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10).read().decode()  # noqa: S310
                for path in ("metrics", "status")
            ]
            seen.append((read_status(config.state), pages[0], json.loads(pages[1])))
        server.say_bye_when_complete(message)

    plain.memory.on_message = look
    assert run(config).code == 0
    (status, metrics, live) = seen[0]
    assert status["state"] == "running" and status["run"]["device"] == config.name
    assert status["age_s"] >= 0
    assert live["link"]["connected"] and live["run"] == "run-1" and live["images"] == 20
    assert "cutlayer_device_connected 1\n" in metrics
    assert "cutlayer_device_images 20\n" in metrics
    assert "energy" not in metrics  # unknown is not 0

    words = ["status", "--state", str(config.state)]
    capsys.readouterr()
    assert run_command(lambda: cli.edge_run_or_command([*words, "--format", "json"])) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["kind"], told["state"]) == ("edge-run-status", "stopped")
    assert told["spools"]["adapt"]["bytes"] >= 0
    assert run_command(lambda: cli.edge_run_or_command(words)) == 0
    shown = capsys.readouterr().out
    assert "state     stopped" in shown and "energy    unknown: " in shown
    assert "work      came to step" in shown and "MB kept here" in shown
    assert not any(words in shown for words in ("waits for", "connected for", "it says"))  # it does no longer


def test_who_is_offline_says_since_when_and_why(tmp_path: Path, package: Package, images: Path, run: Run) -> None:
    config = write_device(tmp_path, package, images, "ws://127.0.0.1:1")
    run(config, "--once")
    link = read_status(config.state)["run"]["link"]
    assert not link["connected"]
    assert read_status(config.state)["link_s"] >= 0


def test_a_folder_that_is_no_state_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no state directory"):
        read_status(tmp_path)


@pytest.mark.parametrize(
    "address", ["0.0.0.0:9101", "host:9101", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:" + "9" * 5000, "[::]:1"]
)
def test_metrics_never_leave_the_machine(address: str) -> None:
    with pytest.raises(ConfigError, match="of this machine"):
        check_metrics(address)


def test_metrics_addresses() -> None:
    assert check_metrics(None) is None
    assert check_metrics("[::1]:9101") == ("::1", 9101)
