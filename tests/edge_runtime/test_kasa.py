"""Addresses and accounts of smart plugs, and what odd answers become; the library is made up, no plug is asked."""

from __future__ import annotations

import asyncio
import stat
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contract.errors import ConfigError, DeviceError
from edge_runtime.meters import open_plug
from edge_runtime.meters._plug_account import Account, keep_hash, read_account
from edge_runtime.meters.kasa import PROTOCOLS, KasaSensor, Plug, open_kasa, protocols_of, read_plug

LOGIN = ("me@site.example", "secret")


class Refused(Exception):
    """The library's word for an account that a plug does not take."""


@dataclass
class Library:
    """python-kasa, of which one protocol works; the others fail as `failures` says."""

    works: str
    power: Any = 5.0
    failures: dict[str, Exception] = field(default_factory=dict)
    tried: list[str] = field(default_factory=list)
    hung_up: int = 0

    AuthenticationError = Refused
    Module = SimpleNamespace(Energy="energy")
    Credentials = staticmethod(lambda name, password: (name, password))
    DeviceConfig = SimpleNamespace

    @property
    def DeviceConnectionParameters(self) -> Any:
        def from_values(family: str, encryption: str, login_version: int | None) -> str:
            return next(
                each.name
                for each in PROTOCOLS
                if (each.family, each.encryption, each.login_version) == (family, encryption, login_version)
            )

        return SimpleNamespace(from_values=from_values)

    @property
    def Device(self) -> Any:
        async def connect(config: Any) -> Any:
            self.tried.append(config.connection_type)
            if config.connection_type != self.works:
                raise self.failures.get(config.connection_type, OSError("connection refused"))
            return SimpleNamespace(
                modules={"energy": SimpleNamespace(get_status=self.status)}, children=[], disconnect=self.disconnect,
                credentials_hash="aGFzaA==",
            )  # fmt: skip

        return SimpleNamespace(connect=connect)

    async def status(self) -> Any:
        if isinstance(self.power, Exception):
            raise self.power
        return SimpleNamespace(power=self.power)

    async def disconnect(self) -> None:
        self.hung_up += 1
        raise OSError("it was gone already")


def with_account(folder: Path) -> Plug:
    return Plug("plug", account=Account(folder / "account", LOGIN, {}))


def test_addresses() -> None:
    assert read_plug("10.0.0.7:9999/2", None) == Plug("10.0.0.7", 9999, 2)
    assert read_plug("plug.local", None) == Plug("plug.local")
    for wrong in ("http://plug", "", "plug:0", "plug:65536", "plug/", "plug/x", "plug:1:2", "plug /1"):
        with pytest.raises(ConfigError, match="HOST"):
            read_plug(wrong, None)


def test_an_account_without_a_plug_is_an_error(tmp_path: Path) -> None:
    assert open_plug(None, None) is None
    with pytest.raises(ConfigError, match="plug is not") as caught:
        open_plug(None, tmp_path / "account")
    assert "--plug-account" in caught.value.cure


def test_an_account_is_two_lines_and_does_not_show(tmp_path: Path) -> None:
    file = tmp_path / "account"
    file.write_text("me@site.example\nsecret\n")
    plug = read_plug("plug", file)
    assert plug.account is not None and plug.account.login == LOGIN
    assert "secret" not in repr(plug) and LOGIN[0] not in repr(plug)
    for wrong in ("me@site.example\n", "me\n\n", "me\nsecret\nmore\n", ""):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="two lines"):
            read_account(file)
    file.write_bytes(b"\xff\n\xff\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_account(file)


def test_hashes_stand_in_for_an_account_that_is_gone(tmp_path: Path) -> None:
    file = tmp_path / "account"
    with pytest.raises(ConfigError, match=r"account does not exist, nor does account\.hash beside it"):
        read_account(file)
    account = Account(file, LOGIN, {})
    keep_hash(account, "SMART.KLAP", "one")
    keep_hash(account, "IOT.KLAP", "two")
    kept = tmp_path / "account.hash"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    written = kept.stat().st_mtime_ns
    keep_hash(account, "IOT.KLAP", "two")  # nothing new: a memory card is not written to at each start
    assert kept.stat().st_mtime_ns == written
    found = read_account(file)
    assert found.login is None and dict(found.hashes) == {"SMART.KLAP": "one", "IOT.KLAP": "two"}
    assert [each.name for each in protocols_of(found)] == ["IOT.XOR", "SMART.KLAP", "IOT.KLAP"]
    keep_hash(account, "IOT.KLAP", "three")
    assert read_account(file).hashes["IOT.KLAP"] == "three"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"SMART.KLAP": 1}', b'{"a": "b"}' + b" " * 5000])
