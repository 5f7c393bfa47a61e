"""Tuning, channel and few-shot choice on made-up tokens: six classes with a centre each, a backend of one layer."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from contract import tokens as law
from contract.errors import TrainingError
from contract.tokens import TokenLayout
from exporter.channel import WireChannel
from exporter.few_shot import (
    DEFAULT_BACKEND_LR,
    FewShotSettings,
    choose_rates,
    count_episodes,
    default_rates,
    draw_episode,
    hold_out,
    played,
    turned,
)
from exporter.statistics import PublicTokens, TokenMoments
from exporter.tune import (
    PUBLISHED,
    Classifier,
    TokenSet,
    TuneSettings,
    backend_features,
    count_epochs,
    disjoint_subsets,
    fit_head,
    linear_head,
    mixed,
    mixture,
    settings_for,
    top1,
    tune,
    union,
)

LAYOUT = TokenLayout(prefix=1, grid=(2, 2), dim=8)
CLASSES = 6
SETTINGS = TuneSettings(epochs=12, lr=3e-3, batch=16)


class MeanBackend(nn.Module):
    """tokens (B, T, 8) -> features (B, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8, bias=False)
        nn.init.eye_(self.mix.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.mix(tokens)).mean(1)


def _tokens(per_class: int, seed: int = 0) -> TokenSet:
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(CLASSES), per_class)
    centres = np.random.default_rng(7).normal(size=(CLASSES, 1, 8)) * 1.5
    plain = centres[labels] + rng.normal(size=(len(labels), LAYOUT.count, 8))
    noisy = plain + 0.3 * rng.normal(size=plain.shape)
    return TokenSet((plain.astype(np.float16), noisy.astype(np.float16)), labels)


def _public(tokens: TokenSet) -> PublicTokens:
    moments = TokenMoments(LAYOUT)
    moments.add(tokens.frontends[0].astype(np.float32))
    return moments.finish()


def _channel(tokens: TokenSet, *kappas: float) -> WireChannel:
    return WireChannel(_public(tokens), LAYOUT, kappas, "cpu")


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_without_noise_the_channel_is_the_contracts_wire() -> None:
    tokens = _tokens(4)
    inputs = tokens.rows(0, np.arange(24))
    found = _channel(tokens, 0.0).release(inputs, 0, _generator()).numpy()
    steps = law.wire_steps(_public(tokens).statistics, 0.0)
    codes, _ = law.quantize(inputs.numpy(), steps, LAYOUT.prefix)
    np.testing.assert_allclose(found, law.dequantize(codes, steps, LAYOUT.prefix), rtol=1e-6, atol=1e-6)


def test_the_channels_noise_is_laplace_of_the_contracts_scale() -> None:
    tokens = _tokens(4)
    inputs = torch.zeros(4000, LAYOUT.count, 8)
    noise = _channel(tokens, 1.0).release(inputs, 0, _generator()).numpy()
    scales = law.noise_scales(_public(tokens).statistics, 1.0)
    for row, part in ((0, noise[:, :1]), (1, noise[:, 1:])):
        flat = part.reshape(-1, 8)
        np.testing.assert_allclose(np.abs(flat).mean(0), scales[row], rtol=0.08)
        np.testing.assert_allclose(flat.std(0), np.sqrt(2) * scales[row], rtol=0.08)


def test_the_filter_brings_noisy_tokens_nearer_and_passes_clean_ones() -> None:
    tokens = _tokens(40)
    inputs = tokens.rows(0, np.arange(240))
    channel = _channel(tokens, 0.0, 1.0)
    noisy = channel.release(inputs, 1, _generator())
    restored = channel.restore(noisy, 1)
    assert (restored - inputs).square().mean() < 0.6 * (noisy - inputs).square().mean()
    clean = channel.release(inputs, 0, _generator())
    assert (channel.restore(clean, 0) - clean).abs().max() < 0.05


