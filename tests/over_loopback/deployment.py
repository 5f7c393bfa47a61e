"""A real deployment on loopback for tests: server-run and edge-run as processes, over TLS."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.make_package import DEVICES

BIN = Path(sys.executable).parent
DEVICE_BINS = [BIN, *(Path(python).parent for python in os.environ.get("CUTLAYER_TEST_DEVICE_PYTHONS", "").split())]
DEADLINE_S = 120.0
TAIL_BYTES = 8192


def pairwise(stories: Sequence[tuple[str, ...]]) -> list[Any]:
    """Parameters (Python's folder, *story): each story and each Python once by default, the other pairs marked slow.

    A Python that runs one story runs them all, as far as its own unit tests tell; the pairs are for what they do not.
    """
    own = [DEVICE_BINS[(number + 1) % len(DEVICE_BINS)] for number in range(len(stories))]
    chosen = [(folder, *story) for folder, story in zip(own, stories, strict=True)]
    others = [(folder, *story) for story in stories for folder in DEVICE_BINS if (folder, *story) not in chosen]
    return [*chosen, *(pytest.param(*each, marks=pytest.mark.slow) for each in others)]


@dataclass
class Deployment:
    """`package` is what tests.make_package made; `root` is where this test's runs and device states go."""

    package: Path
    root: Path
    device_bin: Path = BIN
    server_bin: Path = BIN
    port: int = 0
    front: str = "front"  # which of the packages
    roster: Path | None = None  # default: both devices

    def start_server(self, *extra: object, strategy: str = "split_adaptation") -> subprocess.Popen[str]:
        """A server that is listening; `port` is set. A restarted one takes the port that its devices know."""
        server = self.launch_server(*extra, strategy=strategy)
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith("listening on "), (self.root / "server.log").read_text()
        self.port = int(line.rsplit(":", 1)[1])
        return server

    def launch_server(self, *extra: object, strategy: str = "split_adaptation") -> subprocess.Popen[str]:
        """A server that has just been started."""
        keys = self.package / "keys"
        words = [
            self.server_bin / "server-run", "--strategy", strategy, "--backend", self.package / f"{self.front}.backend",
            "--listen", f"localhost:{self.port}", "--roster", self.roster or keys / "roster",
            "--runs", self.root / "runs",
            "--certificate", keys / "server.pem", "--certificate-key", keys / "server.key", "--threads", 1, *extra,
        ]  # fmt: skip
        log = (self.root / "server.log").open("a")
        return subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, stderr=log, text=True)

    @contextmanager
    def server(self, *extra: object, strategy: str = "split_adaptation") -> Iterator[subprocess.Popen[str]]:
        process = self.start_server(*extra, strategy=strategy)
        try:
            yield process
        finally:
            stop(process)

    def start_device(self, device: str, *extra: object, data: str = "train") -> subprocess.Popen[str]:
        keys = self.package / "keys" / "devices" / device
        words = [
            self.device_bin / "edge-run", "--engine", self.package / self.front, "--data", self.package / device / data,
            "--server", f"wss://localhost:{self.port}", "--trust", keys / "publisher.pub", "--ca", keys / "ca.pem",
            "--key", keys / "device.key", "--name", device, "--state", self.root / "state" / device, "--threads", 1,
            "--site-secret", keys / "site.secret", "--classes", self.package / "classes.txt",
            "--format", "json", *extra,
        ]  # fmt: skip
        log = (self.root / f"{device}.log").open("a")
        return subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, stderr=log, text=True)

    def run_devices(self, *extra: object, data: str = "train") -> list[dict[str, Any]]:
        """Both devices at once, to their end; their reports."""
        started = [self.start_device(device, *extra, data=data) for device in DEVICES]
        return [self.report_of(device, process) for device, process in zip(DEVICES, started, strict=True)]

    def report_of(self, device: str, process: subprocess.Popen[str]) -> dict[str, Any]:
        output, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, (self.root / f"{device}.log").read_text()
        report: dict[str, Any] = json.loads(output)
        return report

    def metrics(self) -> list[dict[str, Any]]:
        """What the newest run has recorded so far; a last line that is still being written is left out."""
        files = sorted((self.root / "runs").glob("*/metrics.jsonl"), key=os.path.getmtime)
        lines = files[-1].read_text().splitlines(keepends=True) if files else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def newest_epoch(self) -> int:
        """Of the newest run's last lines, as a long record is slow to read; 0 before the first."""
        files = sorted((self.root / "runs").glob("*/metrics.jsonl"), key=os.path.getmtime)
        if not files:
            return 0
        with files[-1].open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = [line for line in stream.read().split(b"\n")[:-1] if line.startswith(b"{")]
        return max((json.loads(line).get("epoch", 0) for line in lines), default=0)

    def model(self) -> dict[str, bytes]:
        """The adapted weights, by file name."""
        return {path.name: path.read_bytes() for path in self.root.glob("runs/*/models/site/*.safetensors")}


def copy_secrets(source: Path, target: Path) -> None:
    """Noise and the order of training are keyed by each device's own secret: equal runs need equal secrets."""
    for device in DEVICES:
        _write_secret(target, device, (source / "state" / device / "identity" / "device_secret").read_bytes())


def fix_secrets(root: Path) -> None:
    """Secrets that are the same in every run of a test, so that what it learns is too."""
    for device in DEVICES:
        _write_secret(root, device, hashlib.sha256(device.encode()).digest())


def _write_secret(root: Path, device: str, content: bytes) -> None:
    identity = root / "state" / device / "identity"
    identity.mkdir(parents=True, mode=0o700, exist_ok=True)
    secret = identity / "device_secret"
    secret.write_bytes(content)
    secret.chmod(0o600)


def wait_until(holds: Callable[[], bool], what: str, log: Path | None = None) -> None:
    """Watch a condition that another process brings about; fails after DEADLINE_S, with what that process logged."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {DEADLINE_S:g} s for {what}\n{log.read_text()[-4000:] if log else ''}")
        time.sleep(0.01)


def stop(process: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> int:
    if process.poll() is None:
        process.send_signal(number)
    process.communicate(timeout=DEADLINE_S)
    return process.returncode