def test_spoiled_hashes_are_an_error_and_a_new_login_replaces_them(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "account"
    file.with_name("account.hash").write_bytes(content)
    with pytest.raises(ConfigError, match=r"account\.hash cannot be used") as caught:
        read_account(file)
    assert "remove it" in caught.value.cure
    keep_hash(Account(file, LOGIN, {}), "SMART.KLAP", "one")
    assert dict(read_account(file).hashes) == {"SMART.KLAP": "one"}


def test_a_hash_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DeviceError):
        keep_hash(Account(tmp_path / "missing" / "account", LOGIN, {}), "SMART.KLAP", "one")


def test_without_the_library_the_reason_names_the_extra() -> None:
    def load(name: str) -> Any:
        raise ImportError(name)

    meter, reasons = open_kasa(Plug("plug"), load)
    assert meter is None and "pip install" in reasons[0]


@pytest.mark.parametrize("works", [each.name for each in PROTOCOLS])
def test_protocols_are_tried_in_turn_and_the_account_shown_to_a_plug_is_kept(works: str, tmp_path: Path) -> None:
    library = Library(works)
    meter, reasons = open_kasa(with_account(tmp_path), lambda _: library)
    assert meter is not None and not reasons
    assert library.tried == [each.name for each in PROTOCOLS][: library.tried.index(works) + 1]
    assert (tmp_path / "account.hash").exists() == (works != "IOT.XOR")


def test_without_an_account_one_protocol_is_tried() -> None:
    library = Library("SMART.KLAP")
    meter, reasons = open_kasa(Plug("plug"), lambda _: library)
    assert meter is None and library.tried == ["IOT.XOR"]
    assert "connection refused" in reasons[0] and "--plug-account" in reasons[0]


def test_a_refusal_counts_where_no_form_of_the_protocol_got_further(tmp_path: Path) -> None:
    refused = {name: Refused("no") for name in ("SMART.KLAP", "IOT.KLAP", "IOT.KLAP.2")}
    with pytest.raises(ConfigError, match="refuses the account"):
        open_kasa(with_account(tmp_path), lambda _: Library("none", failures=refused))
    # The plug took the account in one form and then gave an answer that the library does not know.
    halfway = {**refused, "IOT.KLAP": TypeError("no time zone")}
    meter, reasons = open_kasa(with_account(tmp_path), lambda _: Library("none", failures=halfway))
    assert meter is None and "no time zone" in reasons[0] and "refuses" not in reasons[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "power", [None, float("nan"), float("inf"), KeyError("power_mw"), TypeError("odd"), asyncio.TimeoutError()]
)
def test_odd_answers_are_a_reason_and_the_next_read_connects_anew(power: Any) -> None:
    library = Library("IOT.XOR")
    with closing(KasaSensor(library, Plug("plug"))) as sensor:
        assert sensor.read_w() == 5.0
        library.power = power
        with pytest.raises(OSError, match="the plug plug: "):
            sensor.read_w()
        library.power = 6.0
        assert sensor.read_w() == 6.0
    assert len(library.tried) == library.hung_up  # no connection is left open


def test_closing_hangs_up_and_ends_the_thread() -> None:
    library = Library("IOT.XOR")
    sensor = KasaSensor(library, Plug("plug"))
    sensor.read_w()
    sensor.close()
    assert library.hung_up == 1 and not sensor._thread.is_alive()
    sensor.close()
    with pytest.raises(OSError, match="its meter is closed"):
        sensor.read_w()
