"""Devices and server die at random moments of sequential split training: the weights are those of a calm one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.make_package import DEVICES
from tests.over_loopback.deployment import Deployment, copy_secrets, stop

pytest.importorskip("torch", reason="the server needs torch")

EPOCHS, KILLS = 240, 20
OPTIONS = ("--seed", 3, "--run", "same", "--epochs", EPOCHS, "--batch", 3, "--learning-rate", 0.01)
LIMIT_S = 1500.0


class Fate:
    """When something dies: a moment after the run has recorded a drawn number of epochs, so that all deaths fall into
    the run, however fast the machine is. Deaths that come due while it is being started again follow one another."""

    def __init__(self, rng: random.Random, deaths: int) -> None:
        self._rng = rng
        self._marks = sorted(rng.uniform(0.0, EPOCHS - 5) for _ in range(deaths))
        self._due_s: float | None = None
        self.deaths = 0

    def is_due(self, epochs: int, now_s: float) -> bool:
        """Whether to kill now, after this many epochs; a death is counted as soon as it is due."""
        if self.deaths == len(self._marks) or epochs < self._marks[self.deaths]:
            return False
        if self._due_s is None:
            self._due_s = now_s + self._rng.uniform(0.0, 0.5)
        if now_s < self._due_s:
            return False
        self._due_s = None
        self.deaths += 1
        return True


class Server:
    """A server that is killed and started again on the port that its devices know."""

    def __init__(self, deployment: Deployment, options: Sequence[object]) -> None:
        self._deployment, self._options = deployment, options
        self.process = deployment.start_server(*options, "--exit-when-done", strategy="sequential_split")
        self.listens = True

    def look(self) -> None:
        """See whether a restarted one listens by now."""
        assert self.process.stdout is not None
        self.listens = self.listens or bool(self.process.stdout.readline())

    def kill(self) -> None:
        stop(self.process, signal.SIGKILL)
        self.process = self._deployment.launch_server(*self._options, "--exit-when-done", strategy="sequential_split")
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self.listens = False


@pytest.mark.slow
@pytest.mark.parametrize("label_mode", ["raw-label", "client-head"])
def test_twenty_kills_of_each_side_change_nothing(package: Path, tmp_path: Path, label_mode: str) -> None:
    mode = ("--label-mode", label_mode)
    options = (*mode, *OPTIONS)
    calm, killed = (Deployment(package, tmp_path / name, front="parts") for name in ("undisturbed", "killed"))
    for each in (calm, killed):
        each.root.mkdir()
    with calm.server(*options, "--exit-when-done", strategy="sequential_split") as server:
        calm.run_devices(*mode)
        assert server.wait(timeout=120) == 0

    copy_secrets(calm.root, killed.root)
    rng, began_s = random.Random(3), time.monotonic()
    server_dies, device_dies = Fate(rng, KILLS), Fate(rng, KILLS)
    server = Server(killed, options)
    devices = {device: killed.start_device(device, *mode) for device in DEVICES}
    while server.process.poll() is None:
        now_s = time.monotonic()
        assert now_s - began_s < LIMIT_S, (server_dies.deaths, device_dies.deaths)
        epochs = len(killed.metrics())
        server.look()
        if server.listens and server_dies.is_due(epochs, now_s):
            server.kill()
        running = [device for device, process in devices.items() if process.poll() is None]
        if running and device_dies.is_due(epochs, now_s):
            device = rng.choice(running)
            stop(devices[device], signal.SIGKILL)
            devices[device] = killed.start_device(device, *mode)
        time.sleep(0.05)
    assert server.process.returncode == 0, (killed.root / "server.log").read_text()[-2000:]
    for device, process in devices.items():
        assert _ended_well(process), (killed.root / f"{device}.log").read_text()[-2000:]
    assert (server_dies.deaths, device_dies.deaths) == (KILLS, KILLS)
    assert killed.model() == calm.model() != {}
    assert [line.get("loss") for line in killed.metrics()] == [line.get("loss") for line in calm.metrics()]
    rewinds = (killed.root / "server.log").read_text().count("both sides hold")
    print(f"{KILLS} kills of each side, {rewinds} times back to an earlier step, {time.monotonic() - began_s:.0f} s")


def _ended_well(process: subprocess.Popen[str]) -> bool:
    process.communicate(timeout=60)
    return process.returncode == 0