def test_rows_come_in_the_order_asked_for() -> None:
    tokens = _tokens(3)
    rows = np.array([7, 2, 2, 11, 0])
    np.testing.assert_array_equal(tokens.rows(1, rows).numpy(), tokens.frontends[1][rows].astype(np.float32))


def test_a_fitted_head_answers() -> None:
    tokens = _tokens(30)
    rows = np.arange(180)
    backend = MeanBackend()
    head = fit_head(backend_features(backend, tokens, rows, "cpu", "features"), tokens.labels, CLASSES)
    test_tokens = _tokens(30, seed=1)
    accuracy = top1(Classifier(backend, head), test_tokens.frontends[0], test_tokens.labels, None, "cpu")
    assert accuracy > 0.8


def test_tuning_learns_the_features_of_clean_tokens_from_noisy_ones_and_repeats() -> None:
    tokens, unseen = _tokens(40), _tokens(40, seed=1)
    channel = _channel(tokens, 0.0, 0.5, 1.0)
    torch.manual_seed(0)
    start = Classifier(MeanBackend(), nn.Linear(8, CLASSES))

    def tuned() -> Classifier:
        model = copy.deepcopy(start)
        rng = np.random.default_rng(0)
        tune(model, tokens, np.arange(240), np.arange(CLASSES), channel, SETTINGS, rng, "cpu", "tuning")
        return model

    def error(model: Classifier) -> float:
        """Of unseen images under the strongest noise, against what the untuned backend makes of clean ones."""
        clean, other = (torch.from_numpy(unseen.frontends[place].astype(np.float32)) for place in (0, 1))
        goal = start.backend(clean)
        noisy = channel.restore(channel.release(other, 2, _generator()), 2)
        return float(((model.backend(noisy) - goal) / goal.std(dim=0)).square().mean().detach())

    first, second = tuned(), tuned()
    assert error(first) < 0.9 * error(start)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert torch.equal(first.head.weight, start.head.weight)  # the features stay those that it reads
    assert not any(parameter.requires_grad for parameter in first.parameters())


def test_a_large_backend_is_tuned_for_fewer_epochs() -> None:
    small, large = nn.Linear(8, 8), nn.Linear(4096, 4096)
    assert count_epochs(small, 17, 2000) == 20
    assert 3 < count_epochs(large, 17, 2000) < 20
    assert count_epochs(large, 197, 2000) == 3


def test_share_0_of_a_mixture_is_the_plain_token_and_share_1_the_other_exactly() -> None:
    """Invariant 3 of SA's step 4: lambda = 0 gives X_K, lambda = 1 gives X_m."""
    tokens = _tokens(4)
    rows = np.arange(24)
    plain, other = tokens.rows(0, rows), tokens.rows(1, rows)
    share = torch.zeros(24, 1, 1)
    assert torch.equal(mixed(plain, other, share), plain)
    assert torch.equal(mixed(plain, other, share + 1), other)


def test_a_mixture_draws_one_share_per_sample_from_the_beta() -> None:
    tokens = _tokens(200)
    rows = np.arange(1200)
    plain, other = tokens.rows(0, rows).double(), tokens.rows(1, rows).double()
    found = mixture(tokens, 1, rows, 0.75, np.random.default_rng(0)).double()
    shares = ((found - plain) / (other - plain)).flatten(1).nanmedian(1).values
    torch.testing.assert_close(plain + shares[:, None, None] * (other - plain), found, rtol=0, atol=1e-5)
    assert shares.mean() == pytest.approx(0.5, abs=0.04)
    assert shares.var() == pytest.approx(0.25 / (2 * 0.75 + 1), abs=0.02)  # of Beta(a, a): 1 / (4 (2 a + 1))


def test_three_subsets_are_disjoint_and_together_the_set() -> None:
    subsets = disjoint_subsets(11, 3, np.random.default_rng(0))
    assert sorted(map(len, subsets)) == [3, 4, 4]
    assert sorted(np.concatenate(subsets).tolist()) == list(range(11))


