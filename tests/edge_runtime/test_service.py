"""The unit's text, what systemd is told, and a watchdog that only work feeds."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from contract.console import run_command, say
from contract.errors import ConfigError
from edge_runtime import run
from edge_runtime.cli import edge_run_or_command
from edge_runtime.commands.install_service import plan_service
from edge_runtime.service import Notifier, Watchdog
from edge_runtime.standing import Link, Standing
from edge_runtime.unit import WATCHDOG_S, Service, quote, unit_text

SERVICE = Service(
    ("/usr/bin/edge-run", "--config", "/etc/cutlayer/my edge.toml"),
    Path("/etc/cutlayer/device.key"),
    Path("/etc/cutlayer/site.secret"),
    Path("/etc/cutlayer/tls.key"),
    (Path("/srv/images"),),
    None,
)
AT = Standing(
    "pi", "adapt", "wss://h:1", "boot", 1, 5.0, 0.0, Link(False, 0.0, "the network is down"), None, "", True, 3, "",
    0.0, 9, None, 0, 0, 0, 0, 0, None, "none", 1, "ab", "permuted-label",
)  # fmt: skip


def test_a_watchdog_is_fed_by_work_or_by_having_none() -> None:
    dog = Watchdog()
    assert dog.is_fed(1, busy=True)
    assert not dog.is_fed(1, busy=True)  # it hangs in an image
    assert dog.is_fed(2, busy=True)
    assert dog.is_fed(2, busy=False)


def test_waiting_to_ask_again_for_a_package_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the watchdog's patience: it is told meanwhile, and a signal ends the wait."""
    assert run.AGAIN_S > WATCHDOG_S > 2 * run.BEAT_S
    told: list[str] = []

    class Signals:
        asked = asyncio.Event()

    def tell(notifier: Notifier, *states: str) -> None:
        told.extend(states)
        if len(told) == 3:
            Signals.asked.set()

    monkeypatch.setattr(Notifier, "tell", tell)
    monkeypatch.setattr(run, "BEAT_S", 0.01)
    asyncio.run(asyncio.wait_for(run.rest(3600.0, Signals()), 30.0))  # type: ignore[arg-type]
    assert told == ["WATCHDOG=1"] * 3


def test_systemd_hears_how_it_stands(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(5)
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
        notifier.tell("READY=1")
        assert manager.recv(1000) == b"READY=1"
        notifier.beat(AT)
        assert manager.recv(1000) == b"STATUS=offline: the network is down; works, step 3\nWATCHDOG=1"
        notifier.beat(AT)
        assert b"WATCHDOG" not in manager.recv(1000)
    notifier.tell("READY=1")  # nobody listens any more
    Notifier({}).tell("READY=1")


def test_secrets_come_as_credentials_and_words_are_quoted() -> None:
    text = unit_text(SERVICE)
    start = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    assert start == (
        'ExecStart=/usr/bin/edge-run --config "/etc/cutlayer/my edge.toml" --key ${CREDENTIALS_DIRECTORY}/device.key '
        "--site-secret ${CREDENTIALS_DIRECTORY}/site.secret --certificate-key ${CREDENTIALS_DIRECTORY}/tls.key "
        "--state ${STATE_DIRECTORY}"
    )
    assert "DynamicUser=yes" in text and "PrivateDevices=yes" in text and "ProtectHome=yes" in text
    other = unit_text(
        replace(SERVICE, user="me", devices=("/dev/vcio",), readable=(Path("/home/me/i"),), site_secret=None)
    )
    assert "User=me" in other and "DeviceAllow=/dev/vcio rw" in other and "PrivateDevices" not in other
    assert "ProtectHome=read-only" in other and "site.secret" not in other
    assert quote('50% "a"$') == '"50%% \\"a\\"$$"'


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_takes_the_unit_and_finds_it_well_protected(tmp_path: Path) -> None:
    unit = tmp_path / "cutlayer-edge.service"
    unit.write_text(unit_text(replace(SERVICE, command=("/bin/true",))))
    words = ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", str(unit)]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "SYSTEMD_COLORS": "0"})
    if "Unknown" in done.stderr or "unrecognized" in done.stderr:
        pytest.skip("this systemd-analyze cannot look at a file")
    assert done.returncode == 0, done.stdout[-400:] + done.stderr  # 2.0 at most


def test_a_service_is_planned_from_a_settings_file_alone(tmp_path: Path) -> None:
    arguments = argparse.Namespace(config=None, infer=True, user=None, allow_device=[], memory_max="800M")
    file = tmp_path / "edge.toml"
    file.write_text(
        '[device]\nengine = "front"\ndata = "images"\nserver = "wss://h:1"\n'
        'trust = "t.pub"\nkey = "d.key"\nname = "pi"\n'
    )
    service = plan_service(argparse.Namespace(**{**vars(arguments), "config": file}))
    assert service.command[1:] == ("--infer", "--config", str(file))
    assert service.key == tmp_path / "d.key"
    assert service.site_secret is None and service.memory_max == "800M"
    file.write_text('[device]\nname = "pi"\n')
    with pytest.raises(ConfigError):
        plan_service(argparse.Namespace(**{**vars(arguments), "config": file}))


def test_a_journal_gets_one_object_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUTLAYER_LOG", "json")
    say("two\nlines")
    say("warning: careful")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["level"], first["message"], second["level"]) == ("info", "two\nlines", "warning")
    assert first["monotonic_s"] > 0


@pytest.mark.parametrize(
    "words",
    [["--user", "x\nExecStartPre=/bin/evil"], ["--user", "a b"], ["--memory-max", "lots"], ["--allow-device", "nope"]],
)
def test_nothing_but_what_a_unit_can_hold_is_written_into_it(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(lambda: edge_run_or_command(["install-service", *words, "-o", "-"])) == 2
    assert words[0] in capsys.readouterr().err
