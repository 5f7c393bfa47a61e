"""The spine as users run it: real package, real commands, TLS, two devices of one site; killed and started again."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import ssl
import subprocess
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from websockets.sync.client import connect

from tests.make_package import DEVICES, MODEL, MODEL_ARGS, PRIVATE_CLASSES
from tests.over_loopback.deployment import BIN, Deployment, copy_secrets, pairwise, stop, wait_until

pytest.importorskip("torch", reason="the server needs torch")

TOKENS, DIM, PATCHES = 17, 48, 16
EPOCHS = 30


@pytest.fixture
def deployment(package: Path, tmp_path: Path) -> Deployment:
    return Deployment(package, tmp_path)


def uploaded_samples(root: Path) -> list[tuple[str, int]]:
    """(device, samples stored) of the newest run."""
    state = max(root.glob("runs/*/state.sqlite"), key=os.path.getmtime)
    with sqlite3.connect(f"file:{state}?mode=ro", uri=True) as ledger:
        return ledger.execute(
            "SELECT device, SUM(rows) FROM uploads WHERE split = 'train' GROUP BY device ORDER BY device"
        ).fetchall()


@pytest.mark.parametrize(
    ("device_bin", "mode"),
    pairwise([("permuted-label",), ("logit-gradient",), ("client-head",)]),
    ids=lambda value: value.parent.name if isinstance(value, Path) else value,
)
def test_a_site_adapts_and_predicts(deployment: Deployment, device_bin: Path, mode: str) -> None:
    """In permuted-label mode the features are uploaded once; in the others labels stay on the device."""
    deployment.device_bin = device_bin
    with deployment.server("--epochs", EPOCHS, "--label-mode", mode):
        reports = deployment.run_devices("--label-mode", mode)
        answers = deployment.run_devices("--label-mode", mode, "--infer", data="test")
    alone = deployment.start_device(DEVICES[0], "--label-mode", mode, "--infer", "--once", data="test")
    answers.append(deployment.report_of(DEVICES[0], alone))
    assert [{each["answered_by"] for each in answer["predictions"]} for answer in answers] == [
        {"server"}, {"server"}, {"local"},
    ]  # fmt: skip
    for report in reports:
        assert report["local"]["images"] == report["local"]["held_out_images"] == 12
        assert report["outcome"] == ("collected" if mode == "permuted-label" else "done")
        assert report["images"] == 4 * len(PRIVATE_CLASSES) and report["int8_layers"] == 8
        assert mode != "permuted-label" or report["bytes_per_image"] == TOKENS * DIM + 2 * PATCHES
    for answer in answers:
        assert len(answer["predictions"]) == answer["images"] == 5 * len(PRIVATE_CLASSES)
        assert answer["accuracy"] > 1.5 / len(PRIVATE_CLASSES)
        assert answer["local"]["compared"]["local"] > 1.5 / len(PRIVATE_CLASSES)
    assert uploaded_samples(deployment.root) == [(device, 12) for device in DEVICES]


# With a head of its own, a killed device is in the next test; a killed server too.
@pytest.mark.parametrize(
    "mode",
    ["permuted-label", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("logit-gradient", "client-head"))],
)
def test_a_killed_device_and_a_killed_server_change_nothing(package: Path, tmp_path: Path, mode: str) -> None:
    roots = {name: tmp_path / name for name in ("undisturbed", "killed")}
    for root in roots.values():
        root.mkdir()
    calm, killed = (Deployment(package, root) for root in roots.values())
    options = ("--epochs", EPOCHS, "--label-mode", mode, "--run", "same")
    with calm.server(*options, "--exit-when-done") as server:
        calm.run_devices("--label-mode", mode)
        assert server.wait(timeout=120) == 0

    copy_secrets(calm.root, killed.root)
    server = killed.start_server(*options, "--exit-when-done")
    first, second = (killed.start_device(device, "--label-mode", mode) for device in DEVICES)
    spool = killed.root / "state" / DEVICES[0] / "spool"
    wait_until(lambda: any(spool.rglob("*.segment")), "the first device's outbox")
    stop(first, signal.SIGKILL)
    first = killed.start_device(DEVICES[0], "--label-mode", mode)
    wait_until(lambda: any(line.get("epoch", 0) >= 5 for line in killed.metrics()), "epoch 5")
    stop(server, signal.SIGKILL)
    server = killed.start_server(*options, "--exit-when-done")
    for device, process in zip(DEVICES, (first, second), strict=True):
        killed.report_of(device, process)
    assert server.wait(timeout=120) == 0

    assert uploaded_samples(killed.root) == uploaded_samples(calm.root) == [(device, 12) for device in DEVICES]
    assert killed.model() == calm.model() != {}


def test_newest_states_lost_on_either_side_change_nothing(package: Path, tmp_path: Path) -> None:
    calm, broken = (Deployment(package, tmp_path / name) for name in ("undisturbed", "broken"))
    mode = ("--label-mode", "client-head")
    options = ("--epochs", EPOCHS, *mode, "--exit-when-done", "--run", "same")
    for each in (calm, broken):
        each.root.mkdir()
    with calm.server(*options) as server:
        calm.run_devices(*mode)
        assert server.wait(timeout=120) == 0

    copy_secrets(calm.root, broken.root)
    server = broken.start_server(*options)
    first, second = (broken.start_device(device, *mode) for device in DEVICES)
    wait_until(lambda: any(line.get("epoch", 0) >= 5 for line in broken.metrics()), "epoch 5")
    stop(first, signal.SIGKILL)
    (broken.root / "state" / DEVICES[0] / "checkpoints" / "head.safetensors").write_bytes(b"torn")
    first = broken.start_device(DEVICES[0], *mode)
    wait_until(lambda: "both sides hold" in (broken.root / "server.log").read_text(), "the way back")
    wait_until(lambda: any(line.get("epoch", 0) >= 12 for line in broken.metrics()), "epoch 12")
    stop(server, signal.SIGKILL)
    (broken.root / "runs" / "same" / "checkpoints" / "site.safetensors").write_bytes(b"torn")
    server = broken.start_server(*options)
    for device, process in zip(DEVICES, (first, second), strict=True):
        broken.report_of(device, process)
    assert server.wait(timeout=120) == 0

    assert uploaded_samples(broken.root) == uploaded_samples(calm.root) == [(device, 12) for device in DEVICES]
    assert [line.get("epoch") for line in broken.metrics()] == [line.get("epoch") for line in calm.metrics()]
    assert broken.model() == calm.model() != {}
    for device in DEVICES:
        heads = [
            load_file(each.root / "state" / device / "checkpoints" / "head.safetensors") for each in (calm, broken)
        ]
        assert all(np.array_equal(heads[0][name], heads[1][name]) for name in ("weight", "bias", "second_moment"))


def test_de_03_a_server_stops_while_torch_loads_although_a_device_knocks(deployment: Deployment) -> None:
    with socket.create_server(("localhost", 0)) as free:
        deployment.port = free.getsockname()[1]
    server = deployment.launch_server()
    context = ssl.create_default_context(cafile=str(deployment.package / "keys" / "ca.pem"))
    with ExitStack() as connections:

        def knocks() -> bool:
            try:
                connections.enter_context(connect(f"wss://localhost:{deployment.port}", ssl=context))
            except OSError:
                return False
            return True

        wait_until(knocks, "the server's socket")
        assert stop(server) == 0


def test_the_commands_work_as_typed_in_a_configured_folder(deployment: Deployment) -> None:
    keys, here = deployment.package / "keys", deployment.root
    arguments = "\n".join(each.replace(" = ", "=", 1) for each in MODEL_ARGS)
    (here / "cutlayer.toml").write_text(
        f"""
