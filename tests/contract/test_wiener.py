import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.wiener import release_variance, wiener_matrices


def _spd(rng: np.random.Generator, dim: int, rank: int) -> np.ndarray:
    factor = rng.normal(size=(dim, rank)) * rng.lognormal(sigma=2.0, size=(dim, 1))
    return factor @ factor.T / rank


def test_it_is_the_textbook_filter() -> None:
    rng = np.random.default_rng(0)
    mean, signal, noise = rng.normal(size=6), _spd(rng, 6, 12), rng.uniform(0.1, 2.0, 6)
    matrix, offset = wiener_matrices(mean, signal, noise)
    expected = signal @ np.linalg.inv(signal + np.diag(noise))
    np.testing.assert_allclose(matrix, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(offset, mean - expected @ mean, rtol=1e-4, atol=1e-4)
    assert matrix.dtype == offset.dtype == np.float32


def test_it_lowers_the_error_of_noisy_tokens() -> None:
    rng = np.random.default_rng(1)
    signal = _spd(rng, 8, 3)
    tokens = 4.0 + rng.multivariate_normal(np.zeros(8), signal, size=4000)
    sigma = np.sqrt(np.diag(signal))
    steps = np.full(8, 0.01)
    noisy = tokens + rng.laplace(scale=sigma, size=tokens.shape)
    matrix, offset = wiener_matrices(np.full(8, 4.0), signal, release_variance(sigma, 1.0, steps))
    filtered = noisy @ matrix.T + offset
    assert np.square(filtered - tokens).mean() < 0.4 * np.square(noisy - tokens).mean()


def test_variance_of_the_release_is_that_of_laplace_and_rounding() -> None:
    rng = np.random.default_rng(2)
    sigma, steps = np.array([0.5, 2.0]), np.array([0.3, 1.0])
    tokens = rng.normal(size=(200_000, 2)) * 5
    noisy = np.round((tokens + rng.laplace(scale=0.7 * sigma, size=tokens.shape)) / steps) * steps
    np.testing.assert_allclose((noisy - tokens).var(axis=0), release_variance(sigma, 0.7, steps), rtol=0.03)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.sampled_from([0.0, 0.25, 4.0]), st.integers(0, 99))
def test_any_covariance_gives_a_finite_filter_that_never_amplifies(
    dim: int, rank: int, kappa: float, seed: int
) -> None:
    signal = _spd(np.random.default_rng(seed), dim, rank)
    noise = release_variance(np.sqrt(np.diag(signal)), kappa, np.full(dim, 1e-3))
    matrix, offset = wiener_matrices(np.zeros(dim), signal, noise)
    assert np.isfinite(matrix).all() and np.isfinite(offset).all()
    eigenvalues = np.linalg.eigvals(matrix.astype(np.float64))
    assert (eigenvalues.real > -1e-3).all() and (eigenvalues.real < 1 + 1e-3).all()


def test_without_noise_the_tokens_pass() -> None:
    rng = np.random.default_rng(3)
    signal = _spd(rng, 6, 12)
    matrix, offset = wiener_matrices(rng.normal(size=6), signal, np.zeros(6))
    tokens = rng.multivariate_normal(np.zeros(6), signal, size=50)
    np.testing.assert_allclose(tokens @ matrix.T, tokens, atol=1e-2 * np.abs(tokens).max())
    assert np.isfinite(offset).all()


def test_channels_that_never_vary_return_their_mean() -> None:
    signal = np.diag([1.0, 0.0, 0.0])
    matrix, offset = wiener_matrices([0.0, 3.0, 0.0], signal, [0.0, 0.0, 1.0])
    estimate = np.array([2.0, 3.0, 5.0]) @ matrix.T + offset
    np.testing.assert_allclose(estimate, [2.0, 3.0, 0.0], atol=1e-4)


def test_no_statistics_at_all_give_zeros_not_nan() -> None:
    matrix, offset = wiener_matrices(np.zeros(4), np.zeros((4, 4)), np.zeros(4))
    assert not matrix.any() and not offset.any()


@pytest.mark.parametrize(
    ("mean", "signal", "noise"),
    [
        (np.zeros(3), np.eye(2), np.zeros(3)),
        (np.zeros(3), np.eye(3), np.zeros(2)),
        (np.array([np.nan]), np.eye(1), np.zeros(1)),
        (np.zeros(1), np.array([[np.inf]]), np.zeros(1)),
        (np.zeros(1), np.eye(1), np.array([-1.0])),
    ],
)
def test_unfit_statistics_are_refused(mean: np.ndarray, signal: np.ndarray, noise: np.ndarray) -> None:
    with pytest.raises(ValueError):
        wiener_matrices(mean, signal, noise)
