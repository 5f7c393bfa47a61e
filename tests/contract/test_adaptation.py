"""The pace of a site's adaptation."""

from __future__ import annotations

import pytest

from contract.adaptation import rate_share


@pytest.mark.parametrize("epochs", [1, 2, 3, 25, 100])
def test_rates_begin_whole_and_only_fall(epochs: int) -> None:
    shares = [rate_share(epoch, epochs) for epoch in range(1, epochs + 1)]
    assert shares[0] == 1.0 and shares[-1] > 0.0
    assert all(later < earlier for earlier, later in zip(shares, shares[1:], strict=False))
    assert shares[epochs // 2] == pytest.approx(0.5) or epochs % 2
