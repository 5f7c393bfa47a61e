"""An update of the fleet over TLS: canaries first, what is bad stays with them, and a bad line loses nothing."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors.numpy import save
from websockets.exceptions import ConnectionClosed

from contract.console import run_command
from contract.errors import DeviceError, PackageError, RefusedError
from contract.messages import Bye, Fetch, Offer, Piece
from contract.signature import generate, key_id
from contract.tokens import SentRule
from edge_runtime import fetching, taking, visit
from edge_runtime.config import DeviceConfig
from edge_runtime.install import current_name, install, quarantined
from edge_runtime.taking import Taken, take, takes_packages
from edge_runtime.update import Trial
from server_runtime import cli, offers
from server_runtime import fleet as fleets
from server_runtime.connection import Connection
from server_runtime.status import in_words
from tests.edge_runtime.fake_package import PUBLISHER, Package, fake_model, write_device, write_images, write_package
from tests.edge_runtime.test_update import TRUSTED, open_fake
from tests.over_loopback.test_server_connections import Bench, on_server
from tests.server_runtime.scripted_device import Refused

NAMES = ("nano-1", "nano-2", "nano-3")


@dataclass
class Fleet:
    """Three devices with version 1 current, and the server that they know."""

    root: Path
    bench: Bench | None = None

    def __post_init__(self) -> None:
        self.first = write_package(self.root / "v1")
        self.data = write_images(self.root / "images", {"a": 3, "b": 3})
        for name in NAMES:
            self.config(name)
            packages = self.state(name) / "packages"
            packages.mkdir(parents=True)
            install(self.first.folder, packages, TRUSTED, open_fake, print)
            site = self.root / "roster" / "clinic"
            site.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.root / name / "device.pub", site / f"{name}.pub")

    def state(self, name: str) -> Path:
        return self.root / name / "state"

    def config(self, name: str) -> DeviceConfig:
        engine = str(self.state(name) / "packages" / "current" / "front.fake")
        url, ca = ("wss://127.0.0.1:1", None) if self.bench is None else (self.bench.url, self.bench.certificate)
        return write_device(self.root / name, self.first, self.data, url, name=name, ca=ca, engine=engine)

    async def take(self, name: str) -> Taken:
        self.said: list[str] = []
        return await take(self.config(name), self.said.append)

    def link(self, name: str, link: str = "current") -> str | None:
        return current_name(self.state(name) / "packages", link)

    async def offer(self, package: Package, *more: str, code: int = 0) -> None:
        """What the operator types; a running server has taken it up when this returns."""
        assert self.bench is not None
        fleet = self.bench.server._fleet
        words = ["update", "--roster", str(self.root / "roster"), *more]
        words += [] if "--stop" in more else ["--package", str(package.folder)]
        words += [] if {"--devices", "--stop"} & set(more) else ["--devices", ",".join(NAMES)]
        assert run_command(lambda: cli.main(words)) == code
        while code == 0 and fleet._version != offers.Box(self.root / "roster").version():
            await asyncio.sleep(0.02)

    @property
    def told(self) -> dict[str, str | None]:
        assert self.bench is not None
        return {each.device: each.update for each in self.bench.server._standing().devices if each.device in NAMES}


def run(story: Callable[[Fleet], Awaitable[None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    fleet = Fleet(tmp_path)
    monkeypatch.setitem(on_server.__globals__, "LIMIT_S", 120.0)  # many steps, and this machine may be busy
    monkeypatch.setattr(taking, "Trial", partial(Trial, images=4, slower=10.0))

    async def on_bench(bench: Bench) -> None:
        fleet.bench = bench
        bench.server._limits = replace(bench.server._limits, tick_s=0.05)
        await story(fleet)

    on_server(on_bench, tmp_path, monkeypatch)
    return fleet


def test_a_good_update_reaches_all_and_is_current_once_a_run_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(fleet: Fleet) -> None:
        second = write_package(fleet.root / "v2", version=2, seed=1)
        assert await fleet.take("nano-1") == Taken.NOTHING
        await fleet.offer(second)
        assert await fleet.take("nano-2") == Taken.READY  # whoever comes first is the canary
        assert fleet.link("nano-2") == fleet.first.digest.hex() and fleet.link("nano-2", "ready") == second.digest.hex()
        assert fleet.told == {"nano-1": "waits", "nano-2": "ok", "nano-3": "waits"}
        for name in ("nano-1", "nano-3"):
            assert await fleet.take(name) == Taken.READY
        assert set(fleet.told.values()) == {"ok"}
        assert fleet.bench is not None
        document = fleet.bench.server._standing().document()
        assert document["update"]["phase"] == "complete"
        assert "update    tiny version 2" in in_words({**document, "state": "running"})
        assert await fleet.take("nano-1") == Taken.NOTHING
        assert not list((fleet.state("nano-1") / "fetched").iterdir())
        # The server is started again with a backend that was made for it.
        job = fleet.bench.server._job
        fleet.bench.server._job = replace(job, terms=replace(job.terms, package_digest=second.digest.hex()))
        assert await fleet.take("nano-1") == Taken.SWITCHED
        assert (fleet.link("nano-1"), fleet.link("nano-1", "ready")) == (second.digest.hex(), None)
        assert fleet.link("nano-1", "previous") == fleet.first.digest.hex()

    run(story, tmp_path, monkeypatch)


def test_what_comes_by_itself_never_protects_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(fleet: Fleet) -> None:
        rules = fleet.first.manifest.transforms
        cut = replace(fleet.first.manifest.cuts[0], index=2, sent=SentRule("checkerboard"))
        weaker = [
            write_package(fleet.root / "v2", version=2, transforms=replace(rules, kappa=0.5)),
            write_package(fleet.root / "v3", version=3, transforms=replace(rules, weight_noise=False)),
        ]
        for package in weaker:
            await fleet.offer(package)
            assert await fleet.take("nano-1") == Taken.NOTHING
            assert fleet.told["nano-1"] == "refused: weaker"
        assert any("feature noise 0.5 in place of 1" in line or "weight noise 0" in line for line in fleet.said)
        config = replace(fleet.config("nano-1"), kappa_floor=1.0, alpha=0.1)  # it has floors of its own
        await fleet.offer(weaker[1])
        assert await take(config, print) == Taken.READY
        await fleet.offer(write_package(fleet.root / "v4", version=4, cuts=(cut,)))  # deeper: it may come
        assert await fleet.take("nano-2") == Taken.READY

    run(story, tmp_path, monkeypatch)


def test_attack_a_server_chooses_another_package_of_the_same_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signed and newer, and never meant for this device."""

    async def story(fleet: Fleet) -> None:
        assert fleet.bench is not None
        demo = write_package(fleet.root / "demo", name="demo", version=9)
        await fleet.offer(demo)
        assert await fleet.take("nano-1") == Taken.NOTHING
        assert fleet.told["nano-1"] == "refused: name"
        assert any("not known to be meant for this device: tiny is current" in line for line in fleet.said)
        assert fleet.link("nano-1", "ready") is None
        assert not list((fleet.state("nano-1") / "fetched").rglob("front.onnx*"))  # nothing of it but the manifest
        await fleet.offer(demo)
        listed = replace(fleet.config("nano-1"), update_names=("demo",))
        assert await take(listed, print) == Taken.READY
        job = fleet.bench.server._job
        fleet.bench.server._job = replace(job, terms=replace(job.terms, package_digest=demo.digest.hex()))
        assert await fleet.take("nano-1") == Taken.NOTHING  # the list is gone from its settings
        assert "does not become current" in fleet.said[-1] and fleet.link("nano-1") == fleet.first.digest.hex()
        assert await take(listed, print) == Taken.SWITCHED
        await fleet.offer(write_package(fleet.root / "v2", version=2))
        assert await take(listed, print) == Taken.NOTHING  # the name before counts no more: it is not listed
        assert fleet.told["nano-1"] == "refused: name" and fleet.link("nano-1") == demo.digest.hex()

    run(story, tmp_path, monkeypatch)