[export]
model = "{MODEL}"
calibration = "{deployment.package}/public"
signing_key = "{keys}/publisher.key"
output = "front"
tune = "none"
[export.model_args]
{arguments}
[server]
strategy = "split_adaptation"
backend = "front.backend"
listen = "localhost:0"
roster = "{keys}/roster"
certificate = "{keys}/server.pem"
certificate_key = "{keys}/server.key"
[device]
data = "{deployment.package}/{DEVICES[0]}/train"
trust = "{keys}/publisher.pub"
ca = "{keys}/ca.pem"
key = "{keys}/devices/{DEVICES[0]}/device.key"
name = "{DEVICES[0]}"
state = "state"
site_secret = "{keys}/sites/site.secret"
"""
    )
    export = subprocess.run(
        [BIN / "export-frontend", "--split", "2", "--int8"], cwd=here, capture_output=True, text=True
    )
    assert export.returncode == 0, export.stderr
    server = subprocess.Popen(
        [BIN / "server-run"], cwd=here, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        run = subprocess.run(
            [BIN / "edge-run", "--engine", "front.plan"],
            cwd=here,
            env={**os.environ, "CUTLAYER_DEVICE_SERVER": url},
            capture_output=True,
            text=True,
        )
    finally:
        stop(server)
    assert run.returncode == 0, run.stderr
    assert "tensorrt" in run.stderr.lower()  # says that another engine runs, and why
