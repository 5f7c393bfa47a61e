"""The ridge decoder on planted cases whose answer is known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from contract.tokens import Statistics
from server_runtime.attacks.ridge import (
    Moments,
    fit,
    images_of,
    mean_colour,
    mean_psnr_db,
    patches_of,
    released,
)


def moments(tokens: np.ndarray, patches: np.ndarray) -> Moments:
    sums = Moments(tokens.shape[1], patches.shape[1])
    for start in range(0, len(tokens), 100):  # in pieces, as a caller adds them
        sums.add(tokens[start : start + 100], patches[start : start + 100])
    return sums


def test_a_planted_linear_code_is_read_back_exactly() -> None:
    rng = np.random.default_rng(0)
    code, offset = rng.normal(size=(12, 20)) * np.logspace(-3, 3, 20), rng.normal(size=20)
    patches = rng.uniform(size=(600, 12))
    tokens = patches @ code + offset
    decoder = fit(moments(tokens[:400], patches[:400]), moments(tokens[400:500], patches[400:500]))
    assert decoder.strength == 1e-7
    assert np.abs(decoder.decode(tokens[500:]) - patches[500:]).max() < 1e-4


def test_sums_in_pieces_are_those_of_all_at_once_however_far_from_zero() -> None:
    """Uncentred sums would keep no digit here: a millionth of a millionth of their size is what varies."""
    rng = np.random.default_rng(4)
    varies = 1e-3 * rng.normal(size=(500, 4)).round(3)  # exact beside the million, to the last bit but one
    tokens, patches = 1e6 + varies, 1e3 * varies @ rng.normal(size=(4, 3))
    at_once, pieces = Moments(4, 3), Moments(4, 3)
    at_once.add(tokens, patches)
    for start, end in itertools.pairwise((0, 1, 1, 7, 130, 500)):  # of one pair, and of none
        pieces.add(tokens[start:end], torch.from_numpy(patches[start:end]))
    assert pieces.count == 500
    assert pieces.token_scatter == pytest.approx(np.cov(tokens.T, bias=True) * 500, rel=1e-6)
    assert pieces.token_scatter == pytest.approx(at_once.token_scatter, rel=1e-6)
    assert pieces.cross == pytest.approx(at_once.cross, rel=1e-6)
    decoder = fit(pieces, at_once)
    assert np.abs(tokens @ decoder.weight + decoder.offset - patches).max() < 1e-5


def test_under_noise_it_is_the_wiener_estimate() -> None:
    """x = s + n with variances 1 and v: the best linear estimate of s is x / (1 + v), its error v / (1 + v)."""
    rng, v = np.random.default_rng(1), 0.5
    s = rng.normal(size=(40_000, 3))
    x = s + np.sqrt(v) * rng.normal(size=s.shape)
    decoder = fit(moments(x[:20_000], s[:20_000]), moments(x[20_000:], s[20_000:]))
    assert decoder.weight == pytest.approx(np.eye(3) / (1 + v), abs=0.02)
    held = moments(x[20_000:], s[20_000:])
    assert held.mean_square_error(decoder) == pytest.approx(v / (1 + v), rel=0.03)
    direct = np.square(x[20_000:] @ decoder.weight + decoder.offset - s[20_000:]).mean()
    assert held.mean_square_error(decoder) == pytest.approx(direct, rel=1e-9)


def test_the_penalty_is_chosen_on_other_images() -> None:
    """Fewer pairs than channels: without a penalty the fit is perfect and useless, so a large one must be chosen."""
    rng = np.random.default_rng(2)
    patches = rng.uniform(size=(540, 2))
    tokens = np.repeat(patches, 30, axis=1) + rng.normal(size=(540, 60))
    train, held = moments(tokens[:40], patches[:40]), moments(tokens[40:240], patches[40:240])
    chosen, smallest = fit(train, held), fit(train, held, strengths=[1e-7])
    assert train.mean_square_error(smallest) < 1e-6
    assert chosen.strength >= 0.1
    unseen = moments(tokens[240:], patches[240:])
    assert unseen.mean_square_error(chosen) < 0.5 * unseen.mean_square_error(smallest)


def test_a_channel_that_never_varies_does_no_harm() -> None:
    rng = np.random.default_rng(3)
    patches = rng.uniform(size=(200, 2))
    tokens = np.concatenate([patches * 5, np.full((200, 1), 7.0)], axis=1)
    decoder = fit(moments(tokens[:100], patches[:100]), moments(tokens[100:], patches[100:]))
    assert np.abs(decoder.decode(tokens) - patches).max() < 1e-4


def test_fit_needs_pairs() -> None:
    with pytest.raises(ValueError, match="found 0 and 0"):
        fit(Moments(2, 2), Moments(2, 2))


def test_patches_follow_the_tokens_order_and_come_back() -> None:
    images = np.arange(2 * 4 * 6 * 3).reshape(2, 4, 6, 3)
    patches = patches_of(images, (2, 3))
    assert patches.shape == (2, 6, 12)
    assert (patches[0, 4].reshape(2, 2, 3) == images[0, 2:4, 2:4]).all()  # second row, second column
    assert (images_of(patches, (2, 3), (4, 6)) == images).all()


def test_psnr_is_a_mean_over_images_not_over_pixels() -> None:
    images = np.zeros((2, 2, 2, 3))
    found = np.stack([np.full((2, 2, 3), 0.1), np.full((2, 2, 3), 0.01)])
    assert mean_psnr_db(images, found) == pytest.approx(30.0)  # of 20 and 40 dB


def test_mean_colour_is_that_of_the_public_images() -> None:
    images = np.zeros((3, 4, 4, 3))
    images[..., 0], images[0, ..., 2] = 0.25, 0.9
    patches = patches_of(images, (2, 2)).reshape(-1, 12)
    assert mean_colour(moments(np.zeros((12, 1)), patches)) == pytest.approx([0.25, 0.0, 0.3])


def test_the_attackers_noise_has_the_devices_law() -> None:
    """Laplace of scale kappa sigma per channel, then wire steps: standard deviation sqrt 2 kappa sigma."""
    statistics = Statistics((1.0, 2.0), (0.5, 4.0), (3.0, 6.0), (2.0, 12.0))
    tokens = np.zeros((4000, 3, 2), np.float32)
    noisy = released(tokens, statistics, 0.5, 1, np.random.default_rng(4))
    assert noisy[:, 0].std(axis=0) == pytest.approx(0.5 * np.sqrt(2) * np.array([1.0, 2.0]), rel=0.06)
    assert noisy[:, 1:].std(axis=(0, 1)) == pytest.approx(0.5 * np.sqrt(2) * np.array([0.5, 4.0]), rel=0.06)
    without = released(tokens, statistics, 0.0, 1, np.random.default_rng(4))
    assert (without == 0).all()
