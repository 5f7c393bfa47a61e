"""The programs that the benchmark of the wire starts: servers, devices and bare clients, with keys, in one folder.

What they do is said in their own files; what they are asked to do, and what is made of it, in `bench_wire`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tools import make_keys
from tools.bench_wire_control import Control

STOP_S = 20.0
SITE = "site"


@dataclass
class Programs:
    """Starts the programs in one temporary folder, and stops them."""

    root: Path
    device_python: str
    _stack: ExitStack = field(default_factory=ExitStack)

    @property
    def keys(self) -> Path:
        return self.root / "keys"

    def make_keys(self, devices: list[str]) -> None:
        make_keys.make_publisher(self.keys)
        make_keys.make_ca(self.keys)
        make_keys.make_server(self.keys, ["localhost", "127.0.0.1"])
        for device in devices:
            make_keys.make_device(self.keys, SITE, device)

    def start(self, python: str, module: str, *arguments: object) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        program = subprocess.Popen(
            [python, "-m", module, *map(str, arguments)], stdout=subprocess.PIPE, text=True, env=environment
        )
        self._stack.callback(stop, program)
        return program

    def start_server(self, name: str, module: str, *arguments: object) -> tuple[Control, str]:
        """A server that listens, and its URL; whoever takes the orders may not be there yet."""
        control = Control(self.root / f"{name}.socket")
        words = ("--keys", self.keys, "--control", control.path, *arguments)
        program = self.start(sys.executable, module, *words)
        assert program.stdout is not None
        line = program.stdout.readline()
        if not line.startswith("listening on "):
            raise RuntimeError(f"{module} did not start: {line!r}")
        control.accept()
        return control, line.split()[-1]

    def start_device(self, name: str, url: str, upload_bytes: int, *extra: object) -> subprocess.Popen[str]:
        words = ("--server", url, "--name", name, "--keys", self.keys, "--state", self.root / "state" / name)
        return self.start(self.device_python, "tools.bench_wire_device", *words, "--upload-bytes", upload_bytes, *extra)

    def start_bare_client(self, name: str, url: str) -> subprocess.Popen[str]:
        words = ("client", "--server", url, "--keys", self.keys, "--folder", self.root / name)
        return self.start(self.device_python, "tools.bench_wire_bare", *words)

    def close(self) -> None:
        self._stack.close()


def stop(program: subprocess.Popen[str]) -> None:
    if program.poll() is None:
        program.send_signal(signal.SIGTERM)
    try:
        program.communicate(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        program.kill()
        program.communicate()


@contextmanager
def programs(device_python: str, devices: list[str]) -> Iterator[Programs]:
    with tempfile.TemporaryDirectory(prefix="cutlayer-bench-") as folder:
        started = Programs(Path(folder), device_python)
        started.make_keys(devices)
        try:
            yield started
        finally:
            started.close()