def test_attack_a_current_package_that_cannot_be_read_lets_nothing_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(fleet: Fleet) -> None:
        (fleet.state("nano-1") / "packages" / "current" / "manifest.json").write_bytes(b"{")
        bare = replace(fleet.first.manifest.transforms, kappa=0.0, weight_noise=False)  # nobody could see that it falls
        await fleet.offer(write_package(fleet.root / "v2", name="demo", version=2, transforms=bare))
        said: list[str] = []
        assert await take(replace(fleet.config("nano-1"), update_names=("demo",)), said.append) == Taken.NOTHING
        assert fleet.told["nano-1"] == "refused: name"
        assert any("the current one cannot be read" in line for line in said)

    run(story, tmp_path, monkeypatch)


def test_a_package_that_waits_is_judged_again_before_a_server_makes_it_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a server could undo what an operator installed since: the version, and the noise."""

    async def story(fleet: Fleet) -> None:
        assert fleet.bench is not None
        weaker = replace(fleet.first.manifest.transforms, kappa=0.5)
        second = write_package(fleet.root / "v2", version=2, transforms=weaker)
        await fleet.offer(second)
        floors = replace(fleet.config("nano-1"), kappa_floor=1.0, alpha=0.1)
        assert await take(floors, print) == Taken.READY
        job = fleet.bench.server._job
        fleet.bench.server._job = replace(job, terms=replace(job.terms, package_digest=second.digest.hex()))
        assert await fleet.take("nano-1") == Taken.NOTHING  # the floors are gone from its settings
        assert "does not become current" in fleet.said[-1] and "feature noise 0.5" in fleet.said[-1]
        third = write_package(fleet.root / "v3", version=3)
        install(third.folder, fleet.state("nano-1") / "packages", TRUSTED, open_fake, print)  # by hand
        said: list[str] = []
        assert await take(floors, said.append) == Taken.NOTHING
        assert "version 2 is older than the installed 3" in said[-1]
        assert fleet.link("nano-1") == third.digest.hex()

    run(story, tmp_path, monkeypatch)


def test_a_server_that_ends_meanwhile_is_no_broken_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(fleet: Fleet) -> None:
        async def leave(server: object, line: Connection) -> None:
            line.say(Bye("done", False))

        monkeypatch.setattr("server_runtime.fleet.Fleet.visit", leave)
        assert await fleet.take("nano-1") == Taken.FAILED
        assert "no package was taken: the server took its leave: done" in fleet.said[-1]

    run(story, tmp_path, monkeypatch)


def test_a_full_disk_makes_room_for_another_canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(fleet: Fleet) -> None:
        await fleet.offer(write_package(fleet.root / "v2", version=2))

        def full(fetched: fetching.Fetched, piece: object, wanted: Fetch) -> None:
            raise DeviceError("the package cannot be kept: No space left on device", "make room on the disk")

        with monkeypatch.context() as patch:
            patch.setattr(fetching.Fetched, "put", full)
            assert await fleet.take("nano-1") == Taken.NOTHING
        assert fleet.told["nano-1"] == "not-tried: device" and not (fleet.state("nano-1") / "fetched").exists()
        assert await fleet.take("nano-2") == Taken.READY  # the canary now

    run(story, tmp_path, monkeypatch)


def broken_golden(seed: int) -> dict[str, bytes]:
    """Files of a frontend that computes something else than its golden vectors say."""
    rng = np.random.default_rng(seed)
    pixels, tokens = rng.integers(0, 256, (4, 16, 16, 3), dtype=np.uint8), rng.normal(size=(4, 5, 8))
    golden = save({"pixels": pixels, "tokens": tokens.astype(np.float32)})
    return {"front.onnx": fake_model()[0], "golden.safetensors": golden}


def test_a_bad_frontend_is_rolled_back_on_the_canary_and_the_rest_never_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(fleet: Fleet) -> None:
        bad = write_package(fleet.root / "v2", version=2, contents=broken_golden(0))
        await fleet.offer(bad)
        assert await fleet.take("nano-1") == Taken.NOTHING
        assert fleet.told == {"nano-1": "rolled-back: parity", "nano-2": "left out", "nano-3": "left out"}
        assert fleet.link("nano-1") == fleet.first.digest.hex() and fleet.link("nano-1", "ready") is None
        assert bad.digest.hex() in quarantined(fleet.state("nano-1") / "packages")
        for name in ("nano-2", "nano-3"):
            assert await fleet.take(name) == Taken.NOTHING
            assert not (fleet.state(name) / "fetched").exists()  # not a byte of it came here
        assert fleet.bench is not None and any("stopped: a canary" in line for line in fleet.bench.said)
        await fleet.offer(bad)  # again: the canary knows it, without fetching it
        assert await fleet.take("nano-1") == Taken.NOTHING
        assert fleet.told["nano-1"] == "refused: quarantined"
        slow = write_package(fleet.root / "v3", version=3, delay_s=0.1)
        await fleet.offer(slow)
        assert await fleet.take("nano-3") == Taken.NOTHING
        assert fleet.told["nano-3"] == "rolled-back: slower" and await fleet.take("nano-2") == Taken.NOTHING
        await fleet.offer(write_package(fleet.root / "v4", version=4))  # a better one is offered to all
        assert [await fleet.take(name) for name in NAMES] == [Taken.READY] * 3

    run(story, tmp_path, monkeypatch)


def test_an_older_version_is_refused_by_the_command_and_by_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(fleet: Fleet) -> None:
        third = write_package(fleet.root / "v3", version=3)
        second = write_package(fleet.root / "v2", version=2)
        packages = fleet.state("nano-1") / "packages"
        install(third.folder, packages, TRUSTED, open_fake, print)
        await fleet.offer(second)  # this server knows of no newer one
        assert await fleet.take("nano-1") == Taken.NOTHING
        assert fleet.told["nano-1"] == "refused: older" and await fleet.take("nano-2") == Taken.NOTHING
        await fleet.offer(third)
        assert await fleet.take("nano-2") == Taken.READY
        await fleet.offer(second, code=4)  # by now it does
        await fleet.offer(third, "--stop")
        assert await fleet.take("nano-3") == Taken.NOTHING
        parts = write_package(
            fleet.root / "v5", version=5, cuts=(),
            contents={"training.json": (Path(__file__).parents[1] / "golden" / "training_1.json").read_bytes()},
        )  # fmt: skip
        await fleet.offer(parts, "--devices", "nano-3")
        assert await fleet.take("nano-3") == Taken.NOTHING
        assert fleet.told["nano-3"] == "refused: kind"

    run(story, tmp_path, monkeypatch)


def test_a_package_of_another_publisher_is_refused_before_its_files_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(fleet: Fleet) -> None:
        stranger = generate()
        monkeypatch.setattr("tests.edge_runtime.fake_package.PUBLISHER", stranger)
        forged = write_package(fleet.root / "v2", version=2)
        assert forged.manifest.signer == key_id(stranger.public_key()) != key_id(PUBLISHER.public_key())
        await fleet.offer(forged)
        asked: list[str] = []
        monkeypatch.setattr(offers.Stock, "piece", _noting(asked))
        assert await fleet.take("nano-1") == Taken.NOTHING
        assert fleet.told["nano-1"] == "refused: signature" and set(asked) == {"manifest.json", "manifest.sig"}

    run(story, tmp_path, monkeypatch)


def _noting(asked: list[str]) -> Callable[[offers.Stock, Fetch], object]:
    piece = offers.Stock.piece

    def noting(stock: offers.Stock, fetch: Fetch) -> object:
        asked.append(fetch.file)
        return piece(stock, fetch)

    return noting


def test_a_fetch_goes_on_where_the_line_broke_and_a_verdict_is_told_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(fleet: Fleet) -> None:
        second = write_package(fleet.root / "v2", version=2, more={"large.bin": os.urandom(50_000)})
        await fleet.offer(second)
        monkeypatch.setattr(offers, "PIECE_BYTES", 4096)
        asked: list[str] = []
        monkeypatch.setattr(offers.Stock, "piece", _noting(asked))
        put = fetching.Fetched.put

        def cut(fetched: fetching.Fetched, piece: object, wanted: Fetch) -> None:
            put(fetched, piece, wanted)  # type: ignore[arg-type]
            if wanted.file == "large.bin" and wanted.offset > 20_000:
                raise OSError("the line is cut")

        monkeypatch.setattr(fetching.Fetched, "put", cut)
        assert await fleet.take("nano-1") == Taken.FAILED
        assert "no package was taken" in fleet.said[-1]
        before = len(asked)
        monkeypatch.setattr(fetching.Fetched, "put", put)

        async def unheard(*words: object) -> int:
            raise OSError("the line is cut again")

        tell = visit._Talk.tell
        monkeypatch.setattr(visit._Talk, "tell", unheard)
        assert await fleet.take("nano-1") == Taken.FAILED
        assert 0 < len(asked) - before < 10 and fleet.link("nano-1", "ready") == second.digest.hex()
        assert fleet.told["nano-1"] == "offered" and await fleet.take("nano-2") == Taken.LATER
        monkeypatch.setattr(visit._Talk, "tell", tell)
        assert await fleet.take("nano-1") == Taken.NOTHING
        assert fleet.told["nano-1"] == "ok" and not (fleet.state("nano-1") / "verdict.json").exists()
        assert await fleet.take("nano-2") == Taken.READY

    run(story, tmp_path, monkeypatch)


def test_a_stop_during_the_trial_is_none_that_the_package_caused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(fleet: Fleet) -> None:
        await fleet.offer(write_package(fleet.root / "v2", version=2))
        for _ in range(3):
            begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            async def endless(begun: asyncio.Future[None] = begun) -> None:
                begun.set_result(None)
                await asyncio.Event().wait()

            with monkeypatch.context() as patch:
                patch.setattr(taking, "in_worker", lambda work: endless())
                taken = asyncio.create_task(fleet.take("nano-1"))
                await begun
                taken.cancel()
                await asyncio.gather(taken, return_exceptions=True)
        assert await fleet.take("nano-1") == Taken.READY

    run(story, tmp_path, monkeypatch)


def test_a_package_that_was_changed_in_place_is_fetched_once_and_its_operator_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(fleet: Fleet) -> None:
        assert fleet.bench is not None
        second = write_package(fleet.root / "v2", version=2, seed=1)
        await fleet.offer(second)
        path = second.folder / second.manifest.files[0].name
        whole = path.read_bytes()
        path.write_bytes(whole + b"changed")
        assert await fleet.take("nano-1") == Taken.FAILED
        assert "has changed since it was offered" in fleet.said[-1], fleet.said
        warning = next(text for text in fleet.bench.said if "nothing is offered" in text)
        assert f"{path.name} has changed since it was offered" in warning and "server-run update again" in warning
        for name in NAMES:
            assert await fleet.take(name) == Taken.NOTHING  # nobody tries again in vain
        await fleet.offer(second, code=4)
        path.write_bytes(whole)
        await fleet.offer(second)
        assert await fleet.take("nano-1") == Taken.READY

    run(story, tmp_path, monkeypatch)


def test_a_package_that_was_only_touched_or_copied_anew_is_still_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told by its bytes, which are read once after each change of a stamp, and not for each piece."""
    read: list[str] = []
    sha256 = offers._sha256

    def noting(path: Path) -> str:
        read.append(path.name)
        return sha256(path)

    async def story(fleet: Fleet) -> None:
        second = write_package(fleet.root / "v2", version=2, seed=1)
        await fleet.offer(second)
        name = second.manifest.files[0].name
        touched, copied = second.folder / name, second.folder / offers.SIGNATURE_NAME
        os.utime(touched, ns=(1, 1))
        data = copied.read_bytes()
        copied.unlink()
        copied.write_bytes(data)
        with monkeypatch.context() as patch:
            patch.setattr(offers, "_sha256", noting)
            patch.setattr(offers, "PIECE_BYTES", 100)
            assert await fleet.take("nano-1") == Taken.READY
        assert sorted(read) == sorted([name, copied.name]) and touched.stat().st_size > 200

    run(story, tmp_path, monkeypatch)


