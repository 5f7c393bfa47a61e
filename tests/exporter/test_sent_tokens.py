"""An export of which devices send half of the patches: what tuning, device and server each make of the same tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from contract import tokens as law
from contract.errors import PackageError, UsageError
from contract.manifest import from_bytes
from contract.tokens import SentRule, TokenLayout
from edge_runtime.transforms.laplace import FeatureNoise, NoiseKeying, noise_kind
from exporter import build
from exporter.channel import WireChannel
from exporter.statistics import PositionMoments, measure_tokens
from server_runtime import backend as backends
from server_runtime import backend_folder
from server_runtime.acceptance import Expected
from tests.exporter import tiny

RULE = SentRule("checkerboard", 0.5)
KAPPA = 0.5


@pytest.fixture(scope="module", params=[RULE, SentRule("none", 0.5)], ids=["half", "class token"])
def rule(request: pytest.FixtureRequest) -> SentRule:
    found: SentRule = request.param
    return found


@pytest.fixture(scope="module")
def folder(rule: SentRule, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sent")
    pictures = tiny.write_pictures(root / "public", 15)
    tiny.run(root / "front", calibration=str(pictures), sent_patches=rule.kept, prefix_noise=rule.prefix_share)
    return root / "front"


@pytest.fixture(scope="module")
def shipped(folder: Path) -> backend_folder.BackendFolder:
    found = backend_folder.read(folder.with_name("front.backend"))
    assert isinstance(found, backend_folder.BackendFolder)
    return found


def test_the_signed_manifest_says_what_is_sent(folder: Path, rule: SentRule) -> None:
    assert from_bytes((folder / "manifest.json").read_bytes()).cuts[0].sent == rule


def test_the_server_expects_the_tokens_that_a_device_sends(
    shipped: backend_folder.BackendFolder, rule: SentRule
) -> None:
    cut = shipped.cut
    keying = NoiseKeying(bytes(32), bytes(32), cut.index, noise_kind(0.1, None), KAPPA)
    clean = np.zeros((cut.tokens.count, cut.tokens.dim), np.float32)
    codes, _ = FeatureNoise(cut, keying).release(clean, bytes(32))
    patches = len(law.kept_patches(cut.tokens.grid, rule.kept))
    expected = Expected(shipped.layout, "permuted-label").layout
    assert expected is not None and codes.shape == (expected.count, expected.dim) == (1 + patches, 48)
    theta_b = backends.load(shipped, KAPPA, torch.device("cpu"))
    assert theta_b.tokens(codes[None]).shape == (1, cut.tokens.count, cut.tokens.dim)
    assert theta_b.front.patches == patches and theta_b.width == 48


def test_server_and_tuning_restore_the_same_tokens_from_a_devices_codes(
    shipped: backend_folder.BackendFolder, rule: SentRule
) -> None:
    cut, rng = shipped.cut, np.random.default_rng(0)
    keying = NoiseKeying(bytes(32), bytes(32), cut.index, noise_kind(0.1, None), KAPPA)
    clean = rng.normal(size=(3, cut.tokens.count, cut.tokens.dim)).astype(np.float32)
    noise = FeatureNoise(cut, keying)
    codes = np.stack([noise.release(each, bytes([row]) * 32)[0] for row, each in enumerate(clean)])
    server = backends.load(shipped, KAPPA, torch.device("cpu")).tokens(codes)
    public = _public_of(shipped)
    channel = WireChannel(public, cut.tokens, [KAPPA], "cpu", rule)
    steps = law.wire_steps(cut.statistics, KAPPA, rule.prefix_share)
    tuned = channel.restore(torch.from_numpy(law.dequantize(codes, steps, cut.tokens.prefix)), 0)
    torch.testing.assert_close(tuned, server, rtol=1e-4, atol=1e-4)


def _public_of(shipped: backend_folder.BackendFolder):
    """Public tokens as the exporter held them, from what it wrote."""
    from contract.wiener import SpatialStatistics
    from exporter.statistics import PublicTokens

    stored = load_file(shipped.root / "statistics.safetensors")
    spatial = SpatialStatistics(*(stored[name] for name in ("mean_positions", "basis", "values", "positions")))
    names = ("mean_prefix", "mean_patch", "covariance_prefix", "covariance_patch")
    return PublicTokens(shipped.cut.statistics, *(stored[name].astype(float) for name in names), spatial)


def test_a_server_without_spatial_statistics_cannot_fill_patches_in(
    shipped: backend_folder.BackendFolder, tmp_path: Path
) -> None:
    stored = load_file(shipped.root / "statistics.safetensors")
    for name in ("mean_positions", "basis", "values", "positions"):
        del stored[name]
    save_file(stored, tmp_path / "statistics.safetensors")
    with pytest.raises(PackageError, match="positions"):
        backends.front_of(replace(shipped, root=tmp_path), KAPPA)


LAYOUT = TokenLayout(prefix=1, grid=(4, 4), dim=6)


def _smooth(count: int, seed: int) -> np.ndarray:
    """Tokens (count, 17, 6) that neighbours share, on a mean of each position's own."""
    rng = np.random.default_rng(seed)
    row, column = np.divmod(np.arange(16), 4)
    near = np.exp(-np.hypot(row[:, None] - row, column[:, None] - column) / 2.0)
    patches = np.einsum("nk,bkd->bnd", np.linalg.cholesky(near), rng.normal(size=(count, 16, 6))) * np.arange(1, 7)
    patches += 5.0 * np.random.default_rng(1).normal(size=(16, 6))
    return np.concatenate([rng.normal(size=(count, 1, 6)), patches], 1).astype(np.float32)


