"""P3SL's upper level: how much noise each split gets, and what becomes of it when the model is not accurate enough.

Pure (algorithms.md 3.1 and 3.2). Symbols: PL(s, sigma) the leakage table, T_FSIM the similarity at which pictures tell
nothing, T_sigma[s] the noise of split s, A_ref and A_min accuracies as fractions. Who chooses which split is the
devices' part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from contract.errors import ConfigError, TrainingError
from contract.leakage import Table, Threshold
from contract.privacy_table import PrivacyTable, from_leakage

LEAST_FACTOR = 0.1  # of one reassignment; Eq. 5 alone would take all noise away at a gap of a half
SILENT = 0.01  # less noise is none
SATURATED_AFTER, GAIN = 2, 0.005  # evaluations in a row without so much more accuracy than the best before them
_ROUNDING = 1e-9


@dataclass(frozen=True)
class NoiseTable:
    """T_sigma: the standard deviation of the noise at the cut, by split."""

    splits: tuple[int, ...]
    sigma: tuple[float, ...]

    def of(self, split: int) -> float:
        """T_sigma[s]. Raises: TrainingError for a split that it has not."""
        if split not in self.splits:
            raise TrainingError(
                f"no noise is assigned to split {split}, but to {', '.join(map(str, self.splits))}",
                "choose another split, or measure this one with leakage-profile",
            )
        return self.sigma[self.splits.index(split)]

    @property
    def is_silent(self) -> bool:
        """Whether no split has any noise left."""
        return not any(self.sigma)


def initial_table(privacy: PrivacyTable, threshold: float) -> NoiseTable:
    """T_sigma[s] = min sigma with PL(s, sigma) <= T_FSIM; the largest sigma where none qualifies."""
    found = []
    for row in privacy.fsim:
        enough = [sigma for sigma, fsim in zip(privacy.strengths, row, strict=True) if fsim <= threshold + _ROUNDING]
        found.append(min(enough, default=privacy.strengths[-1]))
    return NoiseTable(privacy.splits, tuple(found))


def uniform_table(splits: Iterable[int], sigma: float) -> NoiseTable:
    """The same noise everywhere, as the papers give the baselines."""
    ordered = tuple(sorted(set(splits)))
    return NoiseTable(ordered, (sigma,) * len(ordered))


def threshold_of(found: Threshold, own: float) -> float:
    """T_FSIM: the operator's own where it is above 0, else the one that was found with the leakage table.

    Raises: ConfigError where there is none.
    """
    if own > 0.0:
        return own
    if found.fsim is None:
        raise ConfigError(
            f"the leakage table has no T_FSIM: {found.reason}",
            "measure with more public images and classes (leakage-profile --images), or give --fsim-threshold",
        )
    return found.fsim


def first_table(
    wanted: float | str, splits: Sequence[int], leakage: Table | None, own_threshold: float
) -> tuple[NoiseTable | None, PrivacyTable | None]:
    """The noise that training begins with, and what is known of leakage. `wanted` is "auto" (no noise), "table", or one
    sigma for all splits.

    Raises: ConfigError where a table is wanted and there is none.
    """
    privacy = None
    if leakage is not None:
        try:
            privacy = from_leakage(leakage, splits)
        except ValueError as error:
            if wanted == "table":
                raise ConfigError(f"the leakage table does not fit: {error}", _MEASURE) from error
    if isinstance(wanted, float):
        return (uniform_table(splits, wanted) if wanted > 0.0 else None), privacy
    if wanted == "auto":
        return None, privacy
    if leakage is None or privacy is None:
        raise ConfigError(
            "the noise of each split comes from a leakage table, and the backend folder has none", _MEASURE
        )
    return initial_table(privacy, threshold_of(leakage.threshold, own_threshold)), privacy


_MEASURE = "leakage-profile --package DIR -o FILE, then export-frontend --add-table FILE DIR; or give --sigma X"


def offer_of(noise: NoiseTable | None, privacy: PrivacyTable | None, splits: Sequence[int]) -> dict[str, np.ndarray]:
    """What a device chooses its split by: splits (S,), their sigma (S,), strengths (G,) and leakage (S, G).

    Without a leakage table every split is said to show the same.
    """
    if privacy is None:
        ordered = tuple(sorted(splits))
        privacy = PrivacyTable(ordered, (0.0,), ((0.0,),) * len(ordered))
    sigma = [0.0 if noise is None else noise.of(split) for split in privacy.splits]
    return {
        "splits": np.array(privacy.splits, np.uint16),
        "sigma": np.array(sigma, np.float32),
        "strengths": np.array(privacy.strengths, np.float32),
        "leakage": privacy.as_array(),
    }


def accuracy_floor(reference: float, loss: float) -> float:
    """A_min = (1 - beta) A_ref."""
    return (1.0 - loss) * reference


def reassigned(table: NoiseTable, accuracy: float, floor: float) -> NoiseTable:
    """Eq. 5: sigma <- sigma (1 - 2 (A_min - A)) where A < A_min, the factor held in [0.1, 1]."""
    factor = min(1.0, max(LEAST_FACTOR, 1.0 - 2.0 * (floor - accuracy)))
    lowered = (sigma * factor for sigma in table.sigma)
    return NoiseTable(table.splits, tuple(sigma if factor == 1.0 or sigma >= SILENT else 0.0 for sigma in lowered))


def is_saturated(accuracies: Sequence[float]) -> bool:
    """Whether training has got no further: only then an accuracy is held against A_min, which every beginning is
    below."""
    if len(accuracies) <= SATURATED_AFTER:
        return False
    best = max(accuracies[:-SATURATED_AFTER])
    return max(accuracies[-SATURATED_AFTER:]) <= best + GAIN
