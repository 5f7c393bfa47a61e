"""What the tests of this folder share: how an adaptation is run, and what must hold of it whatever the weather was."""

from __future__ import annotations

import sqlite3
import subprocess
from dataclasses import replace
from pathlib import Path

from safetensors import safe_open

from tests.make_package import DEVICES, PRIVATE_CLASSES
from tests.over_loopback.deployment import Deployment

EPOCHS = 6
END_S = 120.0
PERMUTED, GRADIENT, CLIENT_HEAD = "permuted-label", "logit-gradient", "client-head"
IMAGES = 4 * len(PRIVATE_CLASSES)  # of each device


def options(mode: str) -> tuple[object, ...]:
    """Of a server that ends with the adaptation. A device's own head is drawn from the run's name, so all have one."""
    return "--run", "chaos", "--epochs", EPOCHS, "--label-mode", mode, "--exit-when-done"


def behind(deployment: Deployment, port: int) -> Deployment:
    """The same deployment as devices see it whose way to the server is another port."""
    return replace(deployment, port=port)


def adapt(deployment: Deployment, mode: str) -> None:
    """A whole adaptation that nobody disturbs."""
    with deployment.server(*options(mode)) as server:
        deployment.run_devices("--label-mode", mode)
        assert server.wait(END_S) == 0


def start_devices(deployment: Deployment, mode: str) -> list[subprocess.Popen[str]]:
    return [deployment.start_device(device, "--label-mode", mode) for device in DEVICES]


def finish(deployment: Deployment, devices: list[subprocess.Popen[str]], server: subprocess.Popen[str]) -> None:
    """All end well by themselves."""
    for device, process in zip(DEVICES, devices, strict=True):
        deployment.report_of(device, process)
    assert server.wait(END_S) == 0, log_of(deployment, "server")


def log_of(deployment: Deployment, name: str) -> str:
    path = deployment.root / f"{name}.log"
    return path.read_text() if path.exists() else ""


def check_unharmed(disturbed: Deployment, calm: Deployment) -> None:
    """The weights are those of the undisturbed adaptation bit for bit, every sample counted once, nothing crashed."""
    check_no_traceback(disturbed)
    assert disturbed.model() == calm.model() != {}
    stored = stored_samples(disturbed.root)
    assert stored == stored_samples(calm.root)
    assert {device: len(ids) for device, ids in stored.items()} == dict.fromkeys(DEVICES, IMAGES)


def check_no_traceback(deployment: Deployment) -> None:
    for path in deployment.root.glob("*.log"):
        assert "Traceback" not in path.read_text(), path.read_text()


def stored_samples(root: Path) -> dict[str, list[bytes]]:
    """Device -> wire ids of the samples that its stored batches hold; one that is stored twice is there twice."""
    found: dict[str, list[bytes]] = {}
    for state in root.glob("runs/*/state.sqlite"):
        with sqlite3.connect(f"file:{state}?mode=ro", uri=True) as ledger:
            rows = ledger.execute("SELECT device, file FROM uploads WHERE split = 'train' ORDER BY device, batch")
            for device, file in rows.fetchall():
                with safe_open(state.parent / file, framework="numpy") as stream:
                    found.setdefault(device, []).extend(row.tobytes() for row in stream.get_tensor("sample_ids"))
    return {device: sorted(ids) for device, ids in found.items()}
