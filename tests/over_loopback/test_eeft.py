"""EEFT as users run it: devices with different classes in one federation, over TLS; heads that never leave them."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.make_package import DEVICES, PRIVATE_CLASSES
from tests.over_loopback.deployment import Deployment, fix_secrets, stop, wait_until

pytest.importorskip("torch", reason="the server needs torch")

MODE = ("--label-mode", "client-head")
ROUNDS = 10
OPTIONS = ("--epochs", 10 * ROUNDS, "--local-epochs", 10, "--batch", 6, "--learning-rate", 0.1, "--seed", 3, *MODE)


def own_classes(package: Path, root: Path) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Options of the second device, whose task has two of the three classes: to train, and to predict."""
    names = sorted(PRIVATE_CLASSES)[:2]
    (root / "two.txt").write_text("\n".join(names) + "\n")
    for part in ("train", "test"):
        for name in names:
            shutil.copytree(package / DEVICES[1] / part / name, root / part / name)
    return tuple(("--classes", root / "two.txt", "--data", root / part) for part in ("train", "test"))


def test_devices_of_two_tasks_share_modules_keep_their_heads_and_survive_a_kill(package: Path, tmp_path: Path) -> None:
    deployment = Deployment(package, tmp_path, front="eeft")
    fix_secrets(tmp_path)
    training, prediction = own_classes(package, tmp_path)
    log = tmp_path / "server.log"
    with deployment.server(*OPTIONS, "--threshold", "inf", strategy="eeft"):
        first = deployment.start_device(DEVICES[0], *MODE)
        second = deployment.start_device(DEVICES[1], *MODE, *training)
        wait_until(lambda: len(deployment.metrics()) >= 4, "four rounds", log)
        stop(second, signal.SIGKILL)
        second = deployment.start_device(DEVICES[1], *MODE, *training)
        reports = [deployment.report_of(*each) for each in zip(DEVICES, (first, second), strict=True)]
    assert [report["outcome"] for report in reports] == ["done", "done"]
    assert [report["classes"] for report in reports] == [3, 2]
    lines = [line for line in deployment.metrics() if "loss" in line]
    assert len(lines) == ROUNDS and lines[-1]["loss"] < lines[0]["loss"]
    assert [line["groups"] is None for line in lines[:4]] == [True, True, True, False]  # the rounds alone

    (published,) = (tmp_path / "runs").glob("*/models/site/backend.safetensors")
    for name in load_file(published):
        part = name.removeprefix("device-a.").removeprefix("device-b.")
        assert part in ("alpha", "beta") or part.startswith("skips."), name  # no backbone, no head

    answers = [
        deployment.report_of(device, deployment.start_device(device, *MODE, "--infer", *extra, data="test"))
        for device, extra in zip(DEVICES, ((), prediction), strict=True)
    ]  # the server is gone: the whole model is here
    assert [len(answer["predictions"]) for answer in answers] == [15, 10]
    assert answers[0]["accuracy"] > 0.5 and answers[1]["accuracy"] > 0.7
