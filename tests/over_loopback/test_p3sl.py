"""P3SL as users run it: device processes of different splits over TLS that sleep, die, change splits and predict."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, load_file

from tests.make_package import DEVICES
from tests.over_loopback.deployment import Deployment, fix_secrets, stop, wait_until

torch = pytest.importorskip("torch", reason="the server needs torch")

MODE = ("--label-mode", "raw-label")
FIRST, SECOND = DEVICES
OPTIONS = (*MODE, "--batch", 3, "--learning-rate", 0.01, "--sigma", 0.25, "--run", "same")


def held(deployment: Deployment, device: str) -> dict[str, np.ndarray]:
    """The part that a device holds on its disk, by the published names."""
    files = (deployment.root / "state" / device / "parts").glob("part.same.*")
    newest_part = load(max(files, key=lambda path: path.stat().st_mtime_ns).read_bytes())
    start = "part/tensor:"
    return {name.removeprefix(start): value for name, value in newest_part.items() if name.startswith(start)}


def published(deployment: Deployment) -> dict[str, np.ndarray]:
    (folder,) = deployment.root.glob("runs/*/models/site")
    return load_file(folder / "backend.safetensors")


def records(deployment: Deployment) -> list[dict[str, Any]]:
    return [line for line in deployment.metrics() if "epoch" in line]


def test_devices_of_different_splits_train_parts_of_their_own(package: Path, tmp_path: Path) -> None:
    deployment = Deployment(package, tmp_path, front="parts")
    fix_secrets(tmp_path)
    judged = ("--public", package / FIRST / "test", "--aggregate-every", 2)
    with deployment.server(*OPTIONS, *judged, "--epochs", 2, "--exit-when-done", strategy="p3sl") as server:
        started = [
            (name, deployment.start_device(name, *MODE, "--split", split, "--sigma-floor", 0.25))
            for name, split in ((FIRST, 1), (SECOND, 2))
        ]
        reports = {name: deployment.report_of(name, process) for name, process in started}
        assert server.wait(timeout=120) == 0, (tmp_path / "server.log").read_text()
    assert {report["outcome"] for report in reports.values()} == {"done"}
    assert [(line[f"split/{FIRST}"], line[f"split/{SECOND}"], line["passed_over"]) for line in records(deployment)] == [
        (1, 2, None)
    ] * 2
    last = records(deployment)[-1]
    assert last["aggregated"] == 2
    assert {f"chain/{FIRST}", f"chain/{SECOND}", "test_accuracy"} <= last.keys()

    own, whole = {name: held(deployment, name) for name in DEVICES}, published(deployment)
    shared = own[FIRST].keys() & own[SECOND].keys()
    assert shared == own[FIRST].keys() < own[SECOND].keys()
    for name in shared:  # Eq. 1, and no device was told of it
        mean = (own[FIRST][name].astype(np.float64) + own[SECOND][name]) / 2
        np.testing.assert_allclose(whole[name], mean, rtol=1e-6, atol=1e-7)
    assert any((own[FIRST][name] != own[SECOND][name]).any() for name in shared)


@pytest.mark.slow
def test_a_server_that_asks_for_less_noise_than_a_devices_floor_gets_nothing(package: Path, tmp_path: Path) -> None:
    deployment = Deployment(package, tmp_path, front="parts")
    with deployment.server(*OPTIONS, "--epochs", 1, strategy="sequential_split"):
        device = deployment.start_device(FIRST, *MODE, "--sigma-floor", 0.5)
        device.communicate(timeout=60)
        assert device.returncode == 6
    said = (tmp_path / f"{FIRST}.log").read_text()
    assert "at least 0.5 (this device's sigma_floor), there 0.25" in said
    ledger = tmp_path / "state" / FIRST / "release_ledger"
    assert not ledger.exists() or ledger.read_bytes() == b""


@pytest.mark.slow
def test_a_device_that_is_killed_in_its_turn_and_one_that_changes_its_split_do_not_stop_the_run(
    package: Path, tmp_path: Path
) -> None:
    deployment = Deployment(package, tmp_path, front="parts")
    fix_secrets(tmp_path)
    log = tmp_path / "server.log"
    words = (*OPTIONS, "--batch", 1, "--epochs", 30, "--aggregate-every", 30, "--sleep-least-s", 0)  # long turns
    with deployment.server(*words, "--exit-when-done", strategy="p3sl") as server:
        first = deployment.start_device(FIRST, *MODE, "--split", 1)
        second = deployment.start_device(SECOND, *MODE, "--split", 2)
        while not any(line["passed_over"] == FIRST for line in records(deployment)):
            epochs = len(records(deployment))
            assert epochs < 25, "it was never killed in its turn"
            steps = newest(deployment, FIRST)
            wait_until(lambda: newest(deployment, FIRST) != steps, "its turn", log)  # noqa: B023 - called at once
            stop(first, signal.SIGKILL)
            first = deployment.start_device(FIRST, *MODE, "--split", 2)
            wait_until(lambda: len(records(deployment)) > epochs, "an epoch more", log)  # noqa: B023
        deployment.report_of(FIRST, first)
        deployment.report_of(SECOND, second)
        assert server.wait(timeout=120) == 0, log.read_text()
    last = records(deployment)[-1]
    assert (last["epoch"], last["aggregated"], last[f"split/{FIRST}"]) == (30, 2, 2)
    own, whole = {name: held(deployment, name) for name in DEVICES}, published(deployment)
    with deployment.server(*words, strategy="p3sl"):
        found = deployment.start_device(SECOND, *MODE, "--infer", "--split", 2, data="test")
        report = deployment.report_of(SECOND, found)
    assert report["accuracy"] is not None and len(report["predictions"]) > 0
    after = held(deployment, SECOND)
    assert all(np.array_equal(after[name], value) for name, value in own[SECOND].items())
    for name, value in own[FIRST].items():
        mean = (value.astype(np.float64) + own[SECOND][name]) / 2
        np.testing.assert_allclose(whole[name], mean, rtol=1e-6, atol=1e-7)


def newest(deployment: Deployment, device: str) -> list[str]:
    return sorted(path.name for path in (deployment.root / "state" / device / "parts").glob("part.*"))


SEVEN = {"nano-1": 1, "nano-2": 2, "nano-3": 1, "nano-4": 2, "pi-1": 1, "pi-2": 1, "laptop": 2}


@pytest.mark.slow
def test_seven_devices_of_the_papers_fleet_train_one_after_another(package: Path, tmp_path: Path) -> None:
    """Each keeps its own part through two aggregations; all sleep while the others train."""
    keys = tmp_path / "keys"
    named = [word for name in SEVEN for word in ("--device", name)]
    subprocess.run([sys.executable, "-m", "tools.make_keys", "-o", str(keys), "--site", "site", *named], check=True)
    world = tmp_path / "world"
    world.mkdir()
    for name in ("parts", "parts.backend", "classes.txt"):
        (world / name).symlink_to(package / name)
    (world / "keys").symlink_to(keys)
    for place, name in enumerate(SEVEN):
        shutil.copy(package / "keys" / "devices" / FIRST / "publisher.pub", keys / "devices" / name / "publisher.pub")
        (world / name).symlink_to(package / DEVICES[place % 2])
    deployment = Deployment(world, tmp_path, front="parts")
    words = ("--public", package / FIRST / "test", "--aggregate-every", 4, "--sleep-least-s", 0.2, "--epochs", 8)
    with deployment.server(*OPTIONS, *words, "--exit-when-done", strategy="p3sl") as server:
        started = {name: deployment.start_device(name, *MODE, "--split", split) for name, split in SEVEN.items()}
        reports = {name: deployment.report_of(name, process) for name, process in started.items()}
        assert server.wait(timeout=120) == 0, (tmp_path / "server.log").read_text()
    lines = records(deployment)
    assert [line["epoch"] for line in lines] == [*range(1, 9)]
    assert all(line[f"split/{name}"] == split for line in lines for name, split in SEVEN.items())
    assert lines[-1]["aggregated"] == 7 and lines[-1]["loss"] < lines[0]["loss"]
    assert all(report["stages_s"]["sleep"] > 0 for report in reports.values())
    own, whole = {name: held(deployment, name) for name in SEVEN}, published(deployment)
    shared = own["nano-1"].keys()
    for name in shared:
        mean = np.mean([each[name].astype(np.float64) for each in own.values()], axis=0)
        np.testing.assert_allclose(whole[name], mean, rtol=1e-5, atol=1e-6)
    parts = [b"".join(each[name].tobytes() for name in sorted(shared)) for each in own.values()]
    assert len(set(parts)) == 7  # personalised: no two are alike
