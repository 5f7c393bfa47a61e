"""Many devices on one server: how long until all are in, how late heartbeats are, what a session costs.

The server is the product's socket process over TLS; the devices are the product's sessions on real sockets, all in one
other process, each with a key of its own, doing nothing but staying connected. Both share the machine's cores.

    connect     from opening the socket to the welcome, challenge and proof included, with so many under way at once
    heartbeat   how much later than agreed the server's next frame came (the server looks once a second)
    answer      a WebSocket ping until its pong, while all hold: how busy the server's loop is
    memory      the server's resident memory with all devices, less that before the first, per device
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import ssl
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from websockets.asyncio.client import ClientConnection, connect

from contract import signature
from contract.codec import LIMITS
from contract.console import ArgumentParser, print_document, run_command, say
from contract.errors import UsageError
from contract.messages import Challenge, Hello, Proof, Welcome
from contract.session import Received, Role, Session, SessionLimits, State
from tools.bench_fleet_server import HEARTBEAT_S, PACKAGE_DIGEST

SITE = "site"
START_S = 120.0


@dataclass
class Seen:
    """What the devices saw, in seconds."""

    connect_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    pong_s: list[float] = field(default_factory=list)
    lost: int = 0
    counting: bool = False  # all are in


class Device:
    """One session, from its socket to the end of the measurement."""

    def __init__(self, name: str, key: signature.PrivateKey, seen: Seen) -> None:
        self._name, self._key, self._seen = name, key, seen
        self._session = Session(Role.DEVICE, SessionLimits())

    async def join(self, url: str, context: ssl.SSLContext, at_once: asyncio.Semaphore) -> None:
        """Connect and shake hands."""
        async with at_once:
            began_s = time.perf_counter()
            self.socket: ClientConnection = await connect(
                url,
                ssl=context,
                compression=None,
                max_size=LIMITS.frame_bytes,
                ping_interval=None,
                open_timeout=START_S,
            )
            key_id = signature.key_id(self._key.public_key())
            await self._send(Hello(self._name, key_id, 1, 1, (), PACKAGE_DIGEST, 2, None, "adapt", None, 0))
            while self._session.state is not State.OPEN:
                await self._take()
            self._seen.connect_s.append(time.perf_counter() - began_s)

    async def stay(self, until: asyncio.Event, rng: np.random.Generator) -> None:
        """Beat and listen until the end, also while others still join; a ping at a random moment of each 10 s."""
        listening = asyncio.create_task(self._listen())
        try:
            while not until.is_set() and not listening.done():
                await asyncio.sleep(float(rng.uniform(0.0, HEARTBEAT_S)))
                self._session.tick(time.monotonic())
                await self._flush()
                asked_s = time.perf_counter()
                await (await self.socket.ping())
                if self._seen.counting:
                    self._seen.pong_s.append(time.perf_counter() - asked_s)
        except Exception:  # whatever it was, the session is gone
            self._seen.lost += 1
        listening.cancel()

    async def _listen(self) -> None:
        heard_s = time.perf_counter()
        while True:
            await self._take()
            now_s = time.perf_counter()
            if self._seen.counting:
                self._seen.late_s.append(max(0.0, now_s - heard_s - HEARTBEAT_S))
            heard_s = now_s

    async def _take(self) -> None:
        frame = await self.socket.recv()
        assert isinstance(frame, bytes)
        for event in self._session.receive(frame, time.monotonic()):
            if isinstance(event, Received) and isinstance(event.message, Challenge):
                tls = self.socket.transport.get_extra_info("ssl_object")
                binding = hashlib.sha256(tls.getpeercert(binary_form=True)).digest()
                payload = signature.proof_payload(event.message.nonce, binding, self._name, None)
                await self._send(Proof(signature.sign_raw(self._key, payload)))
            elif isinstance(event, Received) and not isinstance(event.message, Welcome):
                pass  # heartbeats

    async def _send(self, message: Hello | Proof) -> None:
        self._session.send(message)
        await self._flush()

    async def _flush(self) -> None:
        for frame in self._session.frames_to_send():
            await self.socket.send(frame)


def enrol(keys: Path, count: int) -> dict[str, signature.PrivateKey]:
    """A CA, a server's certificate, and so many devices of one site."""
    subprocess.run([sys.executable, "-m", "tools.make_keys", "-o", str(keys), "--site", SITE], check=True)
    (keys / "roster" / SITE).mkdir(parents=True)
    made = {f"device-{number}": signature.generate() for number in range(count)}
    for name, key in made.items():
        (keys / "roster" / SITE / f"{name}.pub").write_bytes(signature.public_pem(key.public_key()))
    return made