def test_a_package_folder_that_is_not_there_offers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the folder around it either, which may be another package."""

    async def story(fleet: Fleet) -> None:
        second = write_package(fleet.root / "v2", version=2)
        inner = replace(second, folder=second.folder / "v3")
        await fleet.offer(inner, code=4)
        assert offers.Box(fleet.root / "roster").read() is None
        await fleet.offer(replace(second, folder=second.folder / second.manifest.files[0].name))  # a file in it will do
        assert await fleet.take("nano-1") == Taken.READY

    run(story, tmp_path, monkeypatch)


def test_what_the_old_offer_lacks_does_not_withdraw_a_newer_one() -> None:
    """While a device asks for a piece of it, the operator offers the package anew."""

    async def story() -> None:
        fleet = fleets.Fleet(None, meanwhile, said.append)  # type: ignore[arg-type]
        newer: Any = object()

        async def meanwhile_of(call: Callable[..., object], *arguments: object) -> object:
            fleet._stock = newer
            raise PackageError("a file has changed", "offer it again")

        fleet._in_store = meanwhile_of  # type: ignore[method-assign, assignment]
        fleet.rollout, fleet._stock = Mock(), Mock()
        with pytest.raises(RefusedError, match="a file has changed"):
            await fleet.piece("nano-1", Fetch("0" * 64, "front.onnx", 0))
        assert fleet._stock is newer and fleet.rollout is not None and said == []

    async def meanwhile(*words: object) -> object:
        raise AssertionError

    said: list[str] = []
    asyncio.run(story())


def test_a_budget_below_a_piece_takes_no_package_and_says_what_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(fleet: Fleet) -> None:
        await fleet.offer(write_package(fleet.root / "v2", version=2, more={"large.bin": os.urandom(700_000)}))
        said: list[str] = []
        assert await take(replace(fleet.config("nano-1"), max_mb_per_day=0.5), said.append) == Taken.NOTHING
        assert "the 0.5 MB of a day never let a piece of 0.52 MB through (give --max-mb-per-day 0.6" in said[-1], said
        assert fleet.told["nano-1"] == "not-tried: device"
        assert await fleet.take("nano-2") == Taken.READY  # another canary, that may

    run(story, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", ["x" * 300, "nul\0", "gone/front"])
def test_a_place_that_cannot_be_looked_at_is_no_package(tmp_path: Path, name: str) -> None:
    with pytest.raises(PackageError, match="there is no package"):
        offers.package_folder(tmp_path / name)


def test_a_newer_visit_of_a_device_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(fleet: Fleet) -> None:
        assert fleet.bench is not None
        server, visitor = fleet.bench.server, replace(fleet.bench.hello("pi"), purpose="update")
        async with fleet.bench.device(visitor) as older:
            assert isinstance(await older.receive(), Offer)
            async with fleet.bench.device(visitor) as newer, fleet.bench.device(fleet.bench.hello("pi")):
                assert isinstance(await newer.receive(), Offer)
                with pytest.raises(ConnectionClosed, match="replaced by a newer session"):
                    await older.receive()
                assert len(server._visits) == 1 and "pi" in server._devices  # a session of the run stands beside it
        while server._open:
            await asyncio.sleep(0.02)
        assert not server._visits and not server._devices

    run(story, tmp_path, monkeypatch)


def test_a_session_in_a_run_hears_of_an_offer_and_fetches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(fleet: Fleet) -> None:
        assert fleet.bench is not None
        taker = replace(fleet.bench.hello("pi"), features=("updates",))
        async with fleet.bench.device(taker) as pi, fleet.bench.device(fleet.bench.hello("jetson")):
            second = write_package(fleet.root / "v2", version=2)
            await fleet.offer(second, "--devices", "pi,jetson")
            offer = await pi.receive()
            assert isinstance(offer, Offer) and offer.package == second.digest.hex() and offer.version == 2
            standing = {each.device: each.update for each in fleet.bench.server._standing().devices}
            assert (standing["pi"], standing["jetson"]) == ("offered", "waits")  # jetson said that it takes none
            await pi.send(Fetch(second.digest.hex(), "front.onnx", 0))
            with pytest.raises(Refused, match="expected work, found fetch"):
                await pi.receive()
        visitor = replace(taker, purpose="update", package_digest=fleet.first.digest.hex())
        async with fleet.bench.device(visitor) as pi:
            assert isinstance(await pi.receive(), Offer)
            await pi.send(Fetch(second.digest.hex(), "manifest.json", 0))
            assert isinstance(await pi.receive(), Piece)
            (second.folder / "notes.txt").write_text("not a file of the package")
            await pi.send(Fetch(second.digest.hex(), "notes.txt", 0))
            with pytest.raises(Refused, match="no file of the package"):
                await pi.receive()
        other = replace(fleet.bench.hello("jetson"), purpose="update", package_digest=fleet.first.digest.hex())
        async with fleet.bench.device(other) as jetson:  # whose turn it is not
            assert (await jetson.receive()) == Offer(None, 0, 0, True)
            await jetson.send(Fetch(second.digest.hex(), "manifest.json", 0))
            with pytest.raises(Refused, match="none is offered now"):
                await jetson.receive()

    run(story, tmp_path, monkeypatch)


def test_only_a_device_that_runs_what_is_current_takes_packages(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    assert takes_packages(fleet.config("nano-1"))
    fixed = write_device(tmp_path / "nano-1", fleet.first, fleet.data, name="nano-1")
    assert not takes_packages(fixed)
