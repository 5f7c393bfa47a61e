"""Updates: what is good becomes current, what is bad is rolled back by itself and never tried again."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from contract.console import run_command
from contract.errors import DataError, DeviceError, EngineError, PackageError, RollbackError, SignatureError, TrialError
from contract.messages import Reason
from contract.signature import key_id, save_public
from edge_runtime import cli, taking
from edge_runtime.engines import Engine, open_engine
from edge_runtime.install import current_name, install, point, quarantined
from edge_runtime.update import Cost, Trial, Updated, go_back, put, update, waiting
from tests.edge_runtime.fake_package import PUBLISHER, Package, write_images, write_package

GOLDEN = Path(__file__).parents[1] / "golden"
TRUSTED = {key_id(PUBLISHER.public_key()): PUBLISHER.public_key()}


def open_fake(path: Path) -> Engine:
    return open_engine("fake", path, 1)


class Device:
    """A state with version 1 current, and pictures."""

    def __init__(self, root: Path) -> None:
        self.root, self.packages = root, root / "packages"
        self.packages.mkdir()
        self.data = write_images(root / "images", {"a": 4, "b": 4})
        (self.data / "a" / "broken.png").write_bytes(b"no picture")
        self.first = write_package(root / "v1")
        install(self.first.folder, self.packages, TRUSTED, open_fake, print)

    def update(
        self, package: Package, opener: Callable[[Path], Engine] = open_fake, slot: str = "current", **changes: float
    ) -> Updated:
        trial = Trial(**{"images": 6, "slower": 20.0, **changes})  # type: ignore[arg-type]
        now = lambda: None  # noqa: E731
        return update(package.folder, self.packages, TRUSTED, opener, self.data, trial, now, print, slot)

    @property
    def current(self) -> str | None:
        return current_name(self.packages)


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path)


def test_a_good_update_becomes_current_and_the_one_before_stays(device: Device) -> None:
    second = write_package(device.root / "v2", version=2, seed=1)
    done = device.update(second)
    assert (done.version, done.before) == (2, device.first.digest.hex())
    assert done.slower is not None and done.slower > 0 and done.hungrier is None
    assert device.current == second.digest.hex()
    assert (device.packages / device.first.digest.hex() / "front.onnx").exists()  # the other slot
    installed = install(device.packages / "current", device.packages, TRUSTED, open_fake, print)  # as a run does
    assert installed.digest == second.digest
    assert current_name(device.packages, "previous") == device.first.digest.hex()
    assert go_back(device.packages, "it is worse") == (device.first.digest.hex(), second.digest.hex())
    assert device.current == device.first.digest.hex()
    assert install(device.packages / "current", device.packages, TRUSTED, open_fake, print).manifest.version == 1
    with pytest.raises(PackageError, match="it is worse"):
        device.update(second)


def test_a_frontend_that_is_too_slow_is_rolled_back_by_itself(device: Device) -> None:
    slow = write_package(device.root / "v2", version=2, delay_s=0.02)
    with pytest.raises(EngineError, match=r"rolled back: an image takes \d.* times as long"):
        device.update(slow, slower=1.5)
    assert device.current == device.first.digest.hex()
    assert "as long" in quarantined(device.packages)[slow.digest.hex()]
    assert not (device.packages / slow.digest.hex() / "front.onnx").exists()  # it fills no card
    with pytest.raises(PackageError, match="was tried on this device and failed"):
        device.update(slow, slower=1e9)
    install(device.first.folder, device.packages, TRUSTED, open_fake, print)  # its version is none to stay above
    assert device.update(write_package(device.root / "v3", version=3)).version == 3


class Wrong:
    """An engine that computes something else after the golden vectors."""

    def __init__(self, engine: Engine, value: float | None) -> None:
        self._engine, self._value, self._calls = engine, value, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def run(self, images: np.ndarray) -> np.ndarray:
        tokens = self._engine.run(images)
        return np.full_like(tokens, np.nan if self._value is None else self._value) if len(images) == 1 else tokens


@pytest.mark.parametrize(("value", "said"), [(None, "not finite"), (0.5, "the same tokens")])
def test_a_frontend_that_fails_on_the_site_s_pictures_is_rolled_back(
    value: float | None, said: str, device: Device
) -> None:
    bad = write_package(device.root / "v2", version=2)
    with pytest.raises(EngineError, match=f"rolled back: .*{said}"):
        device.update(bad, lambda path: Wrong(open_fake(path), value))  # type: ignore[arg-type,return-value]
    assert device.current == device.first.digest.hex()


def test_an_older_version_and_a_forged_one_are_refused_without_a_trial(device: Device) -> None:
    device.update(write_package(device.root / "v2", version=2))
    present = device.current
    with pytest.raises(RollbackError, match="older than the installed 2"):
        device.update(device.first)
    forged = write_package(device.root / "v3", version=3)
    (forged.folder / "manifest.json").write_bytes((forged.folder / "manifest.json").read_bytes() + b" ")
    with pytest.raises(SignatureError):
        device.update(forged)
    assert device.current == present and quarantined(device.packages) == {}
    assert not (device.packages / "attempt.json").exists()


def test_a_package_that_stops_the_device_is_found_out_by_the_third_call(device: Device) -> None:
    class Stopped(BaseException):
        pass

    def power_cut(path: Path) -> Engine:
        raise Stopped

    deadly = write_package(device.root / "v2", version=2)
    for _ in range(2):
        with pytest.raises(Stopped):
            device.update(deadly, power_cut)
        install(device.packages / "current", device.packages, TRUSTED, open_fake, print)  # a run still starts
    with pytest.raises(PackageError, match="stopped 2 times"):
        device.update(deadly)
    assert device.current == device.first.digest.hex()


def test_trying_the_current_package_again_never_bans_it(device: Device) -> None:
    with pytest.raises(EngineError, match="not finite"):
        device.update(device.first, lambda path: Wrong(open_fake(path), None))  # type: ignore[arg-type,return-value]
    assert quarantined(device.packages) == {}
    install(device.packages / "current", device.packages, TRUSTED, open_fake, print)


def test_ctrl_c_during_a_trial_is_none_that_the_package_caused(device: Device) -> None:
    def interrupted(path: Path) -> Engine:
        raise KeyboardInterrupt

    second = write_package(device.root / "v2", version=2)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            device.update(second, interrupted)
    assert device.update(second).version == 2


def test_a_package_that_could_not_be_tried_bars_nothing_and_is_not_banned(device: Device) -> None:
    second = write_package(device.root / "v2", version=2)
    pictures, device.data = device.data, write_images(device.root / "none", {"a": 0})
    for _ in range(3):
        with pytest.raises(DataError, match="must hold images"):
            device.update(second)
    install(device.packages / "current", device.packages, TRUSTED, open_fake, print)
    device.data = pictures
    assert device.update(second).version == 2


def test_parts_never_take_a_frontend_s_place(device: Device) -> None:
    training = (GOLDEN / "training_1.json").read_bytes()
    parts = write_package(device.root / "v2", version=2, cuts=(), contents={"training.json": training})
    with pytest.raises(PackageError, match="holds parts that devices train, and tiny, which is current, a frontend"):
        device.update(parts)
    assert device.current == device.first.digest.hex() and quarantined(device.packages) == {}


def test_a_package_that_is_ready_waits_and_bars_nothing(device: Device) -> None:
    """It is current only once it is asked for; another that comes first takes its place."""
    second, third = (write_package(device.root / f"v{number}", version=number) for number in (2, 3))
    for package in (second, third):
        device.update(package, slot="ready")
        assert device.current == device.first.digest.hex()
        assert current_name(device.packages, "ready") == package.digest.hex()
        install(device.packages / "current", device.packages, TRUSTED, open_fake, print)  # version 1 still runs
    assert not (device.packages / second.digest.hex()).exists()
    put(device.packages, third.digest.hex(), "current")
    assert (device.current, current_name(device.packages, "ready")) == (third.digest.hex(), None)
    with pytest.raises(RollbackError):
        device.update(second)
    assert go_back(device.packages, "worse") == (device.first.digest.hex(), third.digest.hex())


def test_a_kill_between_the_two_links_of_a_switch_lets_nobody_ban_the_package_that_is_current(device: Device) -> None:
    """`previous` points at what is current already, `current` does not point at the new one yet."""
    point(device.packages, "previous", device.first.digest.hex())
    with pytest.raises(PackageError, match="no package to go back to"):
        go_back(device.packages, "worse")
    assert quarantined(device.packages) == {} and device.current == device.first.digest.hex()


def test_a_kill_while_a_waiting_package_is_thrown_away_leaves_nothing_that_waits_or_bars(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def kill(folder: Path, ignore_errors: bool = False) -> None:
        raise Killed

    second, third = (write_package(device.root / f"v{number}", version=number) for number in (2, 3))
    device.update(third, slot="ready")
    by_hand = write_package(device.root / "other", version=1, seed=3, name="other")
    install(by_hand.folder, device.packages, TRUSTED, open_fake, print)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("edge_runtime.update.shutil.rmtree", kill)
        put(device.packages, device.first.digest.hex(), "current")
    assert current_name(device.packages, "ready") == third.digest.hex() and waiting(device.packages) is None
    install(second.folder, device.packages, TRUSTED, open_fake, print)  # below version 3, which was never current


def test_a_full_disk_at_the_switch_is_said_to_be_one(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(packages: Path, link: str, name: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    second = write_package(device.root / "v2", version=2)
    with monkeypatch.context() as patch, pytest.raises(DeviceError, match="cannot be changed: No space left"):
        patch.setattr("edge_runtime.update.point", full)
        device.update(second)
    assert device.update(second).version == 2


def test_a_passing_slowness_bans_nothing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([5.0, 1.0, 1.2, 1.0])  # seconds of new, old, new, old
    monkeypatch.setattr("edge_runtime.update.measure", lambda *words: Cost(next(told), None))
    assert device.update(write_package(device.root / "v2", version=2), slower=1.5).slower == 1.2


def test_energy_counts_where_a_meter_tells(device: Device) -> None:
    told = iter([0.0, 10.0, 10.0, 12.0])  # 10 J for the new one, 2 J for the old one
    with pytest.raises(EngineError, match="5.00 times the energy"):
        update(
            write_package(device.root / "v2", version=2).folder, device.packages, TRUSTED, open_fake, device.data,
            Trial(4, 100.0, 1.5), lambda: next(told), print,
        )  # fmt: skip


def test_the_command(device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state, trust = tmp_path / "state", tmp_path / "publisher.pub"
    save_public(trust, PUBLISHER.public_key())
    words = ["--state", str(state), "--trust", str(trust), "--data", str(device.data), "--slower", "100"]
    first, second = (
        device.root / "v1" / "front.fake",
        write_package(device.root / "v2", version=2).folder / "front.fake",
    )

    def call(*more: str) -> int:
        return run_command(lambda: cli.edge_run_or_command(["update", *more]))

    for slip in (["--slower", "nan"], ["--slower", "-1"], ["--hungrier", "nan"], ["--images", "0"]):
        assert call(*words, *slip, str(first)) == 2  # NaN would let every package pass, -1 bans a good one
    assert call("--back", "--state", str(tmp_path / "nowhere")) == 2 and not (tmp_path / "nowhere").exists()
    assert call(*words, str(first)) == 0
    assert call(*words, str(second)) == 0
    assert "version 2" in capsys.readouterr().err
    assert call(*words, str(first)) == 4
    assert call("--state", str(state), "--back") == 0
    assert "not tried again on this device" in capsys.readouterr().err
    assert call("--state", str(state), "--back") == 4
    assert call("--state", str(state)) == 2
    assert len(json.loads((state / "packages" / "quarantine.json").read_text())) == 1


def test_the_server_is_not_told_that_a_package_needs_too_much_energy() -> None:
    assert "hungrier" not in get_args(Reason)
    hungry = TrialError("an image takes 1.70 times the energy", "export a cheaper split", "hungrier")
    assert taking._verdict("ab" * 32, hungry, stopped=False).reason == "slower"
