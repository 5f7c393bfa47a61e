"""Full disks, on small file systems of their own: a named error, nothing acknowledged lost, on when there is room."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.chaos.adaptation import (
    CLIENT_HEAD,
    GRADIENT,
    PERMUTED,
    behind,
    check_no_traceback,
    check_unharmed,
    finish,
    log_of,
    options,
    start_devices,
)
from tests.chaos.proxy import TcpProxy, Weather
from tests.make_package import DEVICES
from tests.over_loopback.deployment import Deployment, wait_until

pytest.importorskip("torch", reason="the server needs torch")

Make = Callable[[str], Deployment]
Limit = Callable[..., None]
FIRST = DEVICES[0]
DEVICE_ERROR, TRAINING_ERROR, UNREACHABLE = 5, 7, 8  # exit codes, contract/errors.py
BLOCK_BYTES = 4096
END_S = 60.0
NO_RESERVE = ("edge_runtime.pipeline:DISK_RESERVE_BYTES=0",)  # else the device says early that the disk is too small


class SmallDisk:
    """A tmpfs over a folder, and a filler on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self, free_blocks: int = 0) -> None:
        with self._filler.open("ab", buffering=0) as stream:
            try:
                while True:
                    stream.write(bytes(BLOCK_BYTES))
            except OSError:
                size = stream.tell() // BLOCK_BYTES * BLOCK_BYTES
        os.truncate(self._filler, max(0, size - free_blocks * BLOCK_BYTES))

    def empty(self) -> None:
        self._filler.unlink(missing_ok=True)


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[SmallDisk]:
    """What the folder holds is moved onto the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(folder.name + "-aside")
    folder.rename(aside)
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=0700", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        folder.rmdir()
        aside.rename(folder)
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    try:
        subprocess.run(["cp", "-a", f"{aside}/.", folder], check=True)
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def disks() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def run_first(deployment: Deployment, mode: str) -> tuple[int, str]:
    """Exit code of the first device, and what it said in this run."""
    before = len(log_of(deployment, FIRST))
    process = deployment.start_device(FIRST, "--label-mode", mode)
    process.communicate(timeout=END_S)
    return process.returncode, log_of(deployment, FIRST)[before:]


def equip_first(deployment: Deployment, mode: str) -> None:
    """Install the package and make the engine, without a server."""
    device = behind(deployment, 9).start_device(FIRST, "--label-mode", mode, "--once")
    device.communicate(timeout=END_S)
    assert device.returncode == UNREACHABLE


@pytest.mark.parametrize(
    ("mode", "blocks"),  # free ones: none for the spool; some for part of what an upload writes, up to all of it
    [(GRADIENT, (0, 1)), pytest.param(PERMUTED, tuple(range(11)), marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_a_full_disk_of_a_device_that_uploads(
    mode: str, blocks: tuple[int, ...], fresh: Make, calm: Make, disks: ExitStack, limited: Limit
) -> None:
    deployment = fresh(mode)
    limited(deployment, device=NO_RESERVE)
    disk = disks.enter_context(small_disk(deployment.root / "state" / FIRST, 16 << 20))
    equip_first(deployment, mode)
    with deployment.server(*options(mode)) as server:
        codes = []
        for free_blocks in blocks:
            disk.fill(free_blocks)
            code, said = run_first(deployment, mode)
            codes.append(code)
            assert code == 0 or (code == DEVICE_ERROR and "cure: make room" in said), said
            disk.empty()
        assert DEVICE_ERROR in codes
        finish(deployment, start_devices(deployment, mode), server)
    check_unharmed(deployment, calm(mode))


@pytest.mark.slow
def test_a_disk_of_a_device_that_fills_up_while_its_head_trains(fresh: Make, calm: Make, disks: ExitStack) -> None:
    deployment, weather = fresh(CLIENT_HEAD), Weather(delay_s=0.1)
    disk = disks.enter_context(small_disk(deployment.root / "state" / FIRST, 96 << 20))
    with deployment.server(*options(CLIENT_HEAD)) as server, TcpProxy(deployment.port, weather) as proxy:
        devices = start_devices(behind(deployment, proxy.port), CLIENT_HEAD)
        wait_until(lambda: bool(deployment.metrics()), "training")
        disk.fill()
        devices[0].communicate(timeout=END_S)
        assert devices[0].returncode == DEVICE_ERROR
        assert "cure: make room" in log_of(deployment, FIRST)
        disk.empty()
        weather.delay_s = 0.0
        devices[0] = deployment.start_device(FIRST, "--label-mode", CLIENT_HEAD)
        finish(deployment, devices, server)
    check_unharmed(deployment, calm(CLIENT_HEAD))


@pytest.mark.slow
def test_a_full_disk_of_a_server_that_stores_uploads(fresh: Make, calm: Make, disks: ExitStack) -> None:
    deployment = fresh(PERMUTED)
    disk = disks.enter_context(small_disk(deployment.root / "runs", 32 << 20))
    with deployment.server(*options(PERMUTED)) as server:
        disk.fill()
        devices = start_devices(deployment, PERMUTED)
        assert server.wait(END_S) == TRAINING_ERROR
    assert "cannot be written" in log_of(deployment, "server")
    check_no_traceback(deployment)
    disk.empty()
    with deployment.server(*options(PERMUTED)) as server:
        finish(deployment, devices, server)
    check_unharmed(deployment, calm(PERMUTED))


@pytest.mark.slow
def test_a_server_that_starts_on_a_full_disk_says_so(fresh: Make, calm: Make, disks: ExitStack) -> None:
    deployment = fresh(PERMUTED)
    disk = disks.enter_context(small_disk(deployment.root / "runs", 32 << 20))
    with deployment.server(*options(PERMUTED)):
        pass
    disk.fill()
    for extra in ((), ("--run", "another")):
        server = deployment.launch_server(*options(PERMUTED), *extra)
        server.communicate(timeout=END_S)
        assert server.returncode in (2, TRAINING_ERROR), log_of(deployment, "server")
    check_no_traceback(deployment)
    disk.empty()
    with deployment.server(*options(PERMUTED)) as server:
        finish(deployment, start_devices(deployment, PERMUTED), server)
    check_unharmed(deployment, calm(PERMUTED))


@pytest.mark.slow
@pytest.mark.parametrize("free_blocks", [0, 8, 64])
def test_a_disk_of_a_server_that_fills_up_while_a_site_trains(
    free_blocks: int, fresh: Make, calm: Make, disks: ExitStack
) -> None:
    deployment, weather = fresh(GRADIENT), Weather(delay_s=0.1)
    disk = disks.enter_context(small_disk(deployment.root / "runs", 32 << 20))
    with deployment.server(*options(GRADIENT)) as server, TcpProxy(deployment.port, weather) as proxy:
        devices = start_devices(behind(deployment, proxy.port), GRADIENT)
        wait_until(lambda: bool(deployment.metrics()), "training")
        disk.fill(free_blocks)
        weather.delay_s = 0.0
        assert server.wait(END_S) == TRAINING_ERROR, log_of(deployment, "server")
        disk.empty()
        with deployment.server(*options(GRADIENT)) as again:
            finish(deployment, devices, again)
    check_unharmed(deployment, calm(GRADIENT))
