import numpy as np
import pytest

from contract.errors import ExportError
from contract.tokens import TokenLayout
from exporter.statistics import TokenMoments

LAYOUT = TokenLayout(prefix=2, grid=(3, 4), dim=5)


def _tokens(count: int, layout: TokenLayout = LAYOUT) -> np.ndarray:
    rng = np.random.default_rng(0)
    tokens = rng.normal(size=(count, layout.count, layout.dim)) * [1, 2, 3, 4, 500] + [0, 10, 0, 0, 1000]
    tokens[:, : layout.prefix] *= 3
    return tokens.astype(np.float32)


def test_they_are_those_of_the_tokens_prefix_and_patches_apart() -> None:
    tokens = _tokens(300)
    moments = TokenMoments(LAYOUT)
    for start in range(0, 300, 7):
        moments.add(tokens[start : start + 7])
    public = moments.finish()
    for part, kind in ((tokens[:, :2].reshape(-1, 5), "prefix"), (tokens[:, 2:].reshape(-1, 5), "patch")):
        exact = part.astype(np.float64)
        np.testing.assert_allclose(getattr(public.statistics, f"sigma_{kind}"), exact.std(0), rtol=1e-5)
        np.testing.assert_allclose(getattr(public.statistics, f"absmax_{kind}"), np.abs(exact).max(0), rtol=1e-6)
        np.testing.assert_allclose(getattr(public, f"mean_{kind}"), exact.mean(0), rtol=1e-9, atol=1e-9)
        covariance, shrunk = np.cov(exact.T, bias=True), len(exact) / (len(exact) + 5)
        expected = np.where(np.eye(5, dtype=bool), covariance, shrunk * covariance)
        np.testing.assert_allclose(getattr(public, f"covariance_{kind}"), expected, rtol=1e-6, atol=1e-6)


def test_few_tokens_give_a_covariance_that_is_nearly_diagonal() -> None:
    layout = TokenLayout(prefix=1, grid=(1, 1), dim=64)
    moments = TokenMoments(layout)
    moments.add(np.random.default_rng(0).normal(size=(4, 2, 64)).astype(np.float32))
    covariance = moments.finish().covariance_prefix
    assert np.linalg.eigvalsh(covariance).min() > 0
    off_diagonal = covariance[~np.eye(64, dtype=bool)]
    assert np.abs(off_diagonal).max() < 0.2 * np.diag(covariance).max()


def test_without_prefix_tokens_their_row_is_zero() -> None:
    layout = TokenLayout(prefix=0, grid=(3, 4), dim=5)
    moments = TokenMoments(layout)
    moments.add(_tokens(3, layout))
    public = moments.finish()
    assert public.statistics.sigma_prefix == (0.0,) * 5 and not public.covariance_prefix.any()
    assert min(public.statistics.sigma_patch) > 0


def test_a_token_that_is_not_finite_is_an_error() -> None:
    tokens = _tokens(2)
    tokens[0, 3, 1] = np.inf
    with pytest.raises(ExportError, match="finite"):
        TokenMoments(LAYOUT).add(tokens)
