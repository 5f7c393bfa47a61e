from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.tokens import kept_patches
from contract.wiener import SpatialStatistics, group_count, release_variance, spatial_filter, wiener_matrices


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


def _spatial(rng: np.random.Generator, grid: tuple[int, int], dim: int) -> SpatialStatistics:
    """Components that vary over the positions like a smooth picture."""
    row, column = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    distance = np.hypot(row[:, None] - row, column[:, None] - column)
    smooth = np.exp(-distance / 2.0)
    basis, _ = np.linalg.qr(rng.normal(size=(dim, dim)))
    mean = rng.normal(size=(len(row), dim))
    return SpatialStatistics(mean, basis, rng.uniform(0.2, 3.0, dim), np.stack([smooth] * group_count(dim)))


def _draw(statistics: SpatialStatistics, sigma: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Tokens (count, N, d) with these statistics."""
    patches, dim = statistics.mean.shape
    root = np.linalg.cholesky(statistics.positions[0] + 1e-9 * np.eye(patches))
    components = np.einsum("nk,bkd->bnd", root, rng.normal(size=(count, patches, dim))) * np.sqrt(statistics.values)
    return statistics.mean + (components @ statistics.basis.T) * sigma


@pytest.mark.parametrize("kept", ["all", "checkerboard", "quarter", "none"])
def test_the_spatial_filter_is_the_textbook_estimate_of_every_position(kept: str) -> None:
    rng = np.random.default_rng(0)
    statistics, sigma = _spatial(rng, (4, 3), 6), rng.uniform(0.5, 2.0, 6)
    chosen = kept_patches((4, 3), kept)  # type: ignore[arg-type]
    noise = 2.0 * sigma**2
    found = spatial_filter(statistics, sigma, noise, chosen)
    received = rng.normal(size=(2, len(chosen), 6))
    # All channels of all positions as one vector: S is a Kronecker product, N diagonal.
    across = (statistics.basis * statistics.values) @ statistics.basis.T * np.outer(sigma, sigma)
    signal = np.kron(statistics.positions[0], across)
    sent = (chosen[:, None] * 6 + np.arange(6)).ravel()
    gain = signal[:, sent] @ np.linalg.inv(signal[np.ix_(sent, sent)] + np.diag(np.tile(noise, len(chosen))))
    centred = (received - statistics.mean[chosen]).reshape(2, -1)
    wanted = statistics.mean + (centred @ gain.T).reshape(2, 12, 6)
    np.testing.assert_allclose(found.restore(received.astype(np.float32)), wanted, rtol=1e-3, atol=1e-4)


def test_neighbours_help_and_what_is_not_sent_is_filled_in() -> None:
    rng = np.random.default_rng(1)
    statistics, sigma = _spatial(rng, (4, 4), 8), np.ones(8)
    tokens = _draw(statistics, sigma, 400, rng)
    noisy = tokens + rng.laplace(size=tokens.shape)
    errors = {}
    for kept in ("all", "checkerboard", "quarter", "none"):
        chosen = kept_patches((4, 4), kept)  # type: ignore[arg-type]
        found = spatial_filter(statistics, sigma, np.full(8, 2.0), chosen).restore(noisy[:, chosen])
        errors[kept] = float(np.square(found - tokens).mean())
    alone = float(np.mean(2.0 * statistics.values / (2.0 + statistics.values)))  # one position at a time
    energy = float(np.square(tokens - statistics.mean).mean())
    assert errors["all"] < 0.9 * alone
    assert errors["all"] < errors["checkerboard"] < errors["quarter"] < 0.9 * energy
    assert errors["none"] == pytest.approx(energy, rel=1e-5)  # nothing but the mean is known of it


def test_without_noise_the_spatial_filter_passes_what_was_sent() -> None:
    rng = np.random.default_rng(2)
    statistics, sigma = _spatial(rng, (3, 3), 5), rng.uniform(0.5, 2.0, 5)
    tokens, chosen = _draw(statistics, sigma, 3, rng), kept_patches((3, 3), "checkerboard")
    found = spatial_filter(statistics, sigma, np.zeros(5), chosen).restore(tokens[:, chosen])
    np.testing.assert_allclose(found[:, chosen], tokens[:, chosen], atol=1e-3)


def test_the_same_filter_works_on_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    statistics, sigma = _spatial(rng, (3, 2), 4), np.ones(4)
    found = spatial_filter(statistics, sigma, np.ones(4), kept_patches((3, 2), "all"))
    received = rng.normal(size=(2, 6, 4)).astype(np.float32)
    moved = found.converted(torch.from_numpy).restore(torch.from_numpy(received))
    np.testing.assert_allclose(moved.numpy(), found.restore(received), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["mean", "basis", "values", "positions"])
def test_spatial_statistics_that_do_not_fit_or_are_not_finite_are_refused(name: str) -> None:
    rng = np.random.default_rng(4)
    good = _spatial(rng, (2, 2), 4)
    broken = replace(good, **{name: np.full_like(getattr(good, name), np.nan)})
    with pytest.raises(ValueError, match="finite"):
        spatial_filter(broken, np.ones(4), np.ones(4), np.arange(4))
    with pytest.raises(ValueError, match="fit"):
        spatial_filter(replace(good, mean=good.mean[:3]), np.ones(4), np.ones(4), np.arange(3))


@pytest.mark.parametrize(("components", "groups"), [(384, 12), (1024, 32), (48, 2), (100, 4), (97, 97), (1, 1)])
def test_components_are_shared_out_in_equal_groups_of_at_most_32(components: int, groups: int) -> None:
    assert group_count(components) == groups
