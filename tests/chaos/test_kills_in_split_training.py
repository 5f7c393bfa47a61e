"""Devices and server die at random moments of sequential split training: the weights are those of a calm one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.make_package import DEVICES
from tests.over_loopback.deployment import Deployment, copy_secrets, stop

pytest.importorskip("torch", reason="the server needs torch")

EPOCHS, KILLS = 240, 20
OPTIONS = ("--seed", 3, "--run", "same", "--epochs", EPOCHS, "--batch", 3, "--learning-rate", 0.01)
LIMIT_S = 1500.0


class Server:
    """A server that is killed and started again on the port that its devices know."""

    def __init__(self, deployment: Deployment, options: Sequence[object], rng: random.Random) -> None:
        self._deployment, self._options, self._rng = deployment, options, rng
        self.process = deployment.start_server(*options, "--exit-when-done", strategy="sequential_split")
        self.dies_s = time.monotonic() + rng.uniform(1, 14)

    def is_due(self, now_s: float) -> bool:
        """Whether its time has come, which runs from when it listens."""
        if self.dies_s == 0.0 and self._listens():
            self.dies_s = now_s + self._rng.uniform(0.2, 14)
        return 0.0 < self.dies_s < now_s

    def kill(self) -> None:
        stop(self.process, signal.SIGKILL)
        self.process = self._deployment.launch_server(*self._options, "--exit-when-done", strategy="sequential_split")
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self.dies_s = 0.0

    def _listens(self) -> bool:
        assert self.process.stdout is not None
        return bool(self.process.stdout.readline())


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
    rng, kills, began_s = random.Random(3), Counter[str](), time.monotonic()
    server = Server(killed, options, rng)
    devices = {device: killed.start_device(device, *mode) for device in DEVICES}
    due_s = {device: time.monotonic() + rng.uniform(1, 6) for device in DEVICES}
    while server.process.poll() is None:
        now_s = time.monotonic()
        assert now_s - began_s < LIMIT_S, kills
        if kills["server"] < KILLS and server.is_due(now_s):
            server.kill()
            kills["server"] += 1
        for device, process in devices.items():
            if process.poll() is None and kills["device"] < KILLS and now_s > due_s[device]:
                stop(process, signal.SIGKILL)
                devices[device] = killed.start_device(device, *mode)
                due_s[device] = now_s + rng.uniform(1, 18)
                kills["device"] += 1
        time.sleep(0.02)
    assert server.process.returncode == 0, (killed.root / "server.log").read_text()[-2000:]
    for device, process in devices.items():
        assert _ended_well(process), (killed.root / f"{device}.log").read_text()[-2000:]
    assert kills == {"server": KILLS, "device": KILLS}
    assert killed.model() == calm.model() != {}
    assert [line.get("loss") for line in killed.metrics()] == [line.get("loss") for line in calm.metrics()]
    rewinds = (killed.root / "server.log").read_text().count("both sides hold")
    print(f"{dict(kills)}, {rewinds} times back to an earlier step, {time.monotonic() - began_s:.0f} s")


def _ended_well(process: subprocess.Popen[str]) -> bool:
    process.communicate(timeout=60)
    return process.returncode == 0
