"""How each kind of fault is done to running programs, and when it is over.

Every wait is for something that is seen to happen (a connection, an end, a message received), never for time alone.
Which faults there are is `chaos_faults`'s part.

    partition            nothing passes, either way, until the device has tried again in vain
    half-open            one direction of the standing connections loses all bytes, until that was noticed
    slow link            few bytes a second, for some messages
    reset, close         the standing connections end, by RST or by FIN
    cut handshake        as reset, and the next connection is cut after some bytes
    refused              as reset, and the next connections are refused
    ... message          sent twice, out of order or spoiled; the connection that carries it is a new one
    kill ...             SIGKILL, of the socket process, the torch process, a device, or all at once
    freeze ...           SIGSTOP until the other side has given up, then SIGCONT: to clocks that run on, a jump
    full disk of ...     no file can grow (RLIMIT_FSIZE 0), until the program ends or has worked on without files
    rotten file of ...   killed, and bytes of one of its files flipped or cut off before it is back
    rotten ledger        the server killed, and the head of its SQLite file overwritten
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from tests.chaos.proxy import TO_DEVICE, TO_SERVER, Cut, TcpProxy
from tests.make_package import DEVICES
from tools.chaos_faults import BOTH, MESSAGE_KINDS, SERVER, Fault
from tools.chaos_world import World

DEVICE_ERROR, TRAINING_ERROR, USAGE_ERROR = 5, 7, 2  # exit codes, contract/errors.py
WAYS = ({TO_SERVER}, {TO_DEVICE}, {TO_SERVER, TO_DEVICE})
FLIPPED_BYTES = 8
LEDGER_HEAD_BYTES = 100


class Strikes:
    """Does faults to a world; `recovery_s` of those that killed the server and were not followed at once by others."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.recovery_s: dict[str, list[float]] = {}
        self._at_once = False

    def strike(self, fault: Fault) -> bool:
        """Wait for its moment, do it, and wait until work goes on; False when the work was done before."""
        world = self.world
        seen = world.messages() + (0 if self._at_once else fault.messages)
        world.wait(lambda: world.messages() >= seen, f"messages before fault {fault.number}")
        if world.over:
            return False
        done = self._doer(fault.kind)
        done(fault)
        self._at_once = fault.hasty
        if not fault.hasty:
            self._go_on(fault, world.messages())
        return True

    def _doer(self, kind: str) -> Callable[[Fault], None]:
        if kind in MESSAGE_KINDS:
            return self._alter_message
        found: Callable[[Fault], None] = getattr(self, "_" + kind.replace(" ", "_").replace("-", "_"))
        return found

    def _go_on(self, fault: Fault, before: int) -> None:
        self.world.wait(lambda: self.world.messages() > before, f"work to go on after fault {fault.number}")

    def _links(self, fault: Fault) -> list[TcpProxy]:
        return [self.world.links[device] for device in self._devices(fault)]

    @staticmethod
    def _devices(fault: Fault) -> tuple[str, ...]:
        return DEVICES if fault.target == BOTH else (fault.target,)

    def _return(self, links: Iterable[TcpProxy], before: Iterable[int], what: str) -> None:
        """Wait until every link had another connection."""
        pairs = list(zip(links, before, strict=True))
        self.world.wait(lambda: all(link.connections > count for link, count in pairs), what)

    # -- links

    def _partition(self, fault: Fault) -> None:
        links = self._links(fault)
        before = [link.connections for link in links]
        for link in links:
            link.weather.swallowed = {TO_SERVER, TO_DEVICE}
        for link, count in zip(links, before, strict=True):
            self._return([link], [count], "an attempt during a partition")
            link.weather.swallowed = set()

    def _half_open(self, fault: Fault) -> None:
        links, lost = self._links(fault), WAYS[int(fault.draw * len(WAYS))]
        before, swallowing = [link.connections for link in links], [link.swallowing for link in links]
        for link in links:
            link.weather.swallowed = lost
        pairs = list(zip(links, swallowing, strict=True))
        self.world.wait(lambda: all(link.swallowing > count for link, count in pairs), "bytes to vanish")
        for link in links:
            link.weather.swallowed = set()
        self._return(links, before, "a half-open link to be replaced")

    def _slow_link(self, fault: Fault) -> None:
        enough = self.world.messages() + 4
        for link in self._links(fault):
            link.weather.bytes_per_s = self.world.work.slow_bytes_per_s * (1 + 9 * fault.draw)
        self.world.wait(lambda: self.world.messages() >= enough, "messages over a slow link")
        for link in self._links(fault):
            link.weather.bytes_per_s = self.world.pace()

    def _reset(self, fault: Fault) -> None:
        for link in self._links(fault):
            link.drop(reset=True)

    def _close(self, fault: Fault) -> None:
        for link in self._links(fault):
            link.drop(reset=False)

    def _cut_handshake(self, fault: Fault) -> None:
        links = self._links(fault)
        before = [link.connections for link in links]
        for link, count in zip(links, before, strict=True):
            cut = Cut(after_bytes=int(100 + 5000 * fault.draw), reset=fault.draw < 0.5)
            link.weather.cut = lambda number, last=count + 1, cut=cut: cut if number <= last else None  # type: ignore[misc]
            link.drop()
        # One connection is cut, wherever that many bytes end, and another follows.
        self._return(links, [count + 1 for count in before], "a connection after the one that was cut")
        for link in links:
            link.weather.cut = lambda number: None

    def _refused(self, fault: Fault) -> None:
        links = self._links(fault)
        tries = int(3 * fault.draw)
        before = [link.connections + tries for link in links]
        for link in links:
            link.weather.refuses = True
            link.drop()
        self._return(links, before, "refused attempts")
        for link in links:
            link.weather.refuses = False

    # -- messages

    def _alter_message(self, fault: Fault) -> None:
        """The device comes back through the proxy that reads messages, and stays there until its next connection."""
        world, device = self.world, fault.target
        altered = world.altered[device]
        before = altered.done
        altered.arm(fault.kind, TO_SERVER if fault.draw < 0.5 else TO_DEVICE, int(fault.draw * 1000) % 4)
        world.set_upstream(device, altering=True)
        world.links[device].drop()
        world.wait(lambda: altered.done > before, f"a message to alter ({fault.kind})")
        world.set_upstream(device, altering=False)

    # -- processes

    def _kill_device(self, fault: Fault) -> None:
        for device in self._devices(fault):
            self.world.kill(device)

    def _kill_server(self, fault: Fault) -> None:
        began_s = time.monotonic()
        self.world.kill(SERVER)
        self._measure(fault, began_s)

    def _kill_torch(self, fault: Fault) -> None:
        world, began_s = self.world, time.monotonic()
        world.expect(SERVER, TRAINING_ERROR)
        if _send(world.children(SERVER), signal.SIGKILL):
            self._await_end(SERVER)
            self._measure(fault, began_s)

    def _kill_all(self, fault: Fault) -> None:
        began_s, children = time.monotonic(), self.world.children(SERVER)
        for name in (SERVER, *DEVICES):
            self.world.kill(name)
        _send(children, signal.SIGKILL)
        self._measure(fault, began_s)

    def _measure(self, fault: Fault, began_s: float) -> None:
        """Seconds until the first message that the new server has on record."""
        if not fault.hasty:
            before = self.world.messages()
            self._go_on(fault, before)
            if self.world.messages() > before:
                self.recovery_s.setdefault(fault.kind, []).append(time.monotonic() - began_s)

    def _await_end(self, name: str) -> None:
        """Wait for an end that is expected: another process is there, or none runs."""
        pid = self.world.pid(name)
        self.world.wait(lambda: self.world.pid(name) != pid or not self.world.is_running(name), f"the end of {name}")

    def _freeze_device(self, fault: Fault) -> None:
        world = self.world
        devices = [device for device in self._devices(fault) if world.is_running(device)]
        pids = [world.pid(device) for device in devices]
        _send(pids, signal.SIGSTOP)
        world.wait(
            lambda: not any(world.links[device].standing for device in devices), "a frozen device to be given up"
        )
        _send(pids, signal.SIGCONT)

    def _freeze_server(self, fault: Fault) -> None:
        world, links = self.world, list(self.world.links.values())
        before, pid = [link.connections for link in links], world.pid(SERVER)
        _send([pid], signal.SIGSTOP)
        world.wait(
            lambda: any(link.connections > count for link, count in zip(links, before, strict=True)),
            "a frozen server to be given up",
        )
        _send([pid], signal.SIGCONT)

    # -- disks

    def _full_disk_of_device(self, fault: Fault) -> None:
        self._fill({device: [self.world.pid(device)] for device in self._devices(fault)}, DEVICE_ERROR)

    def _full_disk_of_server(self, fault: Fault) -> None:
        pids = [self.world.pid(SERVER), *self.world.children(SERVER)]
        self._fill({SERVER: pids}, TRAINING_ERROR, USAGE_ERROR)

    def _fill(self, programs: dict[str, list[int]], *codes: int) -> None:
        """No file of these processes can grow until they end, or as many messages went by as they could do without."""
        world, enough = self.world, self.world.messages() + 12
        pids = {name: world.pid(name) for name in programs}
        for name, each in programs.items():
            world.expect(name, *codes)
            _limit_files(each, 0)
        ended = lambda name: world.pid(name) != pids[name] or not world.is_running(name)  # noqa: E731
        world.wait(lambda: all(map(ended, programs)) or world.messages() >= enough, "a full disk to be noticed")
        for each in programs.values():
            _limit_files(each, resource.RLIM_INFINITY)

    def _rotten_file_of_device(self, fault: Fault) -> None:
        for device in self._devices(fault):
            self.world.kill(device)
            state = self.world.root / "state" / device
            files = [*state.glob("spool/adapt/*.segment"), *state.glob("parts/*.safetensors")]
            spoil(files, fault.draw)

    def _rotten_file_of_server(self, fault: Fault) -> None:
        run = self._kill_quietly()
        spoil([*run.glob("tensors/*/*/*.safetensors"), *run.glob("checkpoints/*"), *run.glob("journal/*")], fault.draw)

    def _rotten_ledger(self, fault: Fault) -> None:
        ledger = self._kill_quietly() / "state.sqlite"
        if ledger.exists():
            with ledger.open("r+b") as stream:
                stream.write(bytes(LEDGER_HEAD_BYTES))
            for side in ("-wal", "-shm"):  # else the head comes back from there
                ledger.with_name(ledger.name + side).unlink(missing_ok=True)

    def _kill_quietly(self) -> Path:
        """Kill the server with what it started, and nobody writes any more; its run directory."""
        children = self.world.children(SERVER)
        self.world.kill(SERVER)
        _send(children, signal.SIGKILL)
        return self.world.root / "runs" / "chaos"


def _send(pids: Iterable[int], number: signal.Signals) -> int:
    """How many processes were there to get the signal."""
    sent = 0
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            sent += 1
    return sent


def _limit_files(pids: Iterable[int], size_bytes: int) -> None:
    """Bytes that files of these processes may have; those of ours only."""
    for pid in pids:
        with suppress(ProcessLookupError):
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size_bytes, hard))


def spoil(files: list[Path], draw: float) -> None:
    """Flip some bytes of one of the files, or cut its end off; `draw` from 0 to 1 says which and where."""
    if not files:
        return
    path = sorted(files)[int(draw * len(files))]
    data = bytearray(path.read_bytes())
    place = int((draw * 7919) % 1 * len(data))
    if (draw * 104729) % 1 < 0.5:
        data[place : place + FLIPPED_BYTES] = bytes(each ^ 0xFF for each in data[place : place + FLIPPED_BYTES])
    else:
        del data[place:]
    path.write_bytes(data)
