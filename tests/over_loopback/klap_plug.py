"""A made-up plug on loopback that speaks KLAP over HTTP, as TP-Link's newer plugs do; written from the protocol.

Two handshakes prove on both sides that the owner's name and password are known: each side sends 16 random bytes, and
hashes of them with the account's hash. Requests and answers are then AES-CBC under keys derived from the three, counted
and signed. "smart" is a Tapo P110 (KLAP 2), "iot" an older Kasa plug whose firmware was renewed (KLAP 1).
What a test says of `watts` and `password` holds from the next request on.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from cryptography.hazmat.primitives import padding
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

UNKNOWN_METHOD, WRONG_PARAMETERS = -1002, -1008
INFO = {
    "device_id": "802D" + "0" * 36, "model": "P110", "type": "SMART.TAPOPLUG", "device_on": True, "fw_ver": "1.3.0",
    "hw_ver": "1.0", "mac": "00-00-5E-00-53-01", "nickname": base64.b64encode(b"bench").decode(), "region": "UTC",
    "ssid": "", "signal_level": 3, "rssi": -40, "specs": "", "lang": "en_US", "avatar": "plug", "on_time": 1,
}  # fmt: skip
SYSTEM = {
    "deviceId": "8006" + "0" * 36, "model": "HS110(EU)", "type": "IOT.SMARTPLUGSWITCH", "feature": "TIM:ENE",
    "alias": "bench", "relay_state": 1, "sw_ver": "1.1.0", "hw_ver": "4.0", "mac": "00:00:5E:00:53:02", "err_code": 0,
    "rssi": -40, "on_time": 1, "led_off": 0,
}  # fmt: skip


def sha256(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


@dataclass
class Session:
    """What both sides derive from the handshake."""

    local: bytes
    remote: bytes
    account: bytes
    is_open: bool = False
    newest: int | None = None  # number of the last request

    def seal(self, number: int, text: bytes) -> bytes:
        pad = padding.PKCS7(128).padder()
        cipher = self._cipher(number).encryptor()
        secret = cipher.update(pad.update(text) + pad.finalize()) + cipher.finalize()
        return self._signature(number, secret) + secret

    def unseal(self, number: int, message: bytes) -> bytes:
        """The text; a forged, repeated or reordered request fails."""
        signature, secret = message[:32], message[32:]
        assert signature == self._signature(number, secret), "the signature does not fit"
        first = int.from_bytes(self._derive(b"iv")[-4:], "big", signed=True) + 1
        assert number == (first if self.newest is None else self.newest + 1), "the number is not the next"
        self.newest = number
        cipher, pad = self._cipher(number).decryptor(), padding.PKCS7(128).unpadder()
        return pad.update(cipher.update(secret) + cipher.finalize()) + pad.finalize()

    def _derive(self, purpose: bytes) -> bytes:
        return sha256(purpose, self.local, self.remote, self.account)

    def _cipher(self, number: int) -> Cipher[modes.CBC]:
        counter = number.to_bytes(4, "big", signed=True)
        return Cipher(algorithms.AES(self._derive(b"lsk")[:16]), modes.CBC(self._derive(b"iv")[:12] + counter))

    def _signature(self, number: int, secret: bytes) -> bytes:
        return sha256(self._derive(b"ldk")[:28], number.to_bytes(4, "big", signed=True), secret)


@dataclass
class KlapPlug:
    """The plug, as its owner and its load know it. A changed password ends every session."""

    generation: str
    name: str
    password: str
    watts: float | None = 0.0
    port: int = 0
    handshakes: int = 0
    answers: threading.Event = field(default_factory=threading.Event)  # cleared: it keeps everyone waiting
    asked: threading.Event = field(default_factory=threading.Event)
    sessions: dict[str, Session] = field(default_factory=dict)

    def account(self) -> bytes:
        if self.generation == "smart":
            return sha256(hashlib.sha1(self.name.encode()).digest(), hashlib.sha1(self.password.encode()).digest())
        md5 = hashlib.md5(self.name.encode()).digest() + hashlib.md5(self.password.encode()).digest()
        return hashlib.md5(md5).digest()

    async def first_handshake(self, request: web.Request) -> web.Response:
        session = Session(await request.read(), secrets.token_bytes(16), self.account())
        cookie = secrets.token_hex(8)
        self.handshakes += 1
        self.sessions[cookie] = session
        seeds = (session.local, session.remote) if self.generation == "smart" else (session.local,)
        answer = web.Response(body=session.remote + sha256(*seeds, session.account))
        answer.headers["Set-Cookie"] = f"TP_SESSIONID={cookie};TIMEOUT=86400"
        return answer

    async def second_handshake(self, request: web.Request) -> web.Response:
        session = self.session_of(request)
        if session is None:
            return web.Response(status=403)
        seeds = (session.remote, session.local) if self.generation == "smart" else (session.remote,)
        session.is_open = await request.read() == sha256(*seeds, session.account)
        return web.Response(status=200 if session.is_open else 403)

    async def request(self, request: web.Request) -> web.Response:
        message = await request.read()
        self.asked.set()
        await asyncio.get_running_loop().run_in_executor(None, self.answers.wait)
        session = self.session_of(request)
        if session is None or not session.is_open:
            return web.Response(status=403)
        number = int(request.query["seq"])
        asked = json.loads(session.unseal(number, message))
        told = self.answer(asked) if self.generation == "smart" else self.answer_iot(asked)
        return web.Response(body=session.seal(number, json.dumps(told).encode()))

    def session_of(self, request: web.Request) -> Session | None:
        session = self.sessions.get(request.cookies.get("TP_SESSIONID", ""))
        return session if session is not None and session.account == self.account() else None

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        power_mw = None if self.watts is None else round(self.watts * 1000.0)
        known: dict[str, Any] = {
            "component_nego": {
                "component_list": [{"id": "device", "ver_code": 2}, {"id": "energy_monitoring", "ver_code": 2}]
            },
            "get_device_info": INFO,
            "get_connect_cloud_state": {"status": 0},
            "get_energy_usage": {"today_energy": 40, "month_energy": 900, "current_power": power_mw},
            "get_current_power": {"current_power": None if self.watts is None else round(self.watts)},
            "get_emeter_data": {"current_ma": 33, "energy_wh": 971, "power_mw": power_mw, "voltage_mv": 230000},
            "get_emeter_vgain_igain": {"igain": 10830, "vgain": 122},
        }
        if asked["method"] == "multipleRequest":
            answers = [{"method": each["method"], **self.answer(each)} for each in asked["params"]["requests"]]
            return {"error_code": 0, "result": {"responses": answers}}
        if asked["method"] not in known:
            return {"error_code": WRONG_PARAMETERS}
        return {"error_code": 0, "result": known[asked["method"]]}

    def answer_iot(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Of a request the parts that the older plugs know: what they are, and what flows."""
        meter = {"power_mw": round((self.watts or 0.0) * 1000.0), "total_wh": 16323, "err_code": 0}
        known: dict[str, Any] = {
            "system": {"get_sysinfo": SYSTEM},
            "emeter": {"get_realtime": meter},
            "time": {"get_timezone": {"index": 39, "err_code": 0}},
        }
        unknown = {"err_code": UNKNOWN_METHOD}
        return {part: {call: known.get(part, {}).get(call, unknown) for call in asked[part]} for part in asked}

    def hang(self) -> None:
        """Keep everyone waiting who asks from now on; `asked` tells when someone does."""
        self.asked.clear()
        self.answers.clear()


@contextmanager
def klap_plug(generation: str = "smart", name: str = "me@site.example", password: str = "secret") -> Iterator[KlapPlug]:  # noqa: S107
    """A plug that answers on a port of its own, from a thread of its own."""
    plug, loop = KlapPlug(generation, name, password), asyncio.new_event_loop()
    plug.answers.set()
    thread = threading.Thread(target=loop.run_forever, name="klap plug", daemon=True)
    thread.start()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(30.0)

    application = web.Application()
    application.add_routes(
        [
            web.post("/app/handshake1", plug.first_handshake),
            web.post("/app/handshake2", plug.second_handshake),
            web.post("/app/request", plug.request),
        ]
    )
    runner = web.AppRunner(application, shutdown_timeout=0.0)
    try:
        run(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        run(site.start())
        plug.port = runner.addresses[0][1]
        yield plug
    finally:
        plug.answers.set()
        run(runner.cleanup())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
