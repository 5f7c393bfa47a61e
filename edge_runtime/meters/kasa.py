"""TP-Link's smart plugs through python-kasa, an extra: `pip install cutlayer[kasa]` (devices.md 1.6).

They see the mains, with the loss of the power supply, and show about one new value a second. Their own energy counter
moves in watt-hours, so power is sampled and integrated. A strip is read by outlet. The account that newer plugs want is
`_plug_account`'s.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import logging
import math
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.errors import ConfigError, DeviceError, why
from edge_runtime.meters._pieces import Timing
from edge_runtime.meters._plug_account import Account, keep_hash, read_account
from edge_runtime.meters._reading import Quality
from edge_runtime.meters._sampled import SampledMeter, Sampling

# How late its figure is nobody has published; owners see 0.5 to 2 s.
SAMPLING = Sampling(
    interval_s=1.0,
    gap_most_s=5.0,
    jitter=0.2,
    at_reads=False,
    fine_interval_s=0.25,
    timing=Timing(window_s=1.0, lag_s=1.25, doubt_s=0.75, step_w=0.001),
)
TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 30.0  # of all protocols together
REFUSED_WAIT_S = 60.0  # a plug that refuses the account is not asked every second
_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9.-]+)(:(?P<port>\d{1,5}))?(/(?P<outlet>\d{1,2}))?")


@dataclass(frozen=True)
class Protocol:
    """One way to speak to a plug, in the library's words. `name` stands in the account's hash file."""

    name: str
    family: str
    encryption: str
    login_version: int | None = None


# In this order: plugs that want no account are shown none. Left out is AES, of older Tapo firmware: to whatever answers
# at the address it would give the password, in other letters.
PLAIN = Protocol("IOT.XOR", "IOT.SMARTPLUGSWITCH", "XOR")
PROTOCOLS = (
    PLAIN,
    Protocol("SMART.KLAP", "SMART.TAPOPLUG", "KLAP", 2),
    Protocol("IOT.KLAP", "IOT.SMARTPLUGSWITCH", "KLAP"),
    Protocol("IOT.KLAP.2", "IOT.SMARTPLUGSWITCH", "KLAP", 2),
)


@dataclass(frozen=True)
class Plug:
    """Where a plug is; `outlet` counts from 1 on a strip. Newer plugs want the account of their owner."""

    host: str
    port: int | None = None
    outlet: int | None = None
    account: Account | None = None


def read_plug(address: str, account: Path | None) -> Plug:
    """A plug from `HOST[:PORT][/OUTLET]` and the file of its owner's account.

    Raises: ConfigError.
    """
    found = _ADDRESS.fullmatch(address)
    port, outlet = (None if found is None or found[name] is None else int(found[name]) for name in ("port", "outlet"))
    if found is None or (port is not None and not 1 <= port <= 65535) or outlet == 0:
        raise ConfigError(f"plug should be HOST[:PORT][/OUTLET], found {address!r}", "correct --plug")
    return Plug(found["host"], port, outlet, None if account is None else read_account(account))


def protocols_of(account: Account | None) -> tuple[Protocol, ...]:
    """Those that can be spoken with what is known of the account."""
    if account is None:
        return (PLAIN,)
    if account.login is not None:
        return PROTOCOLS
    return tuple(each for each in PROTOCOLS if each.name in account.hashes or each is PLAIN)


class AccountRefusedError(OSError):
    """The plug does not take the account."""


class OutletError(OSError):
    """A strip has no such outlet, or none was named: what all outlets take together is no device's power."""