def test_no_subset_is_none_at_all() -> None:
    assert disjoint_subsets(10, 0, np.random.default_rng(0)) == []


def test_the_published_form_is_one_epoch_of_adam_at_1e_5_over_three_subsets() -> None:
    assert settings_for("paper") == PUBLISHED and settings_for("paper", 0).subsets == 0
    assert (PUBLISHED.epochs, PUBLISHED.lr, PUBLISHED.mix, PUBLISHED.subsets, PUBLISHED.batch) == (1, 1e-5, 0.75, 3, 32)
    assert not settings_for("noise-aware").published


class Recorder(nn.Module):
    """A backend that remembers the first channel of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.seen: list[torch.Tensor] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen.append(tokens[:, 0, 0].detach().round())
        return (tokens * self.scale).mean(1)


def _numbered(frontends: int) -> TokenSet:
    """Tokens whose value says which of 2 * 6 pictures they are; frontends differ by thousands."""
    rows = np.arange(12, dtype=np.float16)[:, None, None] * np.ones((1, LAYOUT.count, 8), np.float16)
    return TokenSet(tuple(rows + 64 * number for number in range(frontends)), np.arange(6) % CLASSES)


def _recorded(settings: TuneSettings, frontends: int) -> list[torch.Tensor]:
    model = Classifier(Recorder(), nn.Linear(8, CLASSES))
    tokens = _numbered(frontends)
    tune(model, tokens, np.arange(6), np.arange(CLASSES), None, settings, np.random.default_rng(0), "cpu", "tuning")
    return model.backend.seen


def test_the_published_loss_sums_over_every_picture_its_transform_and_every_frontend_once() -> None:
    tokens = _numbered(5)
    assert union(tokens, np.array([1, 4])).tolist() == [1, 4, 7, 10]
    seen = _recorded(TuneSettings(epochs=1, batch=4, mix=1e9, published=True), 5)  # shares are all one half
    assert [len(each) for each in seen] == [16, 16, 16]  # 4 samples with each of the frontends m = 0 to 3
    values = torch.cat(seen)  # half of 64 is what a frontend adds to a picture's number
    number, frontend = values % 32, values // 32
    assert sorted(frontend.tolist()) == [1.0] * 12 + [2.0] * 12 + [3.0] * 12 + [4.0] * 12
    for m in (1, 2, 3, 4):
        assert sorted(number[frontend == m].tolist()) == list(range(12))


def test_noise_aware_tuning_shows_each_image_or_its_transform_and_one_frontend_a_batch() -> None:
    clean, *seen = _recorded(TuneSettings(epochs=40, batch=6, mix=1e9), 2)
    assert sorted(clean.tolist()) == list(range(12))  # whose features are the goal: images and transforms
    assert all(len(each) == 6 for each in seen) and len(seen) == 40
    assert all(sorted((each % 32 % 6).tolist()) == list(range(6)) for each in seen)
    transformed = (torch.cat(seen) % 32 >= 5.5).float().mean()
    assert transformed == pytest.approx(0.5, abs=0.1)
    assert {float((each // 32).mean()) for each in seen} == {0.0, 1.0}


def test_tuning_on_some_classes_never_shows_the_others() -> None:
    tokens = _tokens(10)
    kept = np.array([0, 2, 5])
    rows = np.flatnonzero(np.isin(tokens.labels, kept))
    model = Classifier(MeanBackend(), nn.Linear(8, 3))
    rng = np.random.default_rng(0)
    tune(model, tokens, rows, kept, _channel(tokens, 0.0), SETTINGS, rng, "cpu", "tuning")


def test_a_loss_that_is_not_finite_ends_the_export() -> None:
    tokens = _tokens(4)
    model = Classifier(MeanBackend(), nn.Linear(8, CLASSES))
    with torch.no_grad():
        model.backend.mix.weight[0, 0] = float("nan")
    with pytest.raises(TrainingError, match="finite"):
        tune(
            model, tokens, np.arange(24), np.arange(CLASSES), _channel(tokens, 0.0), SETTINGS, np.random.default_rng(0),
            "cpu", "tuning",
        )  # fmt: skip


def test_a_linear_head_is_a_copy() -> None:
    weight, bias = torch.randn(3, 8), torch.randn(3)
    head = linear_head(weight, bias)
    weight.zero_()
    assert head.weight.abs().min() > 0


SMALL = FewShotSettings(
    backend_lrs=(1e-5, 1e-2), head_lrs=(1e-3, 3e-2), episodes_most=2, ways=2, shots=5, queries=8, epochs=6
)


def test_held_out_classes_are_a_quarter_and_at_least_two() -> None:
    rng = np.random.default_rng(0)
    assert len(hold_out(np.repeat(np.arange(40), 9), SMALL, rng)) == 10
    assert len(hold_out(np.repeat(np.arange(5), 9), SMALL, rng)) == 2
    assert len(hold_out(np.repeat(np.arange(3), 9), SMALL, rng)) == 0  # too few classes
    assert len(hold_out(np.repeat(np.arange(40), 5), SMALL, rng)) == 0  # nothing left to ask after five shots


def test_an_episode_has_disjoint_support_and_query_of_the_held_out_classes() -> None:
    tokens = _tokens(10)
    episode = draw_episode(tokens, _channel(tokens, 0.0), 0, SMALL, np.random.default_rng(0), "cpu")
    assert episode.support.shape == (10, 5, 8) and episode.query.shape == (10, 5, 8)
    assert episode.support_labels.bincount().tolist() == [5, 5]
    distance = torch.cdist(episode.support.flatten(1), episode.query.flatten(1))
    assert distance.min() > 1e-3


def test_rates_are_the_best_of_the_table_and_the_backend_stays_as_it_was() -> None:
    tokens = _tokens(13)
    backend = MeanBackend()
    before = backend.mix.weight.clone()
    rng = np.random.default_rng(0)
    rates = choose_rates(backend, tokens, _channel(tokens, 0.25), 0, SMALL, rng, "cpu")
    assert len(rates.table) == 3
    best = max(trial.accuracy for trial in rates.table)
    chosen = next(t for t in rates.table if (t.backend_lr, t.head_lr) == (rates.backend_lr, rates.head_lr))
    assert chosen.accuracy == best and best > 0.6
    torch.testing.assert_close(backend.mix.weight, before, rtol=0, atol=0)


def test_small_backends_get_more_episodes_and_large_ones_the_least() -> None:
    settings = FewShotSettings()
    assert count_episodes(nn.Linear(8, 8), 17, settings) == settings.episodes_most
    with torch.device("meta"):
        large = nn.Linear(10_000, 10_000)
    assert count_episodes(large, 197, settings) == settings.episodes_least
    assert [count_episodes(module, 197, played(9)) for module in (nn.Linear(8, 8), large)] == [9, 9]
    assert played(None) == FewShotSettings()


@pytest.mark.parametrize("shape, turns", [((2, 3, 6, 6), 3), ((2, 3, 4, 6), 2)])
def test_turned_pictures_keep_their_shape_and_all_differ(shape: tuple[int, ...], turns: int) -> None:
    images = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    pictures = [images, *turned(images)]
    assert len(pictures) == turns + 1
    assert all(picture.shape == shape for picture in pictures)
    assert all((a != b).any() for i, a in enumerate(pictures) for b in pictures[:i])
    assert all(np.array_equal(np.sort(picture, axis=None), np.sort(images, axis=None)) for picture in pictures)


def test_default_rates_say_why() -> None:
    rates = default_rates("fewer than 4 classes")
    assert rates.document() == {
        "backend_lr": DEFAULT_BACKEND_LR, "head_lr": 1e-3, "reason": "fewer than 4 classes", "table": (),
    }  # fmt: skip
