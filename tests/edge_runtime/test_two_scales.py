"""The subtraction attack: a server that gets one image's features at two noise scales.

With one draw z at both scales, x + k1 z and x + k2 z give x by subtraction. Here the scale keys the draw, so that the
attacker's best is the weighted mean of two independent ones; and the device's config decides whether there is a second.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from contract.keyed_noise import noise_key
from contract.tokens import dequantize, wire_steps
from tests.edge_runtime.fake_package import LAYOUT, Package, write_device, write_images, write_package
from tests.edge_runtime.test_averaging import error_db
from tests.edge_runtime.test_conduct import Line, collecting

STRONG, WEAK = 1.0, 0.5


def upload(root: Path, package: Package, images: Path, kappa: float) -> tuple[np.ndarray, np.ndarray]:
    """Dequantized upload (n, T, d) of the device at one scale, and its clean tokens."""
    config = write_device(root, package, images, kappa_floor=WEAK, max_releases=2, alpha=0.0)
    secret = root / "state" / "identity" / "device_secret"
    secret.parent.mkdir(parents=True, exist_ok=True)
    secret.write_bytes(bytes(range(32)))
    line = collecting(Line(root, config, package, session=f"s{kappa}", run=f"run-{kappa}", kappa=kappa))
    line.server.on_open = lambda server: server.ask_features(kappa)
    line.run()
    (batch,) = line.server.stored.values()
    order = np.argsort([row.tobytes() for row in batch.sample_ids])
    steps = wire_steps(package.manifest.cuts[0].statistics, kappa)
    received = dequantize(batch.codes[order], steps, LAYOUT.prefix).astype(np.float64)
    samples = sorted(line.equipment.dataset.samples, key=lambda sample: sample.sample_id)
    clean = np.concatenate([line.equipment.worker._bench.frontend.tokens([sample]) for sample in samples])
    line.close()
    return received, clean


@pytest.mark.parametrize("keyed", [True, False], ids=["scale in the key", "control: one draw"])
def test_two_scales_of_an_image_do_not_give_it_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keyed: bool
) -> None:
    if not keyed:
        monkeypatch.setattr(
            "edge_runtime.transforms.laplace.noise_key",
            lambda secret, digest, package, cut, kind, scale: noise_key(secret, digest, package, cut, kind, 1.0),
        )
    package = write_package(tmp_path / "front")
    images = write_images(tmp_path / "images", {"a": 4, "b": 4, "c": 4})
    strong, clean = upload(tmp_path, package, images, STRONG)
    weak, _ = upload(tmp_path, package, images, WEAK)
    subtracted = (STRONG * weak - WEAK * strong) / (STRONG - WEAK)
    shares = np.array([WEAK**2, STRONG**2]) / (STRONG**2 + WEAK**2)  # inverse variances
    averaged = shares[0] * strong + shares[1] * weak
    alone_db = error_db(weak, clean)
    estimates = {"by subtraction": subtracted, "by mean": averaged}
    gained = {name: alone_db - error_db(each, clean) for name, each in estimates.items()}
    print(f"\na second scale gains {gained}, in dB")
    if keyed:
        assert gained["by subtraction"] < 0.0
        # Two independent draws in the best mixture: 10 log10(1 + (0.5 / 1)^2) = 1.0 dB.
        assert 0.5 < gained["by mean"] < 1.6
    else:
        assert gained["by subtraction"] > 10.0  # what is left is the rounding of the wire
