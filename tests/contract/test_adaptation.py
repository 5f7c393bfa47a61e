"""The pace of a site's adaptation."""

from __future__ import annotations

import pytest

from contract.adaptation import is_probing, rate_share


@pytest.mark.parametrize("epochs", [1, 2, 3, 4, 10, 25, 100])
def test_the_head_learns_alone_first_and_rates_only_fall(epochs: int) -> None:
    alone = [is_probing(epoch, epochs) for epoch in range(1, epochs + 1)]
    assert alone == sorted(alone, reverse=True) and not alone[-1]
    assert sum(alone) == int(0.3 * epochs + 1e-9)
    shares = [rate_share(epoch, epochs) for epoch in range(1, epochs + 1)]
    assert shares[sum(alone)] == 1.0  # the backend begins at its whole rate
    assert shares == sorted(shares, reverse=True) and 0.0 < shares[-1] <= 1.0
