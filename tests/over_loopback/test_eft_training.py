"""EFTViT as users run it: a real package, real commands, TLS; devices keep their local module and predict with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests import eft_package
from tests.make_package import DEVICES, PRIVATE_CLASSES
from tests.over_loopback.deployment import BIN, Deployment, fix_secrets, stop, wait_until

pytest.importorskip("torch", reason="the server needs torch")

DEVICE_BINS = [BIN, *(Path(python).parent for python in os.environ.get("CUTLAYER_TEST_DEVICE_PYTHONS", "").split())]
OPTIONS = ("--epochs", 24, "--local-epochs", 4, "--batch", 6, "--learning-rate", 0.002, "--seed", 5)
MODE = ("--label-mode", "raw-label")


@pytest.fixture(scope="module")
def with_eft(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small deployment, with EFTViT's package beside the others."""
    root = tmp_path_factory.mktemp("eft")
    eft_package.front_of(package, root)
    for each in package.iterdir():
        (root / each.name).symlink_to(each)
    return root


def train(deployment: Deployment, dies: str = "") -> list[dict[str, Any]]:
    """A run to its end, in which a device, the server or both are killed on the way; the devices' reports."""
    fix_secrets(deployment.root)
    words, log = (*OPTIONS, *MODE, "--run", "same", "--exit-when-done"), deployment.root / "server.log"
    server = deployment.start_server(*words, strategy="eft_vit")
    try:
        first, other = (deployment.start_device(device, *MODE) for device in DEVICES)
        for reached in (1, 2) if dies in ("device", "both") else ():
            wait_until(lambda: len(rounds_of(deployment)) >= reached, "a round", log)  # noqa: B023 - called at once
            stop(first, signal.SIGKILL)
            first = deployment.start_device(DEVICES[0], *MODE)
        if dies in ("server", "both"):
            wait_until(lambda: len(rounds_of(deployment)) >= 3, "three rounds", log)
            stop(server, signal.SIGKILL)
            server = deployment.start_server(*words, strategy="eft_vit")
        reports = [deployment.report_of(DEVICES[0], first), deployment.report_of(DEVICES[1], other)]
        assert server.wait(timeout=120) == 0, log.read_text()
    finally:
        stop(server)
    return reports


@pytest.mark.parametrize(
    "device_bin",
    [BIN, *(pytest.param(each, marks=pytest.mark.slow) for each in DEVICE_BINS[1:])],
    ids=lambda path: path.parent.name,
)
def test_a_site_trains_its_local_modules_and_predicts_by_itself(
    with_eft: Path, tmp_path: Path, device_bin: Path
) -> None:
    deployment = Deployment(with_eft, tmp_path, device_bin=device_bin, front=eft_package.NAME)
    reports = train(deployment)
    assert [report["outcome"] for report in reports] == ["done", "done"]
    rounds = rounds_of(deployment)
    assert [line["epoch"] for line in rounds] == [4, 8, 12, 16, 20, 24]
    assert rounds[-1]["loss"] < rounds[0]["loss"] and rounds[-1]["server_loss"] < rounds[0]["server_loss"]
    rows = 4 * len(PRIVATE_CLASSES) * len(DEVICES)
    assert rounds[0]["features"] == rows  # as many of each class: all are sent
    assert rounds[0]["bytes_up"] == rows * ((eft_package.KEPT + 1) * eft_package.DIM * 2 + 2)
    for device in DEVICES:  # no server: own local module, and what the server last sent
        answer = deployment.report_of(device, deployment.start_device(device, *MODE, "--infer", data="test"))
        assert len(answer["predictions"]) == 5 * len(PRIVATE_CLASSES)
        assert answer["accuracy"] > 1.5 / len(PRIVATE_CLASSES)


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["device", "server", "both"])
def test_kills_of_a_device_and_of_the_server_change_nothing(with_eft: Path, tmp_path: Path, dies: str) -> None:
    """The device dies twice, the server once, each as soon as a round is recorded: within the next one."""
    calm, killed = (Deployment(with_eft, tmp_path / name, front=eft_package.NAME) for name in ("calm", "killed"))
    for deployment in (calm, killed):
        deployment.root.mkdir()
    train(calm)
    train(killed, dies)
    assert killed.model() == calm.model() != {}
    told = ("epoch", "loss", "server_loss", "features", "store_rows")
    assert [[line[name] for name in told] for line in rounds_of(killed)] == [
        [line[name] for name in told] for line in rounds_of(calm)
    ]


def rounds_of(deployment: Deployment) -> list[dict[str, Any]]:
    return [line for line in deployment.metrics() if "epoch" in line]
