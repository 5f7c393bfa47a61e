"""The meter of smart plugs against python-kasa and simulated plugs: real processes and sockets on loopback."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from contract.errors import ConfigError
from edge_runtime.meters.kasa import KasaSensor, Plug, open_kasa, read_plug
from tests.over_loopback.deployment import wait_until

kasa = pytest.importorskip("kasa", reason="python-kasa is not installed")
MODULES = Path(sys.prefix) / "node_modules"  # where tools/setup puts the simulator
pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (MODULES / "tplink-smarthome-simulator").is_dir(),
    reason="the simulator of plugs needs node and tplink-smarthome-simulator",
)


@dataclass
class Simulated:
    """A running plug."""

    process: subprocess.Popen[str]
    port: int

    def show(self, *watts: float) -> None:
        """Set the power of each outlet."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(" ".join(map(str, watts)) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "set\n"

    def plug(self, outlet: int | None = None) -> Plug:
        return Plug("127.0.0.1", self.port, outlet)


@contextmanager
def simulated(model: str, delay_ms: int = 0) -> Iterator[Simulated]:
    words = ["node", str(Path(__file__).with_name("plugs.js")), model, str(delay_ms)]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "NODE_PATH": str(MODULES)}
    )
    try:
        assert process.stdout is not None
        yield Simulated(process, int(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("model", ["hs110", "hs110v2"])
def test_both_generations_of_a_plug_show_watts(model: str) -> None:
    with simulated(model) as plug:
        sensor = KasaSensor(kasa, plug.plug())
        for watts in (61.753, 2.5, 0.0):
            plug.show(watts)
            assert sensor.read_w() == pytest.approx(watts, abs=0.001)
        assert sensor.scope == "mains at the plug 127.0.0.1"


def test_a_strip_is_read_by_outlet() -> None:
    with simulated("hs300") as plug:
        plug.show(1, 2, 3, 4, 5, 6)
        assert KasaSensor(kasa, plug.plug(outlet=3)).read_w() == pytest.approx(3.0)
        with pytest.raises(OSError, match="has 6 outlets, asked for 7"):
            KasaSensor(kasa, plug.plug(outlet=7)).read_w()


def test_a_slow_plug_keeps_no_stage_waiting() -> None:
    with simulated("hs110v2", delay_ms=300) as plug:
        plug.show(40)
        meter, reasons = open_kasa(plug.plug())
        assert meter is not None, reasons
        meter.read(0.0)
        asked_s = time.monotonic()
        for _ in range(1000):
            meter.read(0.0)
        assert time.monotonic() - asked_s < 0.3  # one answer of the plug takes as long
        wait_until(lambda: (meter.read(0.0).energy_j or 0.0) > 40.0, "a second of 40 W")


def test_a_plug_that_vanishes_is_unknown_and_comes_back() -> None:
    with simulated("hs110") as plug:
        plug.show(10)
        sensor = KasaSensor(kasa, plug.plug())
        assert sensor.read_w() == pytest.approx(10)
    with pytest.raises(OSError, match=r"the plug 127\.0\.0\.1"):
        sensor.read_w()
    with simulated("hs110") as again:
        again.show(20)
        sensor._plug = again.plug()  # at another port
        assert sensor.read_w() == pytest.approx(20)


def test_a_plug_without_a_meter_is_said() -> None:
    with simulated("hs100") as plug:
        meter, reasons = open_kasa(plug.plug())
        assert meter is None and "has no energy meter" in reasons[0]


def test_nothing_at_the_address_is_a_reason() -> None:
    with simulated("hs110") as plug:
        gone = plug.plug()
    meter, reasons = open_kasa(gone)
    assert meter is None and "127.0.0.1" in reasons[0]


def test_addresses_and_accounts(tmp_path: Path) -> None:
    account = tmp_path / "account"
    account.write_text("me@site.example\nsecret\n")
    assert read_plug("10.0.0.7:9999/2", account) == Plug("10.0.0.7", 9999, 2, ("me@site.example", "secret"))
    assert read_plug("plug.local", None) == Plug("plug.local")
    account.write_text("me@site.example\n")
    with pytest.raises(ConfigError, match="two lines"):
        read_plug("plug.local", account)
    with pytest.raises(ConfigError, match="HOST"):
        read_plug("http://plug", None)
