"""Slow, flapping and refusing links: the adaptation ends by itself as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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
)
from tests.chaos.limits import QUICK_RETURN
from tests.chaos.proxy import TO_SERVER, Cut, TcpProxy, Weather, flapping
from tests.make_package import DEVICES
from tests.over_loopback.deployment import Deployment, wait_until

pytest.importorskip("torch", reason="the server needs torch")

Make = Callable[[str], Deployment]
Limit = Callable[..., None]
ALL_MODES = [PERMUTED, GRADIENT, CLIENT_HEAD]


def adapt_through(
    weather: Weather, mode: str, fresh: Make, calm: Make, limit: Limit = lambda deployment: None
) -> tuple[Deployment, TcpProxy]:
    """A whole adaptation through a proxy; its result is checked."""
    deployment = fresh(mode)
    limit(deployment)
    with deployment.server(*options(mode)) as server, TcpProxy(deployment.port, weather) as proxy:
        finish(deployment, start_devices(behind(deployment, proxy.port), mode), server)
    check_unharmed(deployment, calm(mode))
    return deployment, proxy


@pytest.mark.slow
def test_a_slow_link_only_takes_longer(fresh: Make, calm: Make) -> None:
    _, proxy = adapt_through(Weather(bytes_per_s=8_000, delay_s=0.02), PERMUTED, fresh, calm)
    assert proxy.connections == len(DEVICES)


@pytest.mark.parametrize("mode", [GRADIENT, pytest.param(PERMUTED, marks=pytest.mark.slow)])
def test_an_upload_that_is_cut_again_and_again_arrives_once(mode: str, fresh: Make, calm: Make, limited: Limit) -> None:
    # Handshakes take 3 kB, an upload 11 kB: the cuts fall into the handshake, into the upload, and close to its end.
    cuts = (Cut(1_500), Cut(6_000, reset=False), Cut(11_000), Cut(13_500, reset=False))
    weather = Weather(cut=lambda number: cuts[number - 1] if number <= len(cuts) else None)
    _, proxy = adapt_through(weather, mode, fresh, calm, partial(limited, device=QUICK_RETURN))
    assert proxy.cuts >= 3


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GRADIENT, CLIENT_HEAD])
def test_a_link_that_flaps_while_the_site_trains(mode: str, fresh: Make, calm: Make) -> None:
    weather = Weather(delay_s=0.03, cut=flapping(7, 0.15, 0.6, 8))  # so that training outlasts some connections
    deployment, proxy = adapt_through(weather, mode, fresh, calm)
    assert proxy.cuts >= 6
    assert "trying again" in log_of(deployment, DEVICES[0])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_slow_link_that_flaps(mode: str, seed: int, fresh: Make, calm: Make) -> None:
    weather = Weather(bytes_per_s=30_000, cut=flapping(seed, 0.2, 1.0, 20))
    _, proxy = adapt_through(weather, mode, fresh, calm)
    assert proxy.cuts >= 5


@pytest.mark.slow
def test_a_port_that_refuses_for_a_while_is_tried_again(fresh: Make, calm: Make) -> None:
    deployment, weather = fresh(PERMUTED), Weather(refuses=True)
    with deployment.server(*options(PERMUTED)) as server, TcpProxy(deployment.port, weather) as proxy:
        devices = start_devices(behind(deployment, proxy.port), PERMUTED)
        wait_until(lambda: proxy.connections >= 6, "attempts")
        weather.refuses = False
        finish(deployment, devices, server)
    check_unharmed(deployment, calm(PERMUTED))
    assert proxy.carried_bytes[TO_SERVER] > 0
