"""Shift-aware prototypes as users run them: real packages, real commands, TLS."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.make_package import DEVICES, PRIVATE_CLASSES
from tests.over_loopback.deployment import Deployment, copy_secrets, fix_secrets, stop, wait_until

pytest.importorskip("torch", reason="the server needs torch")

MODE = ("--label-mode", "logit-gradient")
OPTIONS = (*MODE, "--batch", 6, "--learning-rate", 0.01, "--seed", 5, "--run", "same")


def deployment_at(package: Path, root: Path) -> Deployment:
    root.mkdir(exist_ok=True)
    return Deployment(package, root, front="prototypes")


def rounds_of(deployment: Deployment) -> list[dict[str, object]]:
    return [line for line in deployment.metrics() if "epoch" in line]


@pytest.mark.parametrize("copies", ["each", pytest.param("one", marks=pytest.mark.slow)])
def test_a_site_trains_with_prototypes_and_predicts(package: Path, tmp_path: Path, copies: str) -> None:
    deployment = deployment_at(package, tmp_path)
    fix_secrets(tmp_path)
    words = (*OPTIONS, "--epochs", 12, "--server-copies", copies)
    with deployment.server(*words, strategy="prototypes"):
        reports = deployment.run_devices(*MODE)
        answers = deployment.run_devices(*MODE, "--infer", data="test")
    assert [report["outcome"] for report in reports] == ["done", "done"]
    rounds = rounds_of(deployment)
    assert len(rounds) == 12 and rounds[-1]["loss"] < rounds[0]["loss"]  # type: ignore[operator]
    assert rounds[0]["strength"] == 0.0 and rounds[0]["shift"] is None
    assert all(0 < line["strength"] < 1 and line["shift"] > 0 for line in rounds[1:])  # type: ignore[operator]
    assert {line["prototypes"] for line in rounds} == {len(PRIVATE_CLASSES)}
    (published,) = tmp_path.glob("runs/*/models/site/backend.safetensors")
    heads = [
        load_file(path)["projection_weight"] for path in (package / "prototypes.backend/model.safetensors", published)
    ]
    assert np.isfinite(heads[1]).all() and (heads[0] != heads[1]).all()  # devices trained it, the server averaged it
    for answer in answers:
        assert answer["accuracy"] > 1.2 / len(PRIVATE_CLASSES)


@pytest.mark.slow
@pytest.mark.parametrize("copies", ["each", "one"])
def test_a_killed_device_and_a_killed_server_change_nothing(package: Path, tmp_path: Path, copies: str) -> None:
    calm, killed = (deployment_at(package, tmp_path / name) for name in ("undisturbed", "killed"))
    words = (*OPTIONS, "--epochs", 30, "--server-copies", copies, "--exit-when-done")
    with calm.server(*words, strategy="prototypes") as server:
        calm.run_devices(*MODE)
        assert server.wait(timeout=120) == 0

    copy_secrets(calm.root, killed.root)
    log = killed.root / "server.log"
    server = killed.start_server(*words, strategy="prototypes")
    first, second = (killed.start_device(device, *MODE) for device in DEVICES)
    wait_until(lambda: len(rounds_of(killed)) > 3, "three rounds", log)
    stop(first, signal.SIGKILL)
    first = killed.start_device(DEVICES[0], *MODE)
    wait_until(lambda: len(rounds_of(killed)) > 8, "more rounds", log)
    stop(server, signal.SIGKILL)
    server = killed.start_server(*words, strategy="prototypes")
    for device, process in zip(DEVICES, (first, second), strict=True):
        killed.report_of(device, process)
    assert server.wait(timeout=120) == 0, log.read_text()
    assert killed.model() == calm.model() != {}
    told = ("loss", "shift", "strength", "prototypes")
    assert [[line[name] for name in told] for line in _by_round(killed)] == [
        [line[name] for name in told] for line in _by_round(calm)
    ]


def _by_round(deployment: Deployment) -> list[dict[str, object]]:
    """The last line of each round: what was replayed after a stop is told again."""
    return [line for _, line in sorted({line["epoch"]: line for line in rounds_of(deployment)}.items())]


@pytest.mark.slow
def test_rounds_go_on_without_a_device_that_vanishes_and_it_gets_the_result(package: Path, tmp_path: Path) -> None:
    deployment = deployment_at(package, tmp_path)
    fix_secrets(tmp_path)
    log = tmp_path / "server.log"
    words = (*OPTIONS, "--epochs", 3, "--quorum", 1)
    with deployment.server(*words, strategy="prototypes"):
        stays = deployment.start_device(DEVICES[0], *MODE)
        # A round waits some seconds for who is not connected.
        wait_until(lambda: len(rounds_of(deployment)) > 0, "a round of one device", log)
        comes = deployment.start_device(DEVICES[1], *MODE)
        for device, process in zip(DEVICES, (stays, comes), strict=True):
            assert deployment.report_of(device, process)["outcome"] == "done"
        answers = deployment.run_devices(*MODE, "--infer", data="test")
    devices = [line["devices"] for line in rounds_of(deployment)]
    assert devices[0] == 1 and devices[-1] == 2
    assert all(answer["images"] == 5 * len(PRIVATE_CLASSES) for answer in answers)
