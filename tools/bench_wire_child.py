"""Stands in for the torch process: asks devices at the pipe's far end and times until their answers are here.

Everything between the two ends of an exchange is the product's. Orders come from `bench_wire` (see
`bench_wire_control`); the times at the socket process's end of the pipe come with the answers (`bench_wire_server`).
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np

from contract.messages import Ask, Gradient
from server_runtime import pipe
from server_runtime.pipe import PipeFrame, Unpacker
from tools.bench_wire_control import Order

CLASSES = 1000  # columns of the logits: 4,000 bytes a row
IDLE_PROGRESS_S = 60.0
_READ_BYTES = 1 << 20


class Pipe:
    """Both ends of the pipe that the socket process gave this one."""

    def __init__(self) -> None:
        for end in (sys.stdin, sys.stdout):  # as the torch process does
            pipe.widen(end.fileno())
        self._out = os.fdopen(sys.stdout.fileno(), "wb", closefd=False)
        self._frames = self._read()

    def _read(self) -> Iterator[PipeFrame]:
        unpacker = Unpacker()
        while data := os.read(sys.stdin.fileno(), _READ_BYTES):
            yield from unpacker.feed(data)

    def send(self, frame: PipeFrame) -> None:
        for part in pipe.parts(frame):
            self._out.write(part)
        self._out.flush()

    def next(self, *kinds: str) -> PipeFrame:
        """The next frame of one of these kinds; others are passed over."""
        for frame in self._frames:
            if frame.kind == pipe.STOP:
                raise SystemExit(0)
            if frame.kind in kinds:
                return frame
        raise SystemExit(0)


class Asker:
    """Obeys the orders."""

    def __init__(self, stream: Pipe) -> None:
        self._pipe = stream
        self._site = ""
        self._run = ""
        self._count = 0

    def start(self) -> str:
        """Take the first frame, say that the backend is ready; returns where the orders come from."""
        start = self._pipe.next(pipe.START)
        self._site, self._run = str(start.values["site"]), str(start.values["run"])
        self._pipe.send(PipeFrame(pipe.READY))
        return start.text

    def obey(self, order: Order) -> Order:
        if order["do"] == "join":
            return self._wait_for_devices(order["devices"])
        if order["do"] == "exchange":
            return self._exchange(order["devices"], order["size_bytes"], order["count"])
        return self._collect(order["devices"])

    def _wait_for_devices(self, devices: Sequence[str]) -> Order:
        missing = set(devices)
        while missing:
            missing.discard(self._pipe.next(pipe.JOINED).device)
        return {}

    def _exchange(self, devices: Sequence[str], size_bytes: int, count: int) -> Order:
        """`count` times: ask all devices at once, wait for all of their gradients."""
        rows = size_bytes // (4 * CLASSES)
        logits = np.random.default_rng(0).standard_normal((rows, CLASSES), np.float32)
        tensors = {"logits": logits, "sample_ids": np.zeros((rows, 16), np.uint8)}
        whole_s, boundary_s, received_bytes = [], [], 0
        for _ in range(count):
            message = Ask(self._next_ask(), "score_batch", {"split": "train"}, IDLE_PROGRESS_S, tensors)
            started_s = time.perf_counter()
            for device in devices:
                self._pipe.send(pipe.carry(self._site, device, message))
            for _ in devices:
                frame = self._pipe.next(pipe.MESSAGE)
                boundary_s.append(float(frame.values["boundary_s"] or 0))
                answer = pipe.carried(frame)
                assert isinstance(answer, Gradient) and answer.ask == message.ask
                received_bytes += answer.gradient.nbytes
            whole_s.append(time.perf_counter() - started_s)
        return {"boundary_s": boundary_s, "whole_s": whole_s, "received_bytes": received_bytes}

    def _collect(self, devices: Sequence[str]) -> Order:
        """Ask all devices for their features; until all of them are stored for good."""
        message = Ask(self._next_ask(), "collect_features", {"kappa": 1.0, "seed": 0}, IDLE_PROGRESS_S)
        started_s = time.perf_counter()
        for device in devices:
            self._pipe.send(pipe.carry(self._site, device, message))
        waiting, batches = set(devices), 0
        while waiting:
            frame = self._pipe.next(pipe.STORED)
            batches += 1
            if frame.values["complete"]:
                waiting.discard(frame.device)
        return {"whole_s": [time.perf_counter() - started_s], "batches": batches}

    def _next_ask(self) -> str:
        self._count += 1
        return f"{self._run}.{self._count}"


def main() -> None:
    asker = Asker(Pipe())
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(asker.start())
    stream = connected.makefile("rw")
    for line in stream:
        stream.write(json.dumps(asker.obey(json.loads(line))) + "\n")
        stream.flush()


if __name__ == "__main__":
    main()