async def measure(
    url: str, ca: Path, keys: dict[str, signature.PrivateKey], at_once: int, hold_s: float, pid: int
) -> dict[str, object]:
    """Connect all, hold them, and say what was seen."""
    server, seen = psutil.Process(pid), Seen()
    context = ssl.create_default_context(cafile=ca)
    before_bytes = server.memory_info().rss
    devices = [Device(name, key, seen) for name, key in keys.items()]
    began_s, gate = time.perf_counter(), asyncio.Semaphore(at_once)
    ended, rngs = asyncio.Event(), np.random.default_rng(0).spawn(len(devices))
    refused: list[BaseException] = []

    async def live(device: Device, rng: np.random.Generator) -> None:
        try:
            await device.join(url, context, gate)
        except Exception as error:
            refused.append(error)
            return
        finally:
            arrived.release()
        await device.stay(ended, rng)

    arrived = asyncio.Semaphore(0)
    lives = [asyncio.create_task(live(device, rng)) for device, rng in zip(devices, rngs, strict=True)]
    for _ in devices:
        await arrived.acquire()
    all_in_s = time.perf_counter() - began_s
    seen.counting, cpu, held_from_s = True, server.cpu_times(), time.perf_counter()
    await asyncio.sleep(hold_s)
    held_s, after = time.perf_counter() - held_from_s, server.cpu_times()
    after_bytes = server.memory_info().rss
    ended.set()
    await asyncio.gather(*lives)
    return {
        "devices": len(devices),
        "not_let_in": len(refused),
        "first_refusal": repr(refused[0]) if refused else None,
        "lost": seen.lost,
        "all_in_s": all_in_s,
        "connect_p50_s": quantile(seen.connect_s, 0.5),
        "connect_p99_s": quantile(seen.connect_s, 0.99),
        "heartbeats": len(seen.late_s),
        "heartbeat_late_p50_s": quantile(seen.late_s, 0.5),
        "heartbeat_late_p99_s": quantile(seen.late_s, 0.99),
        "answers": len(seen.pong_s),
        "answer_p50_s": quantile(seen.pong_s, 0.5),
        "answer_p99_s": quantile(seen.pong_s, 0.99),
        "server_bytes_per_session": (after_bytes - before_bytes) / max(1, len(seen.connect_s)),
        "server_rss_bytes": after_bytes,
        "server_cpu_share": (after.user + after.system - cpu.user - cpu.system) / held_s,
        "held_s": held_s,
    }


def quantile(values: list[float], share: float) -> float | None:
    """None where there is no value."""
    return float(np.quantile(values, share)) if values else None


def main() -> int:
    options = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        keys = enrol(root / "keys", options.devices)
        words = [sys.executable, "-m", "tools.bench_fleet_server", str(root / "run"), str(root / "keys")]
        running = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            assert running.stdout is not None
            line = running.stdout.readline()
            if not line.startswith("listening on "):
                raise UsageError("the server did not start", "see its words above")
            say(f"{options.devices} devices, {options.at_once} at once")
            ca = root / "keys" / "ca.pem"
            found = asyncio.run(measure(line.split()[-1], ca, keys, options.at_once, options.hold_s, running.pid))
        finally:
            running.terminate()
            running.wait(START_S)
    found |= {"at_once": options.at_once, "cpus": os.cpu_count(), "heartbeat_s": HEARTBEAT_S}
    if options.format == "json":
        print_document("bench-fleet", found)
    else:
        print("\n".join(f"{name:<26} {'unknown' if value is None else value}" for name, value in found.items()))
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog="tools/bench_fleet", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--devices", type=int, default=1000, help="default %(default)s")
    parser.add_argument("--at-once", type=int, default=32, help="handshakes under way (default %(default)s)")
    parser.add_argument("--hold-s", type=float, default=60.0, help="how long all stay (default %(default)g)")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default %(default)s")
    options = parser.parse_args(argv)
    for name in ("devices", "at_once", "hold_s"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(options, name)} is too few", "give at least 1")
    return options


if __name__ == "__main__":
    sys.exit(run_command(main))
