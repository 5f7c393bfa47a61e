"""A device enrols, rotates its key and is revoked, over TLS against a real socket server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from contract import signature
from contract.errors import AuthError, UnreachableError, UsageError
from contract.messages import Heartbeat
from edge_runtime.enrolment import Desk, enrol, rotate
from server_runtime import enrolment
from tests.over_loopback.test_server_connections import Bench, on_server
from tests.server_runtime.scripted_device import Refused


def test_a_device_enrols_joins_rotates_and_is_revoked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The roster changes under a server that runs; whoever is revoked is dismissed within a tick."""
    token = enrolment.issue_claim(tmp_path / "roster", "clinic", "new", 1e11)
    key = tmp_path / "identity" / "device.key"

    async def story(bench: Bench) -> None:
        desk = Desk(bench.url, bench.certificate, "new")
        answer = await asyncio.to_thread(enrol, desk, key, signature.read_claim(token))
        assert answer.site == "clinic"
        bench.keys["new"] = first = signature.load_private(key)
        async with bench.device(bench.hello("new")) as device:
            assert device.welcome.site == "clinic"
            await asyncio.to_thread(rotate, desk, key)
            with pytest.raises(Refused, match="wrong-key"):  # the session of the old key ends
                await device.receive()
        with pytest.raises(Refused, match="wrong-key"):
            await bench.device(bench.hello("new"), key=first).__aenter__()
        bench.keys["new"] = signature.load_private(key)
        async with bench.device(bench.hello("new")) as device:
            enrolment.revoke(tmp_path / "roster", "new")
            with pytest.raises(Refused, match="revoked"):
                await device.receive()
        with pytest.raises(AuthError, match="revoked"):
            await asyncio.to_thread(rotate, desk, key)
        assert key.with_name("device.key.new").exists()  # the next attempt offers the same key

    on_server(story, tmp_path, monkeypatch)
    assert signature.key_id(signature.load_private(key).public_key())
    assert key.stat().st_mode & 0o777 == 0o600


def test_a_stop_between_the_servers_yes_and_ours_is_mended_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(bench: Bench) -> None:
        desk, key = Desk(bench.url, bench.certificate, "pi"), tmp_path / "device.key"
        signature.save_private(key, bench.keys["pi"])
        new = signature.generate()
        signature.save_private(key.with_name("device.key.new"), new)
        enrolment.enrol(tmp_path / "roster", bench.server._job.roster.devices["pi"], new.public_key())
        answer = await asyncio.to_thread(rotate, desk, key)
        assert answer.key_id == signature.key_id(new.public_key())
        assert signature.key_id(signature.load_private(key).public_key()) == answer.key_id

    on_server(story, tmp_path, monkeypatch)


def test_an_existing_key_is_never_replaced_and_no_server_is_said(tmp_path: Path) -> None:
    key = tmp_path / "device.key"
    desk = Desk("ws://127.0.0.1:9", None, "pi")
    with pytest.raises(UnreachableError, match="cannot be reached"):
        enrol(desk, key, signature.generate())
    assert not key.exists()
    signature.save_private(key, signature.generate())
    with pytest.raises(UsageError, match="exists already"):
        enrol(desk, key, signature.generate())


def test_a_key_that_is_half_copied_disturbs_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(bench: Bench) -> None:
        async with bench.device() as device:
            path = tmp_path / "roster" / "clinic" / "jetson.pub"
            whole = path.read_bytes()
            path.unlink()
            path.write_bytes(whole[:20])
            while not any("cannot be used" in said for said in bench.said):
                await asyncio.sleep(0.01)
            path.unlink()
            path.write_bytes(whole)
            async with bench.device(bench.hello("jetson")):
                await device.send(Heartbeat(1, False, "", 0.0))

    on_server(story, tmp_path, monkeypatch)
