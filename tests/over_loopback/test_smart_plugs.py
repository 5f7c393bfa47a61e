"""The meter of smart plugs against python-kasa, simulated plugs and a made-up one: real sockets on loopback."""

from __future__ import annotations

import base64
import itertools
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from contract.errors import ConfigError
from edge_runtime.meters import kasa as plugs
from edge_runtime.meters._sampled import SampledMeter
from edge_runtime.meters.kasa import SAMPLING, AccountRefusedError, KasaSensor, Plug, open_kasa, read_plug
from edge_runtime.stages import Stages

kasa = pytest.importorskip("kasa", reason="python-kasa is not installed")
from tests.over_loopback.klap_plug import KlapPlug, klap_plug  # noqa: E402 - it needs what python-kasa brings along

MODULES = Path(sys.prefix) / "node_modules"  # where tools/setup puts the simulator
needs_simulator = pytest.mark.skipif(
    shutil.which("node") is None or not (MODULES / "tplink-smarthome-simulator").is_dir(),
    reason="the simulator of plugs needs node and tplink-smarthome-simulator",
)
LOGIN = ("me@site.example", "secret")


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
def simulated(model: str, delay_ms: int = 0, port: int = 0) -> Iterator[Simulated]:
    words = ["node", str(Path(__file__).with_name("plugs.js")), model, str(delay_ms), str(port)]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "NODE_PATH": str(MODULES)}
    )
    try:
        assert process.stdout is not None
        yield Simulated(process, int(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()


def ticking() -> Callable[[], float]:
    """A clock that goes on by half a second each time it is read."""
    moments = itertools.count(0.0, 0.5)
    return lambda: next(moments)


@contextmanager
def sampled(plug: Plug, clock: Callable[[], float] | None = None) -> Iterator[SampledMeter]:
    """A meter that samples when the test says so; each sample takes a second of a clock that ticks."""
    with closing(KasaSensor(kasa, plug)) as sensor:
        yield SampledMeter(sensor, SAMPLING, clock=clock or ticking(), start=lambda _: None)


@needs_simulator
@pytest.mark.parametrize("model", ["hs110", "hs110v2"])
def test_both_generations_of_a_plug_show_watts(model: str) -> None:
    with simulated(model) as plug, closing(KasaSensor(kasa, plug.plug())) as sensor:
        for watts in (61.753, 2.5, 0.0):
            plug.show(watts)
            assert sensor.read_w() == pytest.approx(watts, abs=0.001)
        assert sensor.scope == "mains at the plug 127.0.0.1"


@needs_simulator
def test_a_strip_is_read_by_outlet() -> None:
    with simulated("hs300") as plug:
        plug.show(1, 2, 3, 4, 5, 6)
        for outlet in (3, 6):
            with closing(KasaSensor(kasa, plug.plug(outlet))) as sensor:
                assert sensor.read_w() == pytest.approx(outlet)
                assert sensor.scope == f"mains at the plug 127.0.0.1, outlet {outlet}"
        names = ", ".join(rf"{number} \(.+\)" for number in range(1, 7))
        for outlet, asked in ((7, "7"), (0, "none of them"), (None, "none of them")):
            with pytest.raises(ConfigError, match=f"the outlets {names}; asked for {asked}$"):
                open_kasa(plug.plug(outlet))
    with simulated("hs110") as plug, pytest.raises(ConfigError, match="is no strip"):
        open_kasa(plug.plug(outlet=1))


@needs_simulator
def test_a_slow_plug_is_read_all_the_same() -> None:
    with simulated("hs110v2", delay_ms=300) as plug, sampled(plug.plug()) as meter:
        plug.show(40)
        assert meter.read(0.0).energy_j == 0.0
        for _ in range(3):  # a second apart by the meter's clock
            meter.sample()
        assert meter.read(0.0).energy_j == pytest.approx(120.0)


@needs_simulator
def test_a_plug_that_vanishes_is_unknown_and_comes_back() -> None:
    with simulated("hs110") as first:
        first.show(10)
        with sampled(first.plug()) as meter:
            assert meter.read(0.0).energy_j == 0.0
            first.process.kill()
            first.process.wait()
            for _ in range(6):
                meter.sample()
            lost = meter.read(0.0)
            assert lost.energy_j is None and "the plug 127.0.0.1" in (lost.reason or "")
            with simulated("hs110", port=first.port) as again:
                again.show(20)
                for _ in range(100):
                    meter.sample()
                found = meter.read(0.0)
                assert found.energy_j == pytest.approx(99 * 20.0)  # nothing of the seconds in between
                assert "partial: kasa measured for 93" in (found.reason or "")


@needs_simulator
def test_a_plug_without_a_meter_is_said() -> None:
    before = connections()
    with simulated("hs100") as plug:
        meter, reasons = open_kasa(plug.plug())
        assert meter is None and "has no energy meter" in reasons[0]
    assert connections() == before


@needs_simulator
def test_an_older_plug_is_shown_no_account(tmp_path: Path) -> None:
    account = account_file(tmp_path)
    with simulated("hs110") as plug:
        meter, reasons = open_kasa(read_plug(f"127.0.0.1:{plug.port}", account))
    assert meter is not None and not reasons
    assert list(tmp_path.iterdir()) == [account]


def connections() -> list[threading.Thread]:
    """What sensors left running."""
    return [each for each in threading.enumerate() if each.name == "meter kasa connection"]


def account_file(folder: Path, name: str = LOGIN[0], password: str = LOGIN[1]) -> Path:
    file = folder / "account"
    file.write_text(f"{name}\n{password}\n")
    return file


def named(plug: KlapPlug, account: Path | None) -> Plug:
    return read_plug(f"127.0.0.1:{plug.port}", account)


@pytest.mark.parametrize("generation", ["smart", "iot"])
def test_the_account_opens_a_newer_plug_and_its_hash_does_alone(generation: str, tmp_path: Path) -> None:
    file = account_file(tmp_path)
    with klap_plug(generation, *LOGIN) as plug:
        assert open_kasa(named(plug, file))[1] == []
        kept = file.with_name("account.hash")
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
        password = LOGIN[1].encode()
        assert password not in kept.read_bytes() and base64.b64encode(password) not in kept.read_bytes()
        file.unlink()
        before = kept.read_bytes()
        with sampled(named(plug, file)) as meter:
            plug.watts = 12.5
            meter.read(0.0)
            meter.sample()
            plug.watts = 14.5
            meter.sample()
            assert meter.read(0.0).energy_j == pytest.approx(12.5 + 13.5)
        assert kept.read_bytes() == before


def test_one_account_opens_plugs_of_two_generations(tmp_path: Path) -> None:
    file = account_file(tmp_path)
    with klap_plug("smart", *LOGIN) as tapo, klap_plug("iot", *LOGIN) as renewed:
        for plug in (tapo, renewed):
            assert open_kasa(named(plug, file))[0] is not None
        file.unlink()
        for plug in (tapo, renewed):
            meter, reasons = open_kasa(named(plug, file))
            assert meter is not None and not reasons


@pytest.mark.parametrize("generation", ["smart", "iot"])
@pytest.mark.parametrize("login", [(LOGIN[0], "Secret"), ("Me@site.example", LOGIN[1])])
def test_a_wrong_account_is_an_error_with_its_cure(generation: str, login: tuple[str, str], tmp_path: Path) -> None:
    file, before = account_file(tmp_path, *login), connections()
    with klap_plug(generation, *LOGIN) as plug, pytest.raises(ConfigError) as caught:
        open_kasa(named(plug, file))
    assert str(file) in caught.value.cause and "password" in caught.value.cure and caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == [file]  # what was refused is not kept
    assert connections() == before


def test_a_new_account_comes_before_the_hash_of_an_old_one(tmp_path: Path) -> None:
    file = account_file(tmp_path)
    with klap_plug("smart", *LOGIN) as plug:
        open_kasa(named(plug, file))
        plug.password = "changed"
        file.unlink()
        meter, reasons = open_kasa(named(plug, file))
        assert meter is None and "refuses the account" in reasons[0] and str(file) in reasons[0]
        account_file(tmp_path, password="changed")
        for _ in range(2):
            assert open_kasa(named(plug, file))[1] == []
            file.unlink(missing_ok=True)  # the second time by its hash


def test_a_hash_that_cannot_be_kept_is_said(tmp_path: Path) -> None:
    file = account_file(tmp_path)
    file.with_name("account.hash").mkdir()
    with klap_plug("smart", *LOGIN) as plug:
        meter, reasons = open_kasa(named(plug, file))
    assert meter is not None and "its password stays needed" in reasons[0]


def test_a_password_that_changes_during_a_run_is_unknown_energy(tmp_path: Path) -> None:
    """Sessions end, the plug is asked again only now and then, and the old password brings it back."""
    clock_s = [0.0]
    with klap_plug("smart", *LOGIN) as plug:
        wanted = named(plug, account_file(tmp_path))
        with closing(KasaSensor(kasa, wanted, clock=lambda: clock_s[0])) as sensor:
            plug.watts = 30.0
            assert sensor.read_w() == 30.0
            plug.password = "changed"
            with pytest.raises(AccountRefusedError, match="refuses the account; write its owner's name and password"):
                sensor.read_w()
            asked = plug.handshakes
            clock_s[0] = plugs.REFUSED_WAIT_S - 1.0
            with pytest.raises(AccountRefusedError):
                sensor.read_w()
            assert plug.handshakes == asked
            plug.password = LOGIN[1]
            clock_s[0] = plugs.REFUSED_WAIT_S
            assert sensor.read_w() == 30.0


def test_a_run_goes_on_without_energy_when_the_password_changes(tmp_path: Path) -> None:
    clock = ticking()
    with klap_plug("smart", *LOGIN) as plug, sampled(named(plug, account_file(tmp_path)), clock) as meter:
        plug.watts = 30.0
        stages = Stages(meter, clock)
        for name in ("seen", "unseen"):
            with stages.measure(name):
                for _ in range(60):
                    meter.sample()
            plug.password = "changed"
        seen, unseen = stages.costs().values()
        assert seen.mean_w == pytest.approx(30.0) and unseen.seconds > 60.0
        assert unseen.energy_j is None and "refuses the account" in (unseen.reason or "")


def test_no_stage_waits_for_a_plug_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with klap_plug("smart", *LOGIN) as plug, sampled(named(plug, account_file(tmp_path))) as meter:
        meter.read(0.0)
        plug.hang()
        sampling = threading.Thread(target=meter.sample)
        sampling.start()
        assert plug.asked.wait(30.0)
        for _ in range(100):
            meter.read(0.0)
        assert sampling.is_alive()
        plug.answers.set()
        sampling.join()
        monkeypatch.setattr(plugs, "TIMEOUT_S", 0.1)
        monkeypatch.setattr(plugs, "CONNECT_TIMEOUT_S", 0.1)
        plug.hang()
        for _ in range(3):
            meter.sample()
        reading = meter.read(0.0)
        assert reading.energy_j is None and "no answer within 0.1 s" in (reading.reason or "")
        monkeypatch.undo()
        plug.answers.set()
        plug.watts = 3.0
        for _ in range(100):
            meter.sample()
        reading = meter.read(0.0)
        assert reading.energy_j is not None and reading.energy_j >= 99 * 3.0 - 0.001


def test_a_plug_that_shows_no_power_is_unknown(tmp_path: Path) -> None:
    with klap_plug("smart", *LOGIN) as plug:
        plug.watts = None
        meter, reasons = open_kasa(named(plug, account_file(tmp_path)))
        assert meter is None and "it shows None as its power" in reasons[0]


def test_a_newer_plug_without_an_account_is_told_what_to_give() -> None:
    with klap_plug("smart", *LOGIN) as plug:
        meter, reasons = open_kasa(named(plug, None))
    assert meter is None and "--plug-account" in reasons[0]


def test_nothing_at_the_address_is_a_reason(tmp_path: Path) -> None:
    with klap_plug("smart", *LOGIN) as plug:
        gone, with_account = named(plug, None), named(plug, account_file(tmp_path))
    before = connections()
    for each in (gone, with_account):
        meter, reasons = open_kasa(each)
        assert meter is None and "127.0.0.1" in reasons[0]
    assert connections() == before


def test_a_closed_sensor_is_an_error_and_closing_ends_what_is_asked(tmp_path: Path) -> None:
    with klap_plug("smart", *LOGIN) as plug:
        sensor = KasaSensor(kasa, named(plug, account_file(tmp_path)))
        sensor.read_w()
        plug.hang()
        said: list[str] = []

        def read() -> None:
            try:
                sensor.read_w()
            except OSError as error:
                said.append(str(error))

        asking = threading.Thread(target=read)
        asking.start()
        assert plug.asked.wait(30.0)
        sensor.close()
        asking.join()
        read()
        assert len(said) == 2 and "its meter is closed" in said[1]
        sensor.close()


def doctor(*options: object) -> subprocess.CompletedProcess[str]:
    code = "import sys; from edge_runtime.doctor import main; sys.exit(main())"
    words = [sys.executable, "-W", "always::ResourceWarning", "-c", code, *map(str, options)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def test_the_command_says_what_the_plug_shows_and_leaves_without_a_word_on_stderr(tmp_path: Path) -> None:
    file = account_file(tmp_path)
    with klap_plug("smart", *LOGIN) as plug:
        plug.watts = 7.25
        options = ("--root", tmp_path, "--plug", f"127.0.0.1:{plug.port}", "--plug-account", file)
        shown = doctor(*options)
        assert (shown.returncode, shown.stderr) == (0, "") and "meter     kasa" in shown.stdout
        assert "power     7.25 W now" in shown.stdout
        account_file(tmp_path, password="wrong")
        refused = doctor(*options)
        assert refused.returncode == 2 and "refuses the account" in refused.stderr and "cure: " in refused.stderr
        assert "Traceback" not in refused.stderr and len(refused.stderr.splitlines()) == 2
        file.unlink()
        assert "meter     kasa" in doctor(*options).stdout  # by the hash


def test_python_kasa_is_loaded_only_where_a_plug_is_named(tmp_path: Path) -> None:
    code = (
        "import sys, edge_runtime.cli, edge_runtime.equip\n"
        "from pathlib import Path\n"
        "from edge_runtime.meters import open_plug, probe\n"
        "probe(Path(sys.argv[1]), open_plug(None, None))\n"
        "print(sorted({'kasa', 'aiohttp'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("[]\n", "")
