"""Half-open links and servers that take a connection and say nothing: noticed by time, and got over."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.chaos.adaptation import GRADIENT, PERMUTED, behind, check_unharmed, finish, log_of, options, start_devices
from tests.chaos.limits import DEVICE_SHORT_SILENCE, QUICK_RETURN, SHORT_SILENCE, SILENCE_S
from tests.chaos.proxy import TO_DEVICE, TO_SERVER, Mute, TcpProxy, Weather
from tests.make_package import DEVICES
from tests.over_loopback.deployment import Deployment, wait_until

pytest.importorskip("torch", reason="the server needs torch")

Make = Callable[[str], Deployment]
Limit = Callable[..., None]
SIDES = {"device": {TO_SERVER}, "server": {TO_DEVICE}, "both": {TO_SERVER, TO_DEVICE}}  # whose bytes vanish
STEP_DELAY_S = 0.1  # leaves time to act while the site trains


def lose_bytes_while_training(deployment: Deployment, swallowed: set[str]) -> float:
    """Swallow bytes for good on the connections that stand, let new ones through, and end well; seconds until noticed.

    It was noticed when a device came back on a new connection.
    """
    weather = Weather(delay_s=STEP_DELAY_S)
    with deployment.server(*options(GRADIENT)) as server, TcpProxy(deployment.port, weather) as proxy:
        devices = start_devices(behind(deployment, proxy.port), GRADIENT)
        wait_until(lambda: bool(deployment.metrics()), "training")
        standing = proxy.connections
        weather.swallowed = swallowed
        since_s = time.monotonic()
        wait_until(lambda: proxy.swallowing == len(DEVICES), "bytes to vanish")
        weather.swallowed = set()
        wait_until(lambda: proxy.connections > standing, "a new connection")
        noticed_s = time.monotonic() - since_s
        weather.delay_s = 0.0
        finish(deployment, devices, server)
    return noticed_s


@pytest.mark.parametrize(
    "side", ["both", *(pytest.param(each, marks=pytest.mark.slow) for each in ("device", "server"))]
)
def test_wi_03_a_half_open_link_is_noticed_and_replaced(side: str, fresh: Make, calm: Make, limited: Limit) -> None:
    deployment = fresh(GRADIENT)
    limited(deployment, SHORT_SILENCE, (*DEVICE_SHORT_SILENCE, *QUICK_RETURN))
    noticed_s = lose_bytes_while_training(deployment, SIDES[side])
    check_unharmed(deployment, calm(GRADIENT))
    assert noticed_s < 4 * SILENCE_S  # heartbeats are the only thing that can end this


@pytest.mark.slow
def test_wi_03_a_half_open_link_is_noticed_within_a_minute_by_the_limits_that_users_have(
    fresh: Make, calm: Make
) -> None:
    deployment = fresh(GRADIENT)
    assert lose_bytes_while_training(deployment, SIDES["both"]) < 60
    check_unharmed(deployment, calm(GRADIENT))


@pytest.mark.slow
def test_a_server_that_says_nothing_is_given_up_and_tried_again(fresh: Make, calm: Make, limited: Limit) -> None:
    deployment = fresh(PERMUTED)
    limited(deployment, SHORT_SILENCE, DEVICE_SHORT_SILENCE)
    keys = deployment.package / "keys"
    certificate = keys / "server.pem", keys / "server.key"
    said = lambda: log_of(deployment, DEVICES[0]).count("did not answer in time")  # noqa: E731
    weather = Weather(swallowed={TO_SERVER})
    with (
        deployment.server(*options(PERMUTED)) as server,
        Mute(certificate) as mute,
        TcpProxy(deployment.port, weather) as proxy,
    ):
        devices = start_devices(behind(deployment, proxy.port), PERMUTED)
        wait_until(lambda: said() >= 1, "TCP that says nothing to be given up")
        proxy.upstream, weather.swallowed = mute.port, set()
        wait_until(lambda: mute.connections >= 2 and said() >= 2, "TLS that says nothing to be given up")
        proxy.upstream = deployment.port
        finish(deployment, devices, server)
    check_unharmed(deployment, calm(PERMUTED))
