"""A fake package with linear decoders, learnt here on smooth pictures: a real attacker, if a weak one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from contract.images import normalise
from contract.manifest import Cut
from contract.preview import Decoder
from contract.tokens import add_noise, noise_scales, quantize, wire_steps
from edge_runtime.engines.fake import open_model
from tests.edge_runtime.fake_package import IMAGE, LAYOUT, PREFIX, SIZE, Package, fake_model, write_package
from tests.edge_runtime.onnx_bytes import linear_decoder

KAPPAS = (1.0, 2.0)  # the fake package's default and its ceiling


def smooth_pictures(count: int, seed: int) -> np.ndarray:
    """(n, h, w, 3) uint8."""
    coarse = np.random.default_rng(seed).integers(0, 256, (count, 3, 3, 3), dtype=np.uint8)
    return np.stack([np.asarray(Image.fromarray(each).resize((SIZE, SIZE), Image.BICUBIC)) for each in coarse])


def write_pictures(folder: Path, count: int = 3, seed: int = 9) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"picture_{number}.png" for number in range(count)]
    for path, pixels in zip(paths, smooth_pictures(count, seed), strict=True):
        Image.fromarray(pixels).save(path)
    return paths


def learn(cut: Cut, kappa: float) -> bytes:
    """A ridge from all codes of an image to all its values."""
    pixels = smooth_pictures(600, 1)
    tokens = open_model(fake_model()[0], 1).run(normalise(pixels, IMAGE))
    noise = np.random.default_rng(2).laplace(size=tokens.shape).astype(np.float32)
    noisy = add_noise(tokens, noise, noise_scales(cut.statistics, kappa), PREFIX)
    codes, _ = quantize(noisy, wire_steps(cut.statistics, kappa), PREFIX)
    x = codes.reshape(len(codes), -1).astype(np.float64)
    y = pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1) / 255.0
    mean_x, mean_y = x.mean(axis=0), y.mean(axis=0)
    gram = (x - mean_x).T @ (x - mean_x)
    weight = np.linalg.solve(
        gram + 0.01 * np.trace(gram) / len(gram) * np.eye(len(gram)), (x - mean_x).T @ (y - mean_y)
    )
    return linear_decoder((LAYOUT.count, LAYOUT.dim), weight, mean_y - mean_x @ weight, (SIZE, SIZE))


def write_previewed(folder: Path, kappas: tuple[float, ...] = KAPPAS, **changes: object) -> Package:
    """The fake package with a decoder for each of `kappas`."""
    cut = write_package(folder.with_name(folder.name + ".plain")).manifest.cuts[0]
    records = tuple(
        Decoder(f"decoder.kappa-{kappa:g}.onnx", cut.index, kappa, 0.1, 0, 600, 9, 15.0, 0.5, 15.0, 11.0, 0.25)
        for kappa in kappas
    )
    files = {record.onnx: learn(cut, record.kappa) for record in records}
    return write_package(folder, more=files, preview=records, **changes)
