"""The product's device program with a stand-in for images and engine: its client, conduct, delivery and spool.

It imports what edge-run imports, so that its memory is edge-run's; with `--engine` it also loads a frontend.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

import edge_runtime.run  # noqa: F401  all that edge-run imports
from contract.console import run_command, say
from contract.messages import Ask, Features, Gradient, Message
from contract.tokens import TokenLayout
from edge_runtime.client import Client
from edge_runtime.conduct import Conduct
from edge_runtime.delivery import Delivery
from edge_runtime.dialling import Endpoint
from edge_runtime.engines import open_engine
from edge_runtime.identity import read_identity
from edge_runtime.pipeline import samples_per_batch
from edge_runtime.reconnect import Backoff
from edge_runtime.spool import Spool
from edge_runtime.terms import ASKS_OF_MODE, Terms
from edge_runtime.worker import Counters, Upload
from tools.bench_wire_trace import DEVICE, Trace

LAYOUT = TokenLayout(1, (14, 14), 1024)  # as the server's


class Answers:
    """Instead of `worker.Worker`: answers of the right sizes that cost next to nothing to make."""

    def __init__(self, upload_bytes: int) -> None:
        self.counters = Counters()
        self.samples = range(-(-upload_bytes // (LAYOUT.count * LAYOUT.dim)))

    def answer(self, ask: Ask, run: str, upload: Upload) -> Iterator[Message]:
        self.counters.steps += 1
        if ask.kind == "score_batch":
            logits = ask.tensors["logits"]
            yield Gradient(ask.ask, 1.0, 0, len(logits), -logits)
        else:
            yield from self._features(upload)

    def _features(self, upload: Upload) -> Iterator[Features]:
        total, size = len(self.samples), self.batch_size(upload)
        codes = np.frombuffer(os.urandom(size * LAYOUT.count * LAYOUT.dim), np.int8)
        codes = codes.reshape(size, LAYOUT.count, LAYOUT.dim)
        for start in range(upload.first_batch * size, total, size):
            count = min(size, total - start)
            numbers = np.arange(start, start + count, dtype="<u8")
            ids = np.stack([numbers, numbers], axis=1).view(np.uint8).reshape(count, 16)
            sources = np.zeros((count, LAYOUT.patches), np.uint16)
            yield Features(upload.ask, start // size, total, "train", ids, codes[:count], sources, None)

    def batch_size(self, upload: Upload) -> int:
        return samples_per_batch(LAYOUT, True, upload.frame_bytes)

    def fingerprint(self, upload: Upload) -> str:
        return "bench"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", required=True)
    parser.add_argument("--name", required=True)
    for name in ("keys", "state"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--upload-bytes", type=int, required=True)
    parser.add_argument("--engine", type=Path, help="a frontend to load with onnxruntime")
    parser.add_argument("--trace", type=Path)
    options = parser.parse_args()
    trace = Trace(DEVICE) if options.trace else None
    engine = open_engine("onnxruntime", options.engine, 1) if options.engine else None
    asyncio.run(converse(options))
    if trace is not None:
        trace.write(options.trace)
    del engine  # it was there all the time
    return 0


async def converse(options: argparse.Namespace) -> None:
    stop, thread_stop = asyncio.Event(), threading.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    folder = options.keys / "devices" / options.name
    identity = read_identity(options.name, folder / "device.key")
    terms = Terms("0" * 64, 2, "0" * 64, "logit-gradient", 1.0, 1.0, 0.0, ASKS_OF_MODE["logit-gradient"])
    spool = Spool(options.state / "spool", say)
    conduct = Conduct(identity, terms, "adapt", spool)
    answers = Answers(options.upload_bytes)
    delivery = Delivery(answers, spool, lambda: None, None, thread_stop)  # type: ignore[arg-type]
    endpoint = Endpoint(options.server, folder / "ca.pem", datetime.now(timezone.utc))
    await Client(endpoint, conduct, delivery, Backoff(random.Random(0)), say).run(stop, once=False)
    delivery.close()


if __name__ == "__main__":
    sys.exit(run_command(main))
