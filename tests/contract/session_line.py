"""A device and a server over connections that break: frames in flight are lost, and so is what was not yet stored."""

from __future__ import annotations

import dataclasses

import numpy as np

from contract.messages import Ask, Features
from contract.session import Acknowledged, Event, Received, Role
from tests.contract.session_pair import HELLO, WELCOME, pair

DEVICE, SERVER = Role.DEVICE, Role.SERVER
ASK = Ask("a-1", "collect_features", {"kappa": 1.0, "seed": 1}, 60.0)
RESUME = dataclasses.replace(HELLO, session=WELCOME.session)


def features(batch: int = 0, dim: int = 4) -> Features:
    """Features of one sample; `dim` above 13,000 makes them larger than the smallest frame."""
    codes = np.zeros((1, 5, dim), np.int8)
    return Features("a-1", batch, 100, "train", np.zeros((1, 16), np.uint8), codes, None, None)


class Device:
    """What a device keeps over connections: its spool."""

    def __init__(self) -> None:
        self.made = 0
        self.spool: dict[int, Features] = {}
        self.received_seq = 0
        self.resumes = False
        self.asks: list[str] = []

    def drop(self, seq: int) -> None:
        """Forget what the server has stored."""
        self.spool = {number: message for number, message in self.spool.items() if number > seq}


class Site:
    """What a server keeps over connections: what it stored, in order."""

    def __init__(self) -> None:
        self.stored: list[tuple[int, int]] = []
        self.asked = 0


class Line:
    """One connection between them; frames in flight are lost when it is cut."""

    def __init__(self, device: Device, site: Site, frame_bytes: int, credit: int) -> None:
        self.kept, self.site = device, site
        hello = dataclasses.replace(RESUME if device.resumes else HELLO, last_seq=device.received_seq)
        stored = site.stored[-1][0] if site.stored and device.resumes else 0
        welcome = dataclasses.replace(WELCOME, last_seq=stored, frame_bytes=frame_bytes, credit=credit)
        self.pair = pair(hello=hello, welcome=welcome, device_next_seq=device.made + 1)
        device.resumes = True
        self.flying: dict[Role, list[bytes]] = {DEVICE: [], SERVER: []}
        self.unstored: list[Received] = []
        self.sent = stored  # by the device on this connection
        device.drop(stored)

    def pump(self) -> None:
        """The device sends what its spool holds, as far as credit goes."""
        while self.pair.device.credit and self.sent < self.kept.made:
            self.sent += 1
            assert self.pair.device.send(self.kept.spool[self.sent], self.sent) == self.sent

    def fly(self, sender: Role, count: int) -> None:
        """Bring `count` frames to the other side; the others stay on their way."""
        session = self.pair.side(sender)
        self.flying[sender] += session.frames_to_send()
        arrived, self.flying[sender] = self.flying[sender][:count], self.flying[sender][count:]
        for frame in arrived:
            for event in (self.pair.server if sender is DEVICE else self.pair.device).receive(frame, 0.0):
                self.take(sender, event)

    def take(self, sender: Role, event: Event) -> None:
        """What both programs do with an event; the server only remembers features until `store`."""
        if isinstance(event, Acknowledged) and sender is SERVER:
            self.kept.drop(event.seq)
        elif isinstance(event, Received) and isinstance(event.message, Features):
            self.unstored.append(event)
        elif isinstance(event, Received) and isinstance(event.message, Ask):
            assert event.seq == self.kept.received_seq + 1
            self.kept.received_seq = event.seq
            self.kept.asks.append(event.message.ask)
            self.pair.device.stored(event.seq)

    def store(self, count: int) -> None:
        """The server makes some of what it received durable."""
        for event in self.unstored[:count]:
            assert isinstance(event.message, Features)
            self.site.stored.append((event.seq, event.message.batch))
            self.pair.server.stored(event.seq)
        del self.unstored[:count]


def run(script: list[tuple[str, int]], credit: int) -> None:
    """Play a script of (action, value), then let the line hold: all that was made is stored once and in order."""
    device, site = Device(), Site()
    line = Line(device, site, 1 << 20, credit)
    for action, value in script:
        if action == "make":
            device.made += 1
            device.spool[device.made] = features(device.made, dim=value)
        elif action == "up":
            line.pump()
            line.fly(DEVICE, value)
        elif action == "store":
            line.store(value)
        elif action == "down":
            line.fly(SERVER, value)
        elif action == "ask" and line.pair.server.credit:
            site.asked += 1
            line.pair.server.send(dataclasses.replace(ASK, ask=f"a-{site.asked}"))
        elif action == "cut":
            line = Line(device, site, value, credit)
    for _ in range(2 * device.made + 2):  # then the line holds
        line.pump()
        line.fly(DEVICE, 1000)
        line.store(1000)
        line.fly(SERVER, 1000)
    assert site.stored == [(number, number) for number in range(1, device.made + 1)]
    assert device.spool == {}
    assert device.asks == sorted(set(device.asks), key=lambda name: int(name[2:]))
