"""A server that asks for a certificate: who has one comes in, who has none or another CA's is told so in a line."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from contract import signature
from contract.console import run_command
from contract.errors import AuthError, UnreachableError
from contract.messages import Enrolled
from edge_runtime.cli import edge_run, parser
from edge_runtime.enrolment import Desk, enrol, rotate
from tests.edge_runtime.fake_package import Package, write_device, write_images, write_package
from tests.over_loopback.socket_server import SocketServer, certificate_digest
from tests.over_loopback.test_edge_client import ROOT, flags_of, memory_server
from tools import make_keys

Call = Callable[..., tuple[int, str]]


def make(root: Path, device: str) -> Path:
    """Keys of a private CA, of a server and of one device."""
    make_keys.make_publisher(root)
    make_keys.make_ca(root)
    make_keys.make_server(root, ["127.0.0.1"])
    make_keys.make_device(root, "clinic", device)
    make_keys.make_certificate(root, device)
    return root


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("keys"), "pi-1")


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return write_package(tmp_path / "front")


@pytest.fixture
def strict(keys: Path) -> Iterator[SocketServer]:
    server = SocketServer((keys / "server.pem", keys / "server.key"), client_ca=keys / "ca.pem").start()
    yield server
    server.stop()


@pytest.fixture
def call(
    tmp_path: Path, package: Package, keys: Path, strict: SocketServer, capsys: pytest.CaptureFixture[str]
) -> Call:
    images = write_images(tmp_path / "images", {"a": 3, "b": 3})

    def with_files(**files: Path | None) -> tuple[int, str]:
        config = write_device(tmp_path, package, images, strict.url, **{"ca": keys / "ca.pem", **files})
        strict.memory = memory_server(
            tmp_path, package, certificate_digest(keys / "server.pem"), class_count=2
        )  # fmt: skip
        code = run_command(
            lambda: edge_run(parser().parse_args([*flags_of(config), "--once"]), {}, ROOT)
        )  # fmt: skip
        return code, capsys.readouterr().err

    return with_files


def pair(keys: Path, device: str = "pi-1") -> dict[str, Path]:
    folder = keys / "devices" / device
    return {"certificate": folder / "tls.pem", "certificate_key": folder / "tls.key"}


def test_a_device_with_a_certificate_of_the_ca_comes_in(call: Call, keys: Path, strict: SocketServer) -> None:
    code, said = call(**pair(keys))
    assert code == 0, said
    assert strict.memory is not None and strict.memory.images == 6


def test_a_device_without_one_is_told_what_it_lacks(call: Call, strict: SocketServer) -> None:
    code, said = call()
    assert code == 8 and "ended the connection right after TLS: it may ask for a certificate" in said, said
    assert "--certificate-key" in said and "Traceback" not in said and strict.connections == 0


def test_a_certificate_of_another_ca_is_told_apart_from_a_wrong_server(
    call: Call, tmp_path: Path, strict: SocketServer, keys: Path
) -> None:
    other = make(tmp_path / "other", "pi-1")
    code, said = call(**pair(other))
    assert code == 8 and "or not accept the one that it has" in said, said
    assert strict.connections == 0
    code, said = call(**pair(keys), ca=other / "ca.pem")
    assert code == 8 and "the certificate of wss://127.0.0.1" in said and "is not trusted" in said, said


def test_files_that_cannot_be_used_are_settings_to_correct(call: Call, keys: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other", "pi-1")
    mixed = {"certificate": pair(keys)["certificate"], "certificate_key": pair(other)["certificate_key"]}
    code, said = call(**mixed)
    assert code == 2 and "cannot be used" in said
    with pytest.raises(Exception, match="certificate is set, certificate_key is not"):
        call(certificate=pair(keys)["certificate"])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the server's side needs Python 3.11")
def test_server_run_says_by_its_alert_what_is_wrong(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio alone would hang up without a word; the key of the roster is asked for as ever."""
    pytest.importorskip("psutil")
    bench_module = pytest.importorskip("tests.over_loopback.test_server_connections", reason="needs the server's side")
    from server_runtime import enrolment
    from server_runtime.plan import Listen

    listen = Listen("127.0.0.1", 0, keys / "server.pem", keys / "server.key", keys / "ca.pem")
    monkeypatch.setattr(bench_module, "Listen", lambda *words: listen)
    token = enrolment.issue_claim(tmp_path / "roster", "clinic", "new", time.time() + 3600)
    other = make(tmp_path / "other", "pi-1")

    async def story(bench: Any) -> None:
        key = tmp_path / "device.key"

        def knock(**files: Path) -> Enrolled:
            return enrol(Desk(bench.url, keys / "ca.pem", "new", **files), key, signature.read_claim(token))

        with pytest.raises(UnreachableError, match="asks for a certificate of this device, and there is none"):
            await asyncio.to_thread(knock)
        with pytest.raises(UnreachableError, match="does not accept the certificate of this device: unknown ca"):
            await asyncio.to_thread(lambda: knock(**pair(other)))
        assert (await asyncio.to_thread(lambda: knock(**pair(keys)))).site == "clinic"
        enrolment.revoke(tmp_path / "roster", "new")
        with pytest.raises(AuthError, match="revoked"):  # a certificate is no way around the roster
            await asyncio.to_thread(rotate, Desk(bench.url, keys / "ca.pem", "new", **pair(keys)), key)

    bench_module.on_server(story, tmp_path, monkeypatch)
