from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from contract.manifest import WeightRecord
from contract.onnx_weights import noised_onnx
from contract.tokens import SentRule, dequantize, kept_patches, noise_scales, retrieval_sources, wire_steps
from edge_runtime.engines import open_engine
from edge_runtime.transforms.laplace import FeatureNoise, NoiseKeying, noise_kind
from edge_runtime.transforms.patch_retrieval import retrieve
from edge_runtime.transforms.weight_noise import keys_of, noise_file, noise_frontend
from tests.edge_runtime.fake_package import DIM, LAYOUT, write_package
from tests.edge_runtime.onnx_bytes import quantized_model

KEYS = keys_of(bytes(range(32)), bytes(32))


def layers() -> tuple[bytes, list[WeightRecord]]:
    """Two layers scattered over a file; the second with shift and bias."""
    rng = np.random.default_rng(0)
    parts = {
        "head": b"header bytes",
        "codes_b": rng.integers(-100, 100, (6, 5), dtype=np.int8).tobytes(),
        "scales_a": rng.uniform(0.01, 0.1, 4).astype("<f4").tobytes(),
        "bias_b": rng.normal(size=5).astype("<f4").tobytes(),
        "codes_a": rng.integers(-100, 100, (3, 4), dtype=np.int8).tobytes(),
        "shift_b": rng.normal(size=6).astype("<f4").tobytes(),
        "scales_b": rng.uniform(0.01, 0.1, 5).astype("<f4").tobytes(),
        "tail": b"trailer",
    }
    at = {name: sum(len(each) for each in list(parts.values())[:index]) for index, name in enumerate(parts)}
    records = [
        WeightRecord("a", (3, 4), 1, at["codes_a"], at["scales_a"], None, None),
        WeightRecord("b", (6, 5), 1, at["codes_b"], at["scales_b"], at["shift_b"], at["bias_b"]),
    ]
    return b"".join(parts.values()), records


def test_layer_by_layer_gives_the_very_bytes_of_the_whole(tmp_path: Path) -> None:
    data, records = layers()
    (tmp_path / "in").write_bytes(data)
    share, saturated = noise_file(tmp_path / "in", tmp_path / "out", records, 0.3, lambda name: KEYS(name))
    whole, whole_share, whole_saturated = noised_onnx(data, records, 0.3, lambda name: KEYS(name))
    assert (tmp_path / "out").read_bytes() == bytes(whole) != data
    assert share == pytest.approx(whole_share) and share > 0.2 and saturated == whole_saturated


def test_the_noised_frontend_is_made_once_per_package_and_alpha_and_is_private(tmp_path: Path) -> None:
    model, record = quantized_model()
    source, engines = tmp_path / "front.onnx", tmp_path / "engines"
    source.write_bytes(model)
    engines.mkdir()
    said: list[str] = []
    path, noise = noise_frontend(source, [record], 0.1, KEYS, engines, said.append)
    assert os.stat(path).st_mode & 0o777 == 0o600 and noise.changed_share > 0.05
    stamp = path.stat().st_mtime_ns
    assert noise_frontend(source, [record], 0.1, KEYS, engines, said.append) == (path, noise)
    assert path.stat().st_mtime_ns == stamp
    noised = path.read_bytes()
    images = np.ones((1, 3, 16, 16), np.float32)
    clean, changed = (open_engine("onnxruntime", each, 1).run(images) for each in (source, path))
    assert 0 < np.abs(clean - changed).max() < np.abs(clean).max()
    other, _ = noise_frontend(source, [record], 0.2, KEYS, engines, said.append)
    assert other != path and other.read_bytes() != noised and not path.exists()  # one is kept
    third, _ = noise_frontend(source, [record], 0.1, keys_of(bytes(32), bytes(32)), engines, said.append)
    assert third.name not in (path.name, other.name) and third.read_bytes() != noised and said == []


@pytest.mark.parametrize("harm", ["model", "record"])
def test_de_04_a_spoiled_noised_frontend_is_made_again(tmp_path: Path, harm: str) -> None:
    model, record = quantized_model()
    (tmp_path / "front.onnx").write_bytes(model)
    engines = tmp_path / "engines"
    engines.mkdir()
    path, noise = noise_frontend(tmp_path / "front.onnx", [record], 0.1, KEYS, engines, lambda text: None)
    good = path.read_bytes()
    (path if harm == "model" else path.with_suffix(".json")).write_bytes(b"torn")
    assert noise_frontend(tmp_path / "front.onnx", [record], 0.1, KEYS, engines, lambda text: None) == (path, noise)
    assert path.read_bytes() == good


