"""Keys and certificates as tools/make_keys makes them."""

from __future__ import annotations

import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from contract import signature

ROOT = Path(__file__).parents[2]


def make(output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.make_keys", "-o", str(output), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("keys")
    done = make(root, "--site", "clinic", "--device", "jetson-1", "--device", "pi-2")
    assert done.returncode == 0, done.stderr
    return root


def test_the_roster_holds_the_public_half_of_each_device_key(keys: Path) -> None:
    for device in ("jetson-1", "pi-2"):
        private = signature.load_private(keys / "devices" / device / "device.key")
        public = signature.load_public(keys / "roster" / "clinic" / f"{device}.pub")
        assert signature.key_id(private.public_key()) == signature.key_id(public)


def test_private_files_are_private(keys: Path) -> None:
    private = [path for path in keys.rglob("*") if path.suffix in {".key", ".secret"}]
    assert len(private) == 8  # publisher, CA, server, site, and key and secret of two devices
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in private)


def test_devices_of_one_site_share_its_secret(keys: Path) -> None:
    secrets = {(keys / "devices" / device / "site.secret").read_bytes() for device in ("jetson-1", "pi-2")}
    assert secrets == {(keys / "sites" / "clinic.secret").read_bytes()}


def test_the_certificate_passes_python_313s_strict_verification(keys: Path) -> None:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(keys / "server.pem", keys / "server.key")
    client = ssl.create_default_context(cafile=str(keys / "ca.pem"))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server, server_hostname="localhost")
    far = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):  # a handshake takes two flights each way
        for side in (near, far):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert near.getpeercert()


def test_a_device_can_be_added_but_never_replaced(keys: Path) -> None:
    before = {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()}
    assert make(keys, "--site", "clinic", "--device", "pi-3").returncode == 0
    again = make(keys, "--site", "clinic", "--device", "pi-3")
    assert again.returncode == 2
    assert "pi-3" in again.stderr and "Traceback" not in again.stderr
    assert all(path.read_bytes() == data for path, data in before.items())


@pytest.mark.parametrize("name", ["../x", "", "a/b", ".hidden"])
def test_a_name_that_is_no_plain_file_name_is_refused(tmp_path: Path, name: str) -> None:
    done = make(tmp_path, "--device", name)
    assert done.returncode == 2
    assert not list(tmp_path.iterdir())
