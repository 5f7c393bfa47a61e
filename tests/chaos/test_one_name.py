"""Two devices with one name at the same time: on one state folder, and on two machines with one key."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

import pytest

from tests.chaos.adaptation import (
    CLIENT_HEAD,
    GRADIENT,
    PERMUTED,
    behind,
    check_unharmed,
    finish,
    log_of,
    options,
    start_devices,
    stored_samples,
)
from tests.chaos.limits import SMALL_BATCHES
from tests.chaos.proxy import TcpProxy, Weather
from tests.make_package import DEVICES
from tests.over_loopback.deployment import Deployment, wait_until

pytest.importorskip("torch", reason="the server needs torch")

Make = Callable[[str], Deployment]
Limit = Callable[..., None]
FIRST = DEVICES[0]
DEVICE_ERROR, PROTOCOL_ERROR = 5, 6  # exit codes, contract/errors.py
END_S = 60.0


def start_twin(deployment: Deployment, mode: str, data: str) -> subprocess.Popen[str]:
    """Another machine with the first device's name and key, and a state of its own."""
    return deployment.start_device(FIRST, "--label-mode", mode, "--state", deployment.root / "twin", data=data)


def stored_of_first(deployment: Deployment) -> int:
    return len(stored_samples(deployment.root).get(FIRST, ()))


@pytest.mark.slow
@pytest.mark.parametrize("mode", [PERMUTED, GRADIENT, CLIENT_HEAD])
def test_a_second_edge_run_on_one_state_is_sent_away(mode: str, fresh: Make, calm: Make) -> None:
    deployment, weather = fresh(mode), Weather(delay_s=0.05)
    with deployment.server(*options(mode)) as server, TcpProxy(deployment.port, weather) as proxy:
        through = behind(deployment, proxy.port)
        devices = start_devices(through, mode)
        wait_until(lambda: proxy.connections >= 1, "a connection")
        second = through.start_device(FIRST, "--label-mode", mode)
        second.communicate(timeout=END_S)
        weather.delay_s = 0.0
        finish(deployment, devices, server)
    assert second.returncode == DEVICE_ERROR
    assert "is in use by another edge-run" in log_of(deployment, FIRST)
    check_unharmed(deployment, calm(mode))


def test_a_twin_and_a_second_edge_run_on_one_state_disturb_no_training(fresh: Make, calm: Make) -> None:
    deployment, weather = fresh(GRADIENT), Weather(delay_s=0.1)  # leaves time while the site trains
    with deployment.server(*options(GRADIENT)) as server, TcpProxy(deployment.port, weather) as proxy:
        through = behind(deployment, proxy.port)
        devices = start_devices(through, GRADIENT)
        wait_until(lambda: bool(deployment.metrics()), "training")
        second = through.start_device(FIRST, "--label-mode", GRADIENT)
        twin = start_twin(deployment, GRADIENT, "test")
        for process in (second, twin):
            process.communicate(timeout=END_S)
        weather.delay_s = 0.0
        finish(deployment, devices, server)
    assert second.returncode == DEVICE_ERROR and "is in use by another edge-run" in log_of(deployment, FIRST)
    assert twin.returncode == PROTOCOL_ERROR
    check_unharmed(deployment, calm(GRADIENT))


@pytest.mark.slow
def test_a_twin_that_comes_after_the_upload_is_told_that_it_is_not_its_own(fresh: Make, calm: Make) -> None:
    deployment = fresh(PERMUTED)
    with deployment.server(*options(PERMUTED)) as server:
        first = deployment.start_device(FIRST)
        deployment.report_of(FIRST, first)
        twin = start_twin(deployment, PERMUTED, "test")
        twin.communicate(timeout=END_S)
        deployment.report_of(DEVICES[1], deployment.start_device(DEVICES[1]))
        assert server.wait(END_S) == 0
    assert twin.returncode == PROTOCOL_ERROR and "another upload under this device's name" in log_of(deployment, FIRST)
    check_unharmed(deployment, calm(PERMUTED))


@pytest.mark.slow
def test_a_twin_that_comes_in_the_middle_of_an_upload_does_not_mix_into_it(
    fresh: Make, calm: Make, limited: Limit
) -> None:
    deployment, weather = fresh(PERMUTED), Weather(bytes_per_s=2_000)
    limited(deployment, device=SMALL_BATCHES)
    with deployment.server(*options(PERMUTED)) as server, TcpProxy(deployment.port, weather) as proxy:
        first = behind(deployment, proxy.port).start_device(FIRST)
        wait_until(lambda: stored_of_first(deployment) > 0, "the first part of an upload")
        twin = start_twin(deployment, PERMUTED, "test")
        twin.communicate(timeout=END_S)
        weather.bytes_per_s = None
        deployment.report_of(FIRST, first)
        deployment.report_of(DEVICES[1], deployment.start_device(DEVICES[1]))
        assert server.wait(END_S) == 0
    assert twin.returncode == PROTOCOL_ERROR
    said = log_of(deployment, FIRST)  # depending on who was replaced when
    assert "is stored with other samples" in said or "another upload under this device's name" in said
    check_unharmed(deployment, calm(PERMUTED))


@pytest.mark.slow
def test_of_two_copies_of_one_device_one_gives_way(fresh: Make, calm: Make) -> None:
    deployment, weather = fresh(GRADIENT), Weather(delay_s=0.5)
    shutil.copytree(deployment.root / "state" / FIRST, deployment.root / "twin")
    with deployment.server(*options(GRADIENT)) as server, TcpProxy(deployment.port, weather) as proxy:
        through = behind(deployment, proxy.port)
        devices = start_devices(through, GRADIENT)
        copies = [devices[0], start_twin(through, GRADIENT, "train")]
        wait_until(lambda: any(copy.poll() is not None for copy in copies), "one of the two to give way")
        weather.delay_s = 0.0
        for copy in copies:
            copy.communicate(timeout=END_S)
        deployment.report_of(DEVICES[1], devices[1])
        assert server.wait(END_S) == 0
    assert sorted(copy.returncode for copy in copies) == [0, PROTOCOL_ERROR]
    assert "another program joins under this device's name" in log_of(deployment, FIRST)
    check_unharmed(deployment, calm(GRADIENT))