def test_position_statistics_are_those_of_the_tokens_however_they_come() -> None:
    tokens = _smooth(3000, 0)
    public = measure_tokens(LAYOUT, lambda: iter(np.array_split(tokens, 7)))
    spatial = public.spatial
    assert spatial is not None and spatial.positions.shape == (1, 16, 16)
    np.testing.assert_allclose(spatial.mean, tokens[:, 1:].mean(0), atol=1e-3)
    assert np.trace(spatial.positions[0]) == pytest.approx(16)
    at_once = PositionMoments(LAYOUT, public)
    at_once.add(tokens)
    np.testing.assert_allclose(at_once.finish().positions, spatial.positions, rtol=1e-4, atol=1e-5)
    centred = (tokens[:, 1:] - spatial.mean) / np.array(public.statistics.sigma_patch) @ spatial.basis
    weights = np.linalg.eigvalsh(
        public.covariance_patch / np.outer(public.statistics.sigma_patch, public.statistics.sigma_patch)
    )
    shared = np.einsum("bnc,bmc->nm", centred / weights, centred)
    np.testing.assert_allclose(spatial.positions[0], 16 * shared / np.trace(shared), atol=0.02)


def test_the_channel_fills_in_what_is_not_sent_and_filters_better_than_token_by_token() -> None:
    tokens = _smooth(1500, 0)
    public = measure_tokens(LAYOUT, lambda: iter([tokens]))
    clean = torch.from_numpy(_smooth(400, 5))

    def error(rule: SentRule, spatial: bool) -> float:
        known = public if spatial else replace(public, spatial=None)
        channel = WireChannel(known, LAYOUT, [1.0], "cpu", rule)
        received = channel.release(clean, 0, torch.Generator().manual_seed(0))
        assert received.shape[1] == law.sent_layout(LAYOUT, rule.kept).count
        return float((channel.restore(received, 0) - clean)[:, 1:].square().mean())

    whole, alone = error(SentRule(), True), error(SentRule(), False)
    half, quarter = error(SentRule("checkerboard"), True), error(SentRule("quarter"), True)
    energy = float((clean[:, 1:] - clean[:, 1:].mean(0)).square().mean())
    assert whole < 0.8 * alone and whole < half < quarter < energy


def test_too_many_patches_to_fill_in_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import exporter.statistics as statistics

    monkeypatch.setattr(statistics, "SPATIAL_PATCHES_MAX", 9)
    with pytest.raises(UsageError, match="filled in"):
        tiny.run(tmp_path / "front", sent_patches="checkerboard")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"kappa": 0.0}, "every token without feature noise (--kappa 0): nothing hides the images, and weight noise"),
        ({"kappa": 0.0, "alpha": 0.0}, "every token without feature noise (--kappa 0): nothing hides the images\n"),
        ({"sent_patches": "none", "prefix_noise": 0.0}, "every token without feature noise (--prefix-noise 0)"),
        ({"prefix_noise": 0.0}, "the class token without feature noise (--prefix-noise 0)"),
    ],
)
def test_whoever_asks_for_no_noise_is_told(
    tmp_path: Path, changes: dict[str, object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    build._warn_of_noise(tiny.plan(tmp_path / "front", **changes), TokenLayout(1, (4, 4), 8))
    shown = capsys.readouterr().err
    assert said in shown and bool(shown) == bool(said)


def test_half_of_the_class_tokens_noise_is_half_the_scale() -> None:
    tokens = _smooth(500, 0)
    public = measure_tokens(LAYOUT, lambda: iter([tokens]))
    still = torch.zeros(4000, LAYOUT.count, 6)
    noise = WireChannel(public, LAYOUT, [1.0], "cpu", SentRule("all", 0.5)).release(
        still, 0, torch.Generator().manual_seed(0)
    )
    scales = law.noise_scales(public.statistics, 1.0, 0.5)
    np.testing.assert_allclose(noise[:, :1].abs().mean((0, 1)), scales[0], rtol=0.1)
    np.testing.assert_allclose(noise[:, 1:].abs().mean((0, 1)), scales[1], rtol=0.1)
