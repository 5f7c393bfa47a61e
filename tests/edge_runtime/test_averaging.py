"""The averaging attack (algorithms X1): what a server gains by collecting the uploads of one image again and again.

Keyed noise: each repeat is the same release, also after a restart and for an inference. Fresh noise is the control.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from contract.messages import Features, Message, Scores
from contract.tokens import dequantize, wire_steps
from tests.edge_runtime.fake_package import LAYOUT, Package, write_device, write_images, write_package
from tests.edge_runtime.memory_server import MemoryServer
from tests.edge_runtime.test_conduct import Line, collecting

REPEATS = 8


def uploads(root: Path, package: Package, images: Path, noise: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Dequantized uploads (n, T, d) of one device started REPEATS times, half of them to infer; and clean tokens."""
    config = write_device(root, package, images, noise=noise, max_releases=2 * REPEATS, alpha=0.0)
    secret = root / "state" / "identity" / "device_secret"
    secret.parent.mkdir(parents=True)
    secret.write_bytes(bytes(range(32)))  # else every run of the test would draw other noise
    steps = wire_steps(package.manifest.cuts[0].statistics, 1.0)
    received = []
    for repeat in range(REPEATS):
        purpose = "infer" if repeat % 2 else "adapt"
        line = collecting(Line(root, config, package, purpose, session=f"s{repeat}", run=f"run-{repeat}"))
        if purpose == "infer":
            line.server.on_open = lambda server: None
            line.server.on_message = answer
        line.run()
        (batch,) = line.server.stored.values()
        order = np.argsort([row.tobytes() for row in batch.sample_ids])
        received.append(dequantize(batch.codes[order], steps, LAYOUT.prefix).astype(np.float64))
        samples = sorted(line.equipment.dataset.samples, key=lambda sample: sample.sample_id)
        clean = np.concatenate([line.equipment.worker._bench.frontend.tokens([sample]) for sample in samples])
        line.equipment.remember_site()
        line.close()
    return received, clean


def answer(server: MemoryServer, message: Message) -> None:
    if isinstance(message, Features):
        scores = np.zeros((len(message.sample_ids), 3), np.float32)
        server.session.send(Scores(message.ask, message.batch, scores))


def error_db(estimate: np.ndarray, clean: np.ndarray) -> float:
    return float(10 * np.log10(np.mean((estimate - clean) ** 2)))


@pytest.mark.parametrize("noise, gain_db", [("keyed", (0.0, 0.0)), ("fresh", (7.5, 10.5))])
def test_averaging_repeats_gains_nothing_with_keyed_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noise: str, gain_db: tuple[float, float]
) -> None:
    draws = itertools.count()
    monkeypatch.setattr("edge_runtime.run.secrets.token_hex", lambda size: f"{next(draws):0{2 * size}x}")
    package = write_package(tmp_path / "front")
    images = write_images(tmp_path / "images", {"a": 4, "b": 4, "c": 4})
    received, clean = uploads(tmp_path, package, images, noise)
    assert noise == "fresh" or all((each == received[0]).all() for each in received)  # bit for bit
    gained_db = error_db(received[0], clean) - error_db(np.mean(received, axis=0), clean)
    print(f"\naveraging {REPEATS} uploads of {noise} noise gains {gained_db:.2f} dB")
    least, most = gain_db  # 8 independent draws: 9 dB
    assert least <= round(gained_db, 6) <= most
