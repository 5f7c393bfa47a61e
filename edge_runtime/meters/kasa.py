"""TP-Link's smart plugs through python-kasa, an extra: `pip install cutlayer[kasa]` (devices.md 1.6).

They see the mains, with the loss of the power supply, and show about one new value a second. Their own energy counter
moves in watt-hours, so power is sampled and integrated. A strip is read by outlet.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.errors import ConfigError
from edge_runtime.meters._reading import Quality
from edge_runtime.meters._sampled import SampledMeter, Sampling

SAMPLING = Sampling(interval_s=1.0, gap_most_s=5.0, at_reads=False)
TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 30.0  # with an account every protocol is tried in turn
_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9.-]+)(:(?P<port>\d{1,5}))?(/(?P<outlet>\d{1,2}))?")


@dataclass(frozen=True)
class Plug:
    """Where a plug is; `outlet` counts from 1 on a strip. Newer plugs want the account of their owner."""

    host: str
    port: int | None = None
    outlet: int | None = None
    account: tuple[str, str] | None = None  # name and password


def read_plug(address: str, account: Path | None) -> Plug:
    """A plug from `HOST[:PORT][/OUTLET]` and a file whose two lines are an account's name and password.

    Raises: ConfigError.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise ConfigError(f"plug should be HOST[:PORT][/OUTLET], found {address!r}", "correct --plug")
    port, outlet = (None if found[name] is None else int(found[name]) for name in ("port", "outlet"))
    return Plug(found["host"], port, outlet, None if account is None else _read_account(account))


def _read_account(path: Path) -> tuple[str, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plug's account {path} cannot be read: {error}", "correct --plug-account") from error
    if len(lines) != 2 or not all(lines):
        raise ConfigError(f"{path} should be two lines, a name and a password", "correct the file of --plug-account")
    return lines[0], lines[1]


class KasaSensor:
    """One plug or outlet. What it is asked runs on a thread of its own, whatever thread asks."""

    name = "kasa"
    quality: Quality = "measured"

    def __init__(self, library: Any, plug: Plug) -> None:
        outlet = "" if plug.outlet is None else f", outlet {plug.outlet}"
        self.scope = f"mains at the plug {plug.host}{outlet}"
        self._library, self._plug = library, plug
        self._device: Any = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="meter kasa connection", daemon=True).start()

    def read_w(self) -> float:
        """Watts. Raises: OSError when the plug does not answer, refuses the account, or has no meter."""
        timeout_s = TIMEOUT_S if self._device is not None else CONNECT_TIMEOUT_S
        future = asyncio.run_coroutine_threadsafe(self._power_w(), self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError as error:
            future.cancel()
            raise OSError(f"the plug {self._plug.host} did not answer within {timeout_s:g} s") from error
        except self._library.KasaException as error:
            raise OSError(f"the plug {self._plug.host}: {type(error).__name__}: {error}") from error

    async def _power_w(self) -> float:
        if self._device is None:
            self._device = await self._connect()
        try:
            status = await self._metered().modules[self._library.Module.Energy].get_status()
        except BaseException:  # also when cancelled: the next read connects anew
            lost, self._device = self._device, None
            await lost.disconnect()
            raise
        return float(status.power)

    async def _connect(self) -> Any:
        library, plug = self._library, self._plug
        if plug.account is None:
            device = await library.Device.connect(
                config=library.DeviceConfig(host=plug.host, port_override=plug.port, timeout=int(TIMEOUT_S))
            )
        else:
            account = library.Credentials(*plug.account)
            device = await library.Discover.try_connect_all(
                plug.host, port=plug.port, timeout=int(TIMEOUT_S), credentials=account
            )
            if device is None:
                raise OSError(f"the plug {plug.host} answers to no known protocol with this account")
        await device.update()
        return device

    def _metered(self) -> Any:
        """The plug, or the outlet of a strip."""
        outlet, device = self._plug.outlet, self._device
        if outlet is not None:
            if not 1 <= outlet <= len(device.children):
                raise OSError(f"the plug {self._plug.host} has {len(device.children)} outlets, asked for {outlet}")
            device = device.children[outlet - 1]
        if self._library.Module.Energy not in device.modules:
            raise OSError(f"the plug {self._plug.host} has no energy meter")
        return device


def open_kasa(
    plug: Plug, load: Callable[[str], Any] = importlib.import_module
) -> tuple[SampledMeter | None, list[str]]:
    """A meter on the plug, or None with the reason."""
    try:
        library = load("kasa")
    except ImportError:
        return None, ["kasa: python-kasa is not installed (pip install cutlayer[kasa])"]
    sensor = KasaSensor(library, plug)
    try:
        sensor.read_w()
    except OSError as error:
        return None, [f"kasa: {error}"]
    return SampledMeter(sensor, SAMPLING), []