def noise_for(tmp_path: Path, **changes: object) -> FeatureNoise:
    keying = NoiseKeying(bytes(32), bytes(32), 1, noise_kind(0.1, None), 1.0)
    package = tmp_path / "front"
    cut = write_package(package).manifest.cuts[0] if not package.exists() else CUTS[0]
    CUTS[:] = [cut]
    return FeatureNoise(cut, replace(keying, **changes))  # type: ignore[arg-type]


CUTS: list[object] = []


def test_a_release_repeats_bit_for_bit_and_depends_on_all_that_keys_it(tmp_path: Path) -> None:
    tokens = np.random.default_rng(1).normal(size=(LAYOUT.count, DIM)).astype(np.float32)
    digest = b"d" * 32
    first, _ = noise_for(tmp_path).release(tokens, digest)
    assert (noise_for(tmp_path).release(tokens, digest)[0] == first).all()
    assert (noise_for(tmp_path).release(tokens, b"e" * 32)[0] != first).any()
    for changes in (
        {"secret": b"s" * 32},
        {"package_digest": b"p" * 32},
        {"cut": 2},
        {"kind": noise_kind(0.2, None)},
        {"kind": noise_kind(0.1, "u1")},
    ):
        assert (noise_for(tmp_path, **changes).release(tokens, digest)[0] != first).any()


def test_two_scales_are_two_draws(tmp_path: Path) -> None:
    tokens = np.zeros((LAYOUT.count, DIM), np.float32)
    one, _ = noise_for(tmp_path, kappa=1.0).release(tokens, b"d" * 32)
    two, _ = noise_for(tmp_path, kappa=2.0).release(tokens, b"d" * 32)
    assert not (np.sign(one) == np.sign(two)).all()  # one draw at two scales would agree in every sign


def test_retrieval_from_the_file_equals_retrieval_in_memory(tmp_path: Path) -> None:
    features = np.random.default_rng(2).normal(size=(9, LAYOUT.count, DIM)).astype(np.float16)
    (tmp_path / "clean").write_bytes(features.tobytes())
    ticks: list[int] = []
    sources = retrieve(tmp_path / "clean", 9, LAYOUT, ticks.append)
    assert (sources == retrieval_sources(features[:, LAYOUT.prefix :])).all() and sources.shape == (9, LAYOUT.patches)
    assert sum(ticks) == LAYOUT.patches


def test_only_the_sent_patches_leave_and_prefix_tokens_get_their_share_of_the_noise(tmp_path: Path) -> None:
    """What a server decodes: the prefix, then the kept patches, each token plus noise of its own strength."""
    whole = noise_for(tmp_path)
    cut = replace(CUTS[0], sent=SentRule("checkerboard", 0.25))  # type: ignore[type-var]
    noise = FeatureNoise(cut, NoiseKeying(bytes(32), bytes(32), 1, noise_kind(0.1, None), 1.0))
    kept = kept_patches(LAYOUT.grid, "checkerboard")
    assert noise.shape == (LAYOUT.prefix + len(kept), DIM) and whole.shape == (LAYOUT.count, DIM)
    clean = np.random.default_rng(5).normal(size=(LAYOUT.count, DIM)).astype(np.float32)
    steps = wire_steps(cut.statistics, 1.0, 0.25)
    wanted = np.concatenate([clean[: LAYOUT.prefix], clean[LAYOUT.prefix :][kept]])
    errors = np.stack(
        [dequantize(noise.release(clean, b"%032d" % draw)[0], steps, LAYOUT.prefix) - wanted for draw in range(400)]
    )
    scales = noise_scales(cut.statistics, 1.0, 0.25)
    np.testing.assert_allclose(np.abs(errors[:, : LAYOUT.prefix]).mean((0, 1)), scales[0], rtol=0.25)
    np.testing.assert_allclose(np.abs(errors[:, LAYOUT.prefix :]).mean((0, 1)), scales[1], rtol=0.15)


def test_retrieval_of_sent_patches_is_those_columns(tmp_path: Path) -> None:
    features = np.random.default_rng(2).normal(size=(9, LAYOUT.count, DIM)).astype(np.float16)
    (tmp_path / "clean").write_bytes(features.tobytes())
    ticks: list[int] = []
    sources = retrieve(tmp_path / "clean", 9, LAYOUT, ticks.append, "quarter")
    kept = kept_patches(LAYOUT.grid, "quarter")
    assert (sources == retrieval_sources(features[:, LAYOUT.prefix :])[:, kept]).all() and sum(ticks) == len(kept)
