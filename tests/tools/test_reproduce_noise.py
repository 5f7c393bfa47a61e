"""The noise study: figures on planted cases, its wire against the contract's law, and whole rows on a tiny world."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("timm")

from safetensors.torch import save_file  # noqa: E402  (after the skips)

from contract.tokens import TokenLayout, kept_patches  # noqa: E402
from contract.wiener import release_variance, spatial_filter  # noqa: E402
from exporter.architecture import create  # noqa: E402
from tests.exporter.tiny import write_pictures  # noqa: E402
from tools import reproduce_noise as study  # noqa: E402
from tools.reproduce_noise_attack import (  # noqa: E402
    Attacker,
    AttackRule,
    Pairs,
    fit_ridge,
    images_of,
    patches_of,
    quality,
    ssim,
)
from tools.reproduce_noise_learning import (  # noqa: E402
    Rates,
    Stepper,
    TuneRule,
    adapt,
    cosine_share,
    nearest_others,
    tune_backend,
)
from tools.reproduce_noise_release import Release, Wire, know  # noqa: E402
from tools.reproduce_noise_world import Halves  # noqa: E402
from tools.reproduce_world import SiteFolders, World  # noqa: E402

CPU = torch.device("cpu")
LAYOUT = TokenLayout(prefix=1, grid=(4, 4), dim=8)
ARGS = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3, "num_classes": 4}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def smooth(count: int, seed: int) -> torch.Tensor:
    """Tokens (count, 17, 8) of which neighbours are alike."""
    generator = torch.Generator().manual_seed(seed)
    row, column = np.divmod(np.arange(16), 4)
    near = np.exp(-np.hypot(row[:, None] - row, column[:, None] - column) / 2.0)
    root = torch.from_numpy(np.linalg.cholesky(near)).float()
    patches = torch.einsum("nk,bkd->bnd", root, torch.randn(count, 16, 8, generator=generator))
    return torch.cat([torch.randn(count, 1, 8, generator=generator), patches * torch.arange(1.0, 9.0)], 1)


# -- figures


def test_ssim_is_scikit_images() -> None:
    metrics = pytest.importorskip("skimage.metrics")
    rng = np.random.default_rng(0)
    true = rng.uniform(size=(2, 3, 20, 16))
    found = np.clip(true + 0.2 * rng.normal(size=true.shape), 0, 1)
    wanted = [
        metrics.structural_similarity(a, b, channel_axis=0, data_range=1.0) for a, b in zip(true, found, strict=True)
    ]
    np.testing.assert_allclose(ssim(torch.from_numpy(true), torch.from_numpy(found)), wanted, atol=5e-3)


def test_quality_of_the_same_picture_and_of_a_known_error() -> None:
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 0.5
    assert quality(images, images).ssim == pytest.approx(1.0)
    assert quality(images, images + 0.1).psnr_db == pytest.approx(20.0, abs=1e-3)


def test_patches_come_back_as_pictures() -> None:
    pixels = torch.randint(0, 256, (3, 8, 12, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    patches = patches_of(pixels, (2, 3))
    assert patches.shape == (3, 6, 48)
    back = images_of(patches, (2, 3), (8, 12))
    assert torch.equal(back, pixels.permute(0, 3, 1, 2).float() / 255.0)


# -- the wire


@pytest.mark.parametrize("kept", ["all", "checkerboard", "quarter", "none"])
def test_the_studys_filter_is_the_contracts_where_positions_share_one_noise(kept: str) -> None:
    known = know(LAYOUT, smooth(500, 0))
    wire = Wire(Release(kept, 1.0, 0.5), known, CPU)  # type: ignore[arg-type]
    received = wire.send(smooth(4, 1))
    chosen = kept_patches(LAYOUT.grid, kept)  # type: ignore[arg-type]
    assert received.shape == (4, 1 + len(chosen), 8)
    sigma = known.public.statistics.sigma_patch
    law = spatial_filter(
        known.moments.finish(), sigma, release_variance(sigma, 1.0, wire.steps[-1].numpy()), chosen
    )  # fmt: skip
    np.testing.assert_allclose(wire.restore(received)[:, 1:], law.restore(received[:, 1:].numpy()), atol=2e-3)


def test_two_strengths_send_every_patch_and_the_filter_trusts_the_cleaner_ones() -> None:
    known = know(LAYOUT, smooth(500, 0))
    clean = smooth(2000, 1)
    wire = Wire(Release("checkerboard", 0.5, 0.5, kappa_rest=3.0), known, CPU)
    received = wire.send(clean)
    kept = torch.from_numpy(kept_patches(LAYOUT.grid, "checkerboard")) + 1
    rest = torch.tensor([place for place in range(1, 17) if place not in kept.tolist()])
    noise = (received - clean).abs().mean(0)
    assert received.shape == clean.shape and 5 < float(noise[rest].mean() / noise[kept].mean()) < 7
    error = (wire.restore(received) - clean).square().mean(0)
    only_kept = Wire(Release("checkerboard", 0.5, 0.5), known, CPU)
    alone = (only_kept.restore(only_kept.send(clean)) - clean).square().mean(0)
    assert error[rest].mean() < alone[rest].mean()  # even strong noise says something


def test_the_prefix_alone_leaves_patches_at_their_mean() -> None:
    known = know(LAYOUT, smooth(500, 0))
    wire = Wire(Release(kappa_prefix=0.5, prefix_alone=True), known, CPU)
    received = wire.send(smooth(3, 1))
    restored = wire.restore(received)
    assert received.shape == (3, 1, 8) and torch.equal(restored[0, 1:], restored[2, 1:])


# -- learning


def test_steps_follow_the_rate_they_are_given_and_a_cosine_ends_at_nothing() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    stepper = Stepper([([weight], 0.1)], lambda x: (weight * x).sum(), bf16=False)
    stepper.step(1.0, torch.ones(3))
    torch.testing.assert_close(weight.detach(), torch.full((3,), 0.9))
    stepper.step(0.0, torch.ones(3))
    torch.testing.assert_close(weight.detach(), torch.full((3,), 0.9))
    assert cosine_share(0, 100) == pytest.approx(0.2) and cosine_share(5, 100) == 1.0 and cosine_share(99, 100) < 0.01


class Mean(torch.nn.Module):
    """tokens (B, T, 8) -> features (B, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.mix(tokens.float()).mean(1)


def test_distillation_brings_noisy_features_to_the_clean_ones() -> None:
    torch.manual_seed(0)
    backend, tokens = Mean().requires_grad_(False), smooth(300, 0)
    wire = Wire(Release("all", 2.0, 2.0), know(LAYOUT, tokens), CPU)
    clean, through = backend(tokens), wire.send  # without the filter, which would leave a linear backend nothing to do
    rule = TuneRule("distil", "features", 1e-2, 30, cosine=True)

    def error(module: torch.nn.Module) -> float:
        torch.manual_seed(1)
        return float((module(through(tokens)) - clean).square().mean())

    head = (torch.zeros(2, 8), torch.zeros(2))
    labels = torch.zeros(300, dtype=torch.int64)
    tuned = tune_backend(backend, head, rule, [tokens], labels, clean, through, 0)
    assert error(tuned) < 0.8 * error(backend)


def test_an_adaptation_learns_its_site() -> None:
    torch.manual_seed(0)
    labels = torch.arange(20) % 2
    tokens = smooth(20, 0) * 0.3 + (labels * 4.0 - 2.0)[:, None, None]
    sources = nearest_others(tokens[:, 1:])
    assert not (sources == torch.arange(20)[:, None]).any()
    backend, head = adapt(
        Mean().requires_grad_(False), tokens, labels, sources, 1, lambda part: part, 2, Rates(1e-3, 1e-2), 40, 0
    )
    assert float((head(backend(tokens)).argmax(1) == labels).float().mean()) == 1.0


# -- attacks


def test_ridge_reads_a_planted_linear_code_and_the_transformer_reads_more() -> None:
    """Each patch is hidden in the product of two channels: no linear map finds it, a network does."""
    generator = torch.Generator().manual_seed(0)
    patches = torch.rand(1200, 16, 3, generator=generator)
    sign = torch.randint(0, 2, (1200, 16, 1), generator=generator) * 2.0 - 1.0
    tokens = torch.cat([patches * sign, sign, torch.zeros(1200, 16, 4)], 2)
    tokens = torch.cat([torch.zeros(1200, 1, 8), tokens], 1)
    weight, offset = fit_ridge(torch.cat([patches, torch.zeros(1200, 16, 5)], 2), patches)
    assert float((patches @ weight[:3] + offset - patches).abs().max()) < 1e-3
    places = torch.arange(17)
    known, unseen = Pairs((tokens[:1000],), patches[:1000]), Pairs((tokens[1000:],), patches[1000:])
    attacker = Attacker(lambda x: x.float(), lambda x: x, places, 1, known, unseen)
    progress = attacker.train(AttackRule(steps=150, batch=64, width=32, blocks=1, heads=2, lr=4e-3), 0)
    linear = float((attacker.filtered_ridge(tokens[1000:]) - patches[1000:]).square().mean())
    found = float((attacker.transformer(tokens[1000:]) - patches[1000:]).square().mean())
    assert found < 0.3 * linear
    assert len(progress) == 5 and progress[-1] > progress[0]


# -- rows


def test_shares_divide_the_recipes_and_keep_those_of_one_release_together() -> None:
    parts = [study.mine((part, 3), None) for part in (1, 2, 3)]
    assert sorted(recipe.name for part in parts for recipe in part) == sorted(recipe.name for recipe in study.RECIPES)
    releases = [{recipe.release for recipe in part} for part in parts]
    assert not (releases[0] & releases[1] or releases[0] & releases[2] or releases[1] & releases[2])
    assert len({study.slug(recipe) for recipe in study.RECIPES}) == len(study.RECIPES)


def tiny_world(root: Path) -> World:
    """Four colours are public, the same four of another draw are the site's."""
    torch.manual_seed(0)
    weights = root / "weights.safetensors"
    save_file(create("vit_tiny_patch16_224", False, ARGS).state_dict(), weights)
    public = root / "public"
    if not public.exists():
        write_pictures(public, 12)

    def site(dataset: str, shots: int, seed: int) -> SiteFolders:
        train, test = root / f"train {seed}", root / f"test {seed}"
        if not train.exists():
            write_pictures(train, shots, seed=seed)
            write_pictures(test, 6, seed=seed + 100)
        return SiteFolders({"a": train}, {"a": test}, tuple(f"class{number}" for number in range(4)))

    return World("tiny", root, "vit_tiny_patch16_224", ARGS, weights, public, {"colours": "four"}, site, 2)


@pytest.mark.parametrize(
    "release", [Release("checkerboard", 1.0, 0.5), Release("quarter", 0.5, 0.5, hidden=True),
                Release("all", 1.0, 0.5, learnt=True)], ids=["half", "hidden", "learnt"],
)  # fmt: skip
def test_a_row_has_every_figure(release: Release, tmp_path: Path) -> None:
    attack = AttackRule(steps=10, batch=16, width=16, blocks=1, heads=2, checks=2)
    size = study.Size(attack, public=48, attacked=12, epochs=2, tune_epochs=1)
    row = study.Study(tiny_world(tmp_path), size, [1], [3]).row(study.Recipe(release, "distil"))
    assert set(row.accuracy) == {"probe 3-shot", "sa 0.0003 3-shot", "sa 0.0001 3-shot"}
    assert all(0 <= value <= 1 for value in row.accuracy.values())
    assert set(row.attacks) == {"mean colour", "ridge", "filtered ridge", "transformer"}
    assert all(np.isfinite([each.psnr_db, each.ssim]).all() for each in row.attacks.values())
    kept = len(kept_patches((4, 4), release.kept))
    assert row.bytes_per_image == (1 + kept) * 24 and len(row.progress_db) == 2


def test_a_hidden_patch_changes_nothing_that_is_sent(tmp_path: Path) -> None:
    """With `hidden` the frontend never sees what is left out; without it, attention carries it into the tokens."""
    halves = Halves(tiny_world(tmp_path), CPU)
    pixels = torch.zeros(1, 32, 32, 3, dtype=torch.uint8)
    other = pixels.clone()
    other[0, :8, 8:16] = 255  # patch 1, which a quarter leaves out
    kept = torch.from_numpy(kept_patches((4, 4), "quarter")) + 1
    hidden = [halves.tokens(halves.frontend, each, "quarter")[:, kept] for each in (pixels, other)]
    seen = [halves.tokens(halves.frontend, each)[:, kept] for each in (pixels, other)]
    assert torch.equal(*hidden) and not torch.equal(*seen)


def test_a_stored_row_is_used_again_only_for_the_same_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attack = AttackRule(steps=4, batch=16, width=16, blocks=1, heads=2, checks=1)
    monkeypatch.setattr(study, "QUICK", study.Size(attack, 48, 6, 1, 1.0))
    monkeypatch.setattr(study, "quick_world", lambda root: tiny_world(tmp_path))
    words = ["reproduce_noise", "--quick", "--shots", "2", "-o", str(tmp_path / "out"), "--format", "json"]
    monkeypatch.setattr(sys, "argv", [*words, "--only", "quarter, kappa 1"])
    assert study.main() == 0
    first = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(study.Study, "row", lambda self, recipe: pytest.fail("computed again"))
    assert study.main() == 0
    assert json.loads(capsys.readouterr().out)["rows"] == first["rows"]
    path = next((tmp_path / "out" / "rows").iterdir())
    row = json.loads(path.read_text())
    assert study.finished(path, {"seeds": row["seeds"]}, "accuracy") == row
    assert study.finished(path, {"seeds": [2]}, "accuracy") is None
    assert replace(study.QUICK, epochs=9) != study.QUICK
