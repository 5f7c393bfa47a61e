"""Packages as an attacker opens them: what devices really send, and folders that are none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from contract.errors import PackageError, UsageError
from contract.image_folder import scan
from contract.images import load_pixels, pixel_digest, resize
from contract.keyed_noise import derive_key
from contract.manifest import Cut
from contract.tokens import dequantize
from edge_runtime.transforms.laplace import FeatureNoise, NoiseKeying, noise_kind
from server_runtime import backend_folder
from server_runtime.leakage.package import Package, Runner, client_of, read_package, release


@pytest.fixture(scope="module")
def exports() -> Path:
    given = os.environ.get("CUTLAYER_TEST_PACKAGE")
    if given is None:
        pytest.skip("packages are made by tests.make_package: run tools/test, or set CUTLAYER_TEST_PACKAGE")
    return Path(given)


def pictures(exports: Path, package: Package) -> tuple[np.ndarray, list[bytes]]:
    upright = [load_pixels(file.path, file.relative) for file in scan(exports / "public", None).images[:6]]
    return np.stack([resize(each, package.image) for each in upright]), [pixel_digest(each) for each in upright]


def run(package: Package, place: int, pixels: np.ndarray, alpha: float = 0.0) -> np.ndarray:
    return Runner(package, package.splits[place], alpha, b"key").tokens(pixels, lambda done: None)


def test_an_upload_is_what_a_device_sends_bit_for_bit(exports: Path) -> None:
    package = read_package(exports / "front")
    split = package.splits[0]
    assert isinstance(split.cut, Cut) and split.unit == "kappa"
    pixels, digests = pictures(exports, package)
    tokens = run(package, 0, pixels)
    upload = release(package, split, split.law, 0.5, 0.1, tokens, digests, b"secret")
    keying = NoiseKeying(b"secret", package.digest, split.index, noise_kind(0.1, None), 0.5)
    noise = FeatureNoise(split.cut, keying)
    for row, digest in enumerate(digests):
        codes, _ = noise.release(tokens[row].astype(np.float32), digest)
        _, steps = split.law.rows(0.5)
        assert steps is not None
        assert (upload.received[row].numpy() == dequantize(codes, steps, split.law.layout.prefix)).all()


def test_weight_noise_moves_the_features(exports: Path) -> None:
    package = read_package(exports / "front")
    pixels, _ = pictures(exports, package)
    plain, noised = run(package, 0, pixels), run(package, 0, pixels, alpha=0.1)
    moved = np.linalg.norm(noised.astype(float) - plain) / np.linalg.norm(plain.astype(float))
    assert 0.02 < moved < 1.0
    assert (run(package, 0, pixels) == plain).all()


@pytest.mark.parametrize("name", ["front", "vgg", "parts"])
def test_the_servers_float_module_makes_the_same_tokens(exports: Path, name: str) -> None:
    package = read_package(exports / name)
    pixels, _ = pictures(exports, package)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255.0
    folder = backend_folder.read(exports / f"{name}.backend")
    for place, split in enumerate(package.splits):
        client = client_of(package, split, folder)
        with torch.no_grad():
            wanted = client(images).numpy()
        found = run(package, place, pixels).astype(np.float32)
        assert found.shape == wanted.shape == (6, split.law.layout.count, split.law.layout.dim)
        assert np.linalg.norm(found - wanted) < 0.05 * np.linalg.norm(wanted)


def test_noise_on_parts_has_the_strength_as_its_deviation(exports: Path) -> None:
    package = read_package(exports / "vgg")
    split = package.splits[0]
    assert split.unit == "sigma"
    tokens = np.zeros((4, split.law.layout.count, split.law.layout.dim), np.float16)
    digests = [derive_key(b"image", row) for row in range(4)]
    received = release(package, split, split.law, 1.5, 0.0, tokens, digests, b"secret").received
    assert float(received.std()) == pytest.approx(1.5, rel=0.02)
    kurtosis = float((received**4).mean() / (received**2).mean() ** 2)
    assert kurtosis == pytest.approx(6.0, rel=0.15)  # Laplace


def test_a_changed_file_is_named(exports: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exports / "front", tmp_path / "front"))
    with (folder / "front.onnx").open("r+b") as file:
        file.seek(1000)
        file.write(b"?")
    with pytest.raises(PackageError, match=r"front\.onnx is not the file that the manifest lists"):
        read_package(folder)
    (folder / "front.onnx").unlink()
    with pytest.raises(PackageError, match=r"lacks front\.onnx"):
        read_package(folder)


def test_a_folder_that_is_no_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no package"):
        read_package(tmp_path)


def test_a_whole_model_sends_no_features(exports: Path) -> None:
    with pytest.raises(UsageError, match="sends no features"):
        read_package(exports / "whole")


def test_a_backend_of_another_package_is_refused(exports: Path) -> None:
    package = read_package(exports / "front")
    with pytest.raises(PackageError, match="belongs to another package"):
        client_of(package, package.splits[0], backend_folder.read(exports / "parts.backend"))
