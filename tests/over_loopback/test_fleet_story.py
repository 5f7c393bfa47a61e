"""The whole story with real processes: an update under a running run, then a server with the new backend."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from contract import manifest as manifests
from contract.signature import load_private, sign
from tests.make_package import DEVICES
from tests.over_loopback.deployment import BIN, DEVICE_BINS, Deployment, stop, wait_until

MODE = "logit-gradient"  # devices stay for the whole of training


def next_version(package: Path, target: Path, spoil: bool = False) -> str:
    """The frontend of `package` as version 2, and a backend that belongs to it; spoiled: one that computes wrongly."""
    shutil.copytree(package / "front", target)
    shutil.copytree(package / "front.backend", target.with_name(target.name + ".backend"))
    manifest = manifests.from_bytes((target / "manifest.json").read_bytes())
    files = manifest.files
    if spoil:
        golden = target / "golden.safetensors"
        data = bytearray(golden.read_bytes())
        for place in range(len(data) - 4000, len(data), 2):
            data[place] ^= 0x55
        golden.write_bytes(data)
        sha256 = hashlib.sha256(data).hexdigest()
        files = tuple(dataclasses.replace(f, sha256=sha256) if f.name == golden.name else f for f in files)
    changed = dataclasses.replace(manifest, version=manifest.version + 1, files=files)
    signed = manifests.to_bytes(changed)
    (target / "manifest.json").write_bytes(signed)
    (target / "manifest.sig").write_bytes(sign(load_private(package / "keys" / "publisher.key"), signed))
    before, now = (
        manifests.digest(each).hex() for each in ((package / "front" / "manifest.json").read_bytes(), signed)
    )
    backend = target.with_name(target.name + ".backend")
    (backend / "manifest.json").write_bytes(signed)
    (backend / "export.json").write_text((backend / "export.json").read_text().replace(before, now))
    return now


def status(deployment: Deployment) -> dict[str, str | None]:
    words = [BIN / "python", "-m", "server_runtime.status_cli", "--runs", deployment.root / "runs", "--format", "json"]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    return {each["device"]: each["update"] for each in json.loads(done.stdout)["devices"]} if done.stdout else {}


def update(roster: Path, package: Path, *more: str) -> None:
    words = [BIN / "server-run", "update", "--roster", roster, "--package", package, *more]
    subprocess.run([str(word) for word in words], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [False, True])
def test_a_fleet_is_updated_under_a_run(package: Path, tmp_path: Path, spoil: bool) -> None:
    roster = tmp_path / "roster"
    shutil.copytree(package / "keys" / "roster", roster)
    deployment = Deployment(package, tmp_path, device_bin=DEVICE_BINS[-1], roster=roster)
    digest = next_version(package, tmp_path / "front-2", spoil)
    for device in DEVICES:  # the first package comes by hand
        keys = package / "keys" / "devices" / device
        words = [
            BIN / "edge-run", "update", package / "front", "--trust", keys / "publisher.pub", "--state",
            tmp_path / "state" / device, "--data", package / device / "train",
        ]  # fmt: skip
        subprocess.run([str(word) for word in words], check=True)
    mode = ("--label-mode", MODE)

    def engine(device: str) -> tuple[str, str]:
        return "--engine", str(tmp_path / "state" / device / "packages" / "current" / "front.onnx")

    server = deployment.start_server("--epochs", 3, *mode)
    first = deployment.start_device(DEVICES[0], *engine(DEVICES[0]), *mode)  # it waits for the other
    second = None
    try:
        update(roster, tmp_path / "front-2")
        word = "rolled-back: parity" if spoil else "ok"
        wait_until(lambda: status(deployment).get(DEVICES[0]) == word, "the canary", tmp_path / f"{DEVICES[0]}.log")
        second = deployment.start_device(DEVICES[1], *engine(DEVICES[1]), *mode)
        for device, process in zip(DEVICES, (first, second), strict=True):  # the run goes on, and ends
            assert deployment.report_of(device, process)["outcome"] == "done"
        wait_until(lambda: status(deployment).get(DEVICES[1]) == ("left out" if spoil else "ok"), "the other")
        assert (tmp_path / "state" / DEVICES[1] / "packages" / digest).exists() is not spoil
        if spoil:
            return
        stop(server)
        for device in DEVICES:  # nobody touches them: the server's run is made for version 2
            link = tmp_path / "state" / device / "packages" / "ready"
            assert link.readlink() == Path(digest)
        moved = dataclasses.replace(deployment, package=tmp_path / "moved", root=tmp_path)
        moved.package.mkdir()
        for name in ("keys", "classes.txt", *DEVICES):
            (moved.package / name).symlink_to(package / name)
        (moved.package / "front.backend").symlink_to(tmp_path / "front-2.backend")
        server = moved.start_server("--epochs", 1, *mode, "--runs", tmp_path / "runs-2")
        more = ("--max-releases", 2)
        started = [moved.start_device(device, *engine(device), *mode, *more) for device in DEVICES]
        reports = [moved.report_of(device, process) for device, process in zip(DEVICES, started, strict=True)]
        assert [report["package_digest"] for report in reports] == [digest, digest]
    finally:
        for process in (first, second, server):
            if process is not None:
                stop(process)
