"""A signed package for the fake engine, a folder of pictures, and a device's settings: a whole run without onnx."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors.numpy import save

from contract import manifest as manifests
from contract.images import ImageRule, normalise
from contract.manifest import Cut, EngineNeeds, FileRecord, Manifest, Quantization, TransformRules, WeightRecord
from contract.signature import PrivateKey, generate, key_id, save_private, save_public, sign
from contract.tokens import Statistics, TokenLayout
from edge_runtime.config import DeviceConfig, device_config
from edge_runtime.engines.fake import open_model

SIZE, GRID, PREFIX, DIM = 16, (2, 2), 1, 8
LAYOUT = TokenLayout(PREFIX, GRID, DIM)
INPUTS = 3 * (SIZE // GRID[0]) * (SIZE // GRID[1])  # values of a patch
IMAGE = ImageRule(SIZE, SIZE, "bicubic", 1.0, "center", (0.5,) * 3, (0.5,) * 3, "white", 1_000_000)
PUBLISHER = PrivateKey.from_private_bytes(bytes(range(32)))  # always the same key: digests key the noise


def fake_model(delay_s: float = 0.0, seed: int = 0) -> tuple[bytes, WeightRecord]:
    """The bytes of a fake model and where its weights lie in them."""
    rng = np.random.default_rng(seed)
    fields = {"prefix": PREFIX, "grid": GRID, "size": [SIZE, SIZE], "dim": DIM, "delay_s": delay_s}
    header = json.dumps(fields).encode() + b"\n"
    codes = np.clip(np.rint(rng.normal(0, 40, (INPUTS, DIM))), -127, 127).astype(np.int8)
    scales = np.full(DIM, 0.01, np.float32)
    record = WeightRecord("linear", (INPUTS, DIM), 1, len(header), len(header) + codes.size, None, None)
    return header + codes.tobytes() + scales.tobytes(), record


@dataclass(frozen=True)
class Package:
    """A package folder and what tests compare with."""

    folder: Path
    manifest: Manifest
    digest: bytes


def write_package(
    folder: Path, *, version: int = 1, delay_s: float = 0.0, seed: int = 0, contents: dict[str, bytes] | None = None,
    more: dict[str, bytes] | None = None, **changes: object,
) -> Package:  # fmt: skip
    """Write a whole, signed package; `contents` are files instead of the frontend's, `more` beside them, `changes`
    replace fields of the manifest."""
    model, record = fake_model(delay_s, seed)
    pixels = np.random.default_rng(1).integers(0, 256, (4, SIZE, SIZE, 3), dtype=np.uint8)
    tokens = open_model(fake_model(0.0, seed)[0], 1).run(normalise(pixels, IMAGE))
    files = {"front.onnx": model, "golden.safetensors": save({"pixels": pixels, "tokens": tokens})}
    files = (files if contents is None else contents) | (more or {})
    patches = tokens[:, PREFIX:]
    statistics = Statistics(
        *(tuple(map(float, part.std(axis=(0, 1)))) for part in (tokens[:, :PREFIX], patches)),
        *(tuple(map(float, np.abs(part).max(axis=(0, 1)))) for part in (tokens[:, :PREFIX], patches)),
    )
    cut = Cut(1, 2, "front.onnx", "images", "tokens", (3, SIZE, SIZE), 1000, LAYOUT, statistics, (record,))
    records = tuple(FileRecord(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items())
    manifest = Manifest(
        format=manifests.FORMAT,
        name="tiny",
        version=version,
        model="fake",
        family="vit",
        cuts=(cut,),
        image=IMAGE,
        quantization=Quantization("w8a8", ("test",), 1.0, (), None, 1.0, False),
        engine=EngineNeeds(20, 10, "1.19"),
        transforms=TransformRules(0.1, 1.0, 2.0, True),
        label_modes=("permuted-label", "logit-gradient", "client-head"),
        classes=None,
        files=records,
        signer=key_id(PUBLISHER.public_key()),
        created="2026-11-02T00:00:00Z",
    )
    manifest = dataclasses.replace(manifest, **changes)  # type: ignore[arg-type]
    data = manifests.to_bytes(manifest)
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / manifests.MANIFEST_NAME).write_bytes(data)
    (folder / manifests.SIGNATURE_NAME).write_bytes(sign(PUBLISHER, data))
    return Package(folder, manifest, manifests.digest(data))


def write_images(root: Path, counts: dict[str, int], seed: int = 0) -> Path:
    """Random pictures, one folder per class; the class "" is the root itself."""
    rng = np.random.default_rng(seed)
    for name, count in counts.items():
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = rng.integers(0, 256, (SIZE + number % 3, SIZE, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{name or 'loose'}_{number}.png")
    return root


def write_device(
    root: Path, package: Package, data: Path, server: str = "ws://127.0.0.1:1", **changes: object
) -> DeviceConfig:
    """A device's keys and settings; its key is enrolled by whoever reads `root/device.pub`."""
    root.mkdir(parents=True, exist_ok=True)
    if not (root / "device.pem").exists():
        key = generate()
        save_private(root / "device.pem", key)
        save_public(root / "device.pub", key.public_key())
        save_public(root / "publisher.pub", PUBLISHER.public_key())
    values: dict[str, object] = {
        "engine": str(package.folder / "front.fake"),
        "data": data,
        "server": server,
        "trust": root / "publisher.pub",
        "ca": None,
        "key": root / "device.pem",
        "name": "pi-1",
        "state": root / "state",
        "site_secret": None,
        "classes": None,
        "label_mode": "permuted-label",
        "noise": "keyed",
        "alpha": None,
        "kappa_floor": None,
        "max_releases": 1,
        "threads": 1,
    }
    return device_config(values | changes)
