"""How much of a picture an attacker reads behind each split at each strength of noise (P3SL's privacy leakage table).

Both sides read it: the server assigns noise by it, a device chooses its split by it. Measuring it is left to
`server_runtime.leakage`, its document to `leakage`. Leakage is FSIM between pictures and reconstructions; strengths are
the standard deviation sigma of the noise at the cut. Shapes: S splits, G strengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from contract.leakage import Table


@dataclass(frozen=True)
class PrivacyTable:
    """`fsim[i][j]` is that of `splits[i]` at `strengths[j]`; both rise. Raises: ValueError for another table."""

    splits: tuple[int, ...]  # (S,)
    strengths: tuple[float, ...]  # (G,)
    fsim: tuple[tuple[float, ...], ...]  # (S, G)

    def __post_init__(self) -> None:
        values = self.as_array()
        if values.shape != (len(self.splits), len(self.strengths)) or values.size == 0:
            raise ValueError(f"expected {len(self.splits)} rows of {len(self.strengths)} values, found {values.shape}")
        if not np.isfinite(values).all():
            raise ValueError("expected finite values of FSIM")
        for name, rising in (("splits", self.splits), ("strengths", self.strengths)):
            if not (rising[0] >= 0 and all(low < high for low, high in zip(rising, rising[1:], strict=False))):
                raise ValueError(f"expected {name} of 0 or more that rise, found {rising}")

    def as_array(self) -> npt.NDArray[np.float32]:
        """(S, G)"""
        return np.array(self.fsim, np.float32)

    def at(self, split: int, sigma: float) -> float:
        """FSIM of a split under noise, linear between strengths and constant beyond. Raises: KeyError."""
        if split not in self.splits:
            raise KeyError(split)
        return float(np.interp(sigma, self.strengths, self.fsim[self.splits.index(split)]))

    @property
    def low(self) -> float:
        """The least value of the whole table: what Eq. 3 is scaled by, with the largest."""
        return float(self.as_array().min())

    @property
    def high(self) -> float:
        """The largest value of the whole table."""
        return float(self.as_array().max())


def from_leakage(table: Table, splits: Sequence[int]) -> PrivacyTable:
    """The levelled curves of a leakage table for these splits, ascending.

    A split that was not measured is taken to show what the nearest shallower one shows that was: deeper layers show
    less, so this is never too little. Splits in front of the first measured one are left out.

    Raises: ValueError where the noise is no standard deviation, or no split is left.
    """
    if table.unit != "sigma":
        raise ValueError(f"its noise is in {table.unit}, and parts that devices train are noised by sigma")
    curves: dict[int, dict[float, float]] = {}
    for point in table.curve:
        curves.setdefault(point.split, {})[point.strength] = point.fsim
    strengths = tuple(sorted({point.strength for point in table.curve}))
    whole = {split: curve for split, curve in curves.items() if len(curve) == len(strengths)}
    rows = {}
    for split in sorted(set(splits)):
        nearest = max((each for each in whole if each <= split), default=None)
        if nearest is not None:
            rows[split] = tuple(whole[nearest][each] for each in strengths)
    if not rows:
        raise ValueError(f"it has no row at or in front of split {max(splits)}")
    return PrivacyTable(tuple(rows), strengths, tuple(rows.values()))