class KasaSensor:
    """One plug or outlet. What it is asked runs on a thread of its own, whatever thread asks, until it is closed."""

    name = "kasa"
    quality: Quality = "measured"

    def __init__(self, library: Any, plug: Plug, clock: Callable[[], float] = time.monotonic) -> None:
        outlet = "" if plug.outlet is None else f", outlet {plug.outlet}"
        self.scope = f"mains at the plug {plug.host}{outlet}"
        self._library, self._plug, self._clock = library, plug, clock
        self._protocols = protocols_of(plug.account)  # the one, once it is known
        self._device: Any = None
        self._refused_s: float | None = None
        self._lock, self._is_closed = threading.Lock(), False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="meter kasa connection", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # an open connection would complain when the interpreter takes it down

    def read_w(self) -> float:
        """Watts. Raises: OSError when the plug does not answer, refuses the account, or has no meter."""
        if self._refused_s is not None and self._clock() - self._refused_s < REFUSED_WAIT_S:
            raise self._refusal()
        with self._lock:
            if self._is_closed:
                raise OSError(f"the plug {self._plug.host}: its meter is closed")
            asked = asyncio.run_coroutine_threadsafe(self._power_w(), self._loop)
        try:
            watts: float = asked.result()
        except self._library.AuthenticationError as error:
            self._refused_s = self._clock()
            raise self._refusal() from error
        except OutletError as error:
            raise OutletError(f"the plug {self._plug.host}: {error}") from error
        except Exception as error:  # whatever the library makes of an answer that it does not know
            raise OSError(f"the plug {self._plug.host}: {_said(error)}") from error
        self._refused_s = None
        return watts

    def account_hash(self) -> tuple[str, str] | None:
        """Protocol and hash that the connected plug took, None where it wanted none."""
        protocol = self._protocols[0]
        return None if self._device is None or protocol is PLAIN else (protocol.name, self._device.credentials_hash)

    def close(self) -> None:
        """Hang up and end the thread. A second time does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        atexit.unregister(self.close)
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _refusal(self) -> AccountRefusedError:
        file = "the file of --plug-account" if self._plug.account is None else self._plug.account.file
        return AccountRefusedError(
            f"the plug {self._plug.host} refuses the account; write its owner's name and password into {file}"
        )

    async def _power_w(self) -> float:
        if self._device is None:
            self._device = await _within(PROBE_TIMEOUT_S, self._connect())
        try:
            meter = self._metered().modules[self._library.Module.Energy]
            status = await _within(TIMEOUT_S, meter.get_status())
        except BaseException:  # also when cancelled: the next read connects anew
            await self._hang_up()
            raise
        if status.power is None or not math.isfinite(status.power):
            raise OSError(f"it shows {status.power} as its power")
        return float(status.power)

    async def _connect(self) -> Any:
        """The first protocol that works. A plug refuses an account in every form of KLAP but its own, too."""
        failures: dict[Protocol, Exception] = {}
        for protocol in self._protocols:
            connecting = self._library.Device.connect(config=self._config(protocol))
            try:
                device = await _within(CONNECT_TIMEOUT_S, connecting)
            except Exception as error:
                failures[protocol] = error
            else:
                self._protocols = (protocol,)
                return device
        with_account = [error for protocol, error in failures.items() if protocol is not PLAIN]
        if with_account and all(map(self._is_refusal, with_account)):
            raise with_account[0]
        said = dict.fromkeys(_said(error) for error in failures.values() if not self._is_refusal(error))
        hint = "; a newer plug wants its owner's account (--plug-account)" if self._plug.account is None else ""
        raise OSError("; ".join(said) + hint)

    def _is_refusal(self, error: Exception) -> bool:
        return isinstance(error, self._library.AuthenticationError)

    def _config(self, protocol: Protocol) -> Any:
        library, plug = self._library, self._plug
        account: dict[str, Any] = {}
        if plug.account is not None and plug.account.login is not None:
            account["credentials"] = library.Credentials(*plug.account.login)
        elif plug.account is not None:
            account["credentials_hash"] = plug.account.hashes.get(protocol.name)
        return library.DeviceConfig(
            host=plug.host,
            port_override=plug.port,
            timeout=int(TIMEOUT_S),
            connection_type=library.DeviceConnectionParameters.from_values(
                protocol.family, protocol.encryption, login_version=protocol.login_version
            ),
            **account,
        )

    def _metered(self) -> Any:
        """The plug, or the outlet of a strip."""
        outlet, device = self._plug.outlet, self._device
        outlets = list(device.children)
        if outlet is not None and not outlets:
            raise OutletError("it is no strip and has no outlets to choose from")
        if outlets and not 1 <= (outlet or 0) <= len(outlets):
            names = ", ".join(f"{number} ({each.alias})" for number, each in enumerate(outlets, start=1))
            raise OutletError(f"it is a strip with the outlets {names}; asked for {outlet or 'none of them'}")
        if outlets and outlet is not None:
            device = outlets[outlet - 1]
        if self._library.Module.Energy not in device.modules:
            raise OSError("it has no energy meter")
        return device

    async def _hang_up(self) -> None:
        lost, self._device = self._device, None
        if lost is not None:
            with suppress(Exception):  # it is given up either way, and why is known already
                await _within(TIMEOUT_S, lost.disconnect())

    async def _end(self) -> None:
        reads = asyncio.all_tasks() - {asyncio.current_task()}
        for each in reads:
            each.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
        await self._hang_up()


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


async def _within(limit_s: float, work: Any) -> Any:
    try:
        return await asyncio.wait_for(work, limit_s)
    except asyncio.TimeoutError as error:
        raise asyncio.TimeoutError(f"no answer within {limit_s:g} s") from error


def open_kasa(
    plug: Plug, load: Callable[[str], Any] = importlib.import_module
) -> tuple[SampledMeter | None, list[str]]:
    """A meter on the plug, or None with the reason.

    Raises: ConfigError when the plug refuses the name and password of the account's file, or is a strip and has no such
    outlet. That a stored hash is refused is a reason only: the plug's password has changed since, and a device in the
    field goes on.
    """
    try:
        library = load("kasa")
    except ImportError:
        return None, ["kasa: python-kasa is not installed (pip install cutlayer[kasa])"]
    logging.getLogger("kasa").setLevel(logging.CRITICAL)  # what it would print of failures is a reading's reason here
    sensor = KasaSensor(library, plug)
    try:
        sensor.read_w()
    except OSError as error:
        sensor.close()
        if isinstance(error, OutletError):
            raise ConfigError(
                why(error), "correct --plug: HOST[:PORT]/OUTLET for a strip, without /OUTLET else"
            ) from error
        if isinstance(error, AccountRefusedError) and plug.account is not None and plug.account.login is not None:
            raise ConfigError(
                f"the plug {plug.host} refuses the account of {plug.account.file}",
                "correct its two lines, the e-mail address and the password of the plug's owner; capitals count",
            ) from error
        return None, [f"kasa: {why(error)}"]
    return SampledMeter(sensor, SAMPLING), _keep_account(plug, sensor)


def _keep_account(plug: Plug, sensor: KasaSensor) -> list[str]:
    """Keep the hash that the plug took; the reason where that failed, and the password stays needed."""
    took = sensor.account_hash()
    if plug.account is None or plug.account.login is None or took is None:
        return []
    try:
        keep_hash(plug.account, *took)
    except DeviceError as error:
        return [f"kasa: the account's hash is not kept, and its password stays needed: {error}"]
    return []
