"""P3SL's lower level: which split a device chooses, from its own energy table, its own wishes and the server's tables.

Pure (algorithms.md 3.1, Eq. 3). Symbols: s a split, E(s) the energy of an image, p_peak(s) the peak power, P_max the
cap, alpha the weight of privacy, T_sigma[s] the noise that the server would have at s. The rules of the two adaptive
baselines (section 7) choose by the same tables. Reading the energy table is left to `own_choice`.

Nothing that is handed in here ever leaves the device: its answer is the split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from contract.errors import ConfigError

if TYPE_CHECKING:  # it brings numpy, and the settings' help comes through here
    from contract.privacy_table import PrivacyTable

DRIFT = 0.10  # of the energy that the table says: beyond, it is measured anew


class InfeasibleError(Exception):
    """No split will do, and why; for the device's owner only."""


@dataclass(frozen=True)
class SplitCost:
    """What one image costs at a split on this device; None: unknown. `link_j` and `link_s` are what energy and time
    have of the link, and no turn's training measures."""

    split: int
    energy_j: float | None
    peak_w: float | None = None
    time_s: float | None = None
    link_j: float = 0.0
    link_s: float = 0.0


@dataclass(frozen=True)
class SigmaFloor:
    """The least noise that this device accepts: sigma_min(s), `default` where `own` names no split."""

    default: float = 0.0
    own: Mapping[int, float] = field(default_factory=dict)

    def of(self, split: int) -> float:
        """sigma_min(s)."""
        return self.own.get(split, self.default)


@dataclass(frozen=True)
class Preferences:
    """The owner's wishes. `privacy_weight` is alpha_i; `split` is a choice that was made by hand."""

    privacy_weight: float = 0.5
    power_cap_w: float | None = None
    sigma_floor: SigmaFloor = field(default_factory=SigmaFloor)
    split: int | None = None


@dataclass(frozen=True)
class Offer:
    """The server's tables: PL, and T_sigma by split."""

    privacy: PrivacyTable
    sigma: Mapping[int, float]


def read_floor(text: str) -> SigmaFloor:
    """`0.5`, `1=1.5,5=0.2` or both together. Raises: ConfigError."""
    default, own = 0.0, dict[int, float]()
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        split, named, number = entry.rpartition("=")
        try:
            value = float(number)
            if not 0.0 <= value < float("inf"):
                raise ValueError(number)
            if named:
                own[int(split)] = value
            else:
                default = value
        except ValueError:
            raise ConfigError(
                f"sigma_floor should be a number, or SPLIT=NUMBER for single splits, found {entry!r}",
                "write for example: --sigma-floor 0.5,1=1.5",
            ) from None
    return SigmaFloor(default, own)


def choose_split(offer: Offer, costs: Sequence[SplitCost], wishes: Preferences) -> int:
    """s = argmin alpha FSIM(T_sigma[s], s) + (1 - alpha) E(s), both scaled to [0, 1].

    Energy is scaled over the splits that are left, FSIM over the whole table (3.2). Where energy falls with depth,
    splits in front of the cheapest show more and cost more: they are dropped. Ties go to less energy, then to fewer
    layers.

    Raises: InfeasibleError when no split is left.
    """
    left = feasible(offer, costs, wishes)
    if wishes.split is not None:
        return wishes.split
    known = [cost for cost in left if cost.energy_j is not None]
    if not known:
        raise InfeasibleError("the energy of no split that is left is known: measure with edge-profile --train -o")
    energy_j = {cost.split: cost.energy_j or 0.0 for cost in known}
    cheapest = min(energy_j, key=lambda split: (energy_j[split], split))
    if energy_j[max(energy_j)] < energy_j[min(energy_j)]:
        energy_j = {split: joules for split, joules in energy_j.items() if split >= cheapest}
    alpha = wishes.privacy_weight
    shown = {split: offer.privacy.at(split, offer.sigma[split]) for split in energy_j}
    low, high = offer.privacy.low, offer.privacy.high

    def weigh(split: int) -> tuple[float, float, int]:
        cost = alpha * _scaled(shown[split], low, high)
        cost += (1.0 - alpha) * _scaled(energy_j[split], min(energy_j.values()), max(energy_j.values()))
        return round(cost, 12), energy_j[split], split

    return min(energy_j, key=weigh)


def feasible(offer: Offer, costs: Sequence[SplitCost], wishes: Preferences) -> list[SplitCost]:
    """Splits that are offered, measured, under the power cap and not under the device's floor of noise.

    Raises: InfeasibleError that says what rules them out.
    """
    offered = set(offer.sigma) & set(offer.privacy.splits)
    if wishes.split is not None:
        costs = [SplitCost(wishes.split, None)]
    left = [cost for cost in costs if cost.split in offered]
    if not left:
        ours, theirs = (", ".join(map(str, sorted(each))) or "none" for each in ({c.split for c in costs}, offered))
        raise InfeasibleError(f"splits of this device: {ours}; offered: {theirs}")
    loud = [cost for cost in left if offer.sigma[cost.split] >= wishes.sigma_floor.of(cost.split) - 1e-6]
    if not loud:
        raise InfeasibleError("the noise of every split is below this device's sigma_floor")
    cap_w = wishes.power_cap_w
    if cap_w is None or wishes.split is not None:
        return loud
    cool = [cost for cost in loud if cost.peak_w is not None and cost.peak_w <= cap_w]
    if not cool:
        raise InfeasibleError(f"no split is known to stay under the power cap of {cap_w:g} W")
    return cool


def choose_by_delay(offer: Offer, costs: Sequence[SplitCost], wishes: Preferences, earlier: Sequence[int]) -> int:
    """ASL: drift plus penalty, the least delay under a long-term energy budget.

    The budget of an epoch is the mean energy of the splits that are left; Q <- max(Q + E(s) / budget - 1, 0) after each
    of the `earlier` choices, and s = argmin T(s) / mean T + Q E(s) / budget.

    Raises: InfeasibleError.
    """
    left, mean_j, mean_s = _known(offer, costs, wishes)
    energy = {cost.split: (cost.energy_j or 0.0) / mean_j for cost in left}
    queue = 0.0
    for split in earlier:
        queue = max(queue + energy.get(split, 1.0) - 1.0, 0.0)
    return min(left, key=lambda cost: ((cost.time_s or 0.0) / mean_s + queue * energy[cost.split], cost.split)).split


def choose_by_sum(offer: Offer, costs: Sequence[SplitCost], wishes: Preferences) -> int:
    """ARES: the least sum of time and energy, each relative to its mean over the splits that are left.

    Raises: InfeasibleError.
    """
    left, mean_j, mean_s = _known(offer, costs, wishes)

    def weigh(cost: SplitCost) -> tuple[float, int]:
        return (cost.time_s or 0.0) / mean_s + (cost.energy_j or 0.0) / mean_j, cost.split

    return min(left, key=weigh).split


def _known(offer: Offer, costs: Sequence[SplitCost], wishes: Preferences) -> tuple[list[SplitCost], float, float]:
    """Feasible splits of known energy and time, and the means of both."""
    left = feasible(offer, costs, wishes)
    if wishes.split is not None:
        return [SplitCost(wishes.split, 1.0, None, 1.0)], 1.0, 1.0
    left = [cost for cost in left if cost.energy_j and cost.time_s]
    if not left:
        raise InfeasibleError("energy and time of no split that is left are known: measure with edge-profile --train")
    mean_j = sum(cost.energy_j or 0.0 for cost in left) / len(left)
    return left, mean_j, sum(cost.time_s or 0.0 for cost in left) / len(left)


def _scaled(value: float, low: float, high: float) -> float:
    """Min-max; where all are equal, 0."""
    return (value - low) / (high - low) if high > low else 0.0


def has_drifted(expected_j: float, measured_j: float) -> bool:
    """Whether an image's energy left the table by more than 10 %."""
    return abs(measured_j - expected_j) > DRIFT * expected_j


def corrected(
    costs: Sequence[SplitCost], split: int, measured_j: float | None, slowed_down: bool
) -> tuple[SplitCost, ...]:
    """The table after a turn at `split`: with the energy that was measured there, the link's with it, where it left the
    table.

    A device that slowed itself down cannot keep up this split's peak power: as long as a split with a lower peak is
    known, this one and all with no lower peak are left out.
    """
    changed = []
    for cost in costs:
        joules = cost.energy_j
        if cost.split == split and measured_j is not None and (joules is None or has_drifted(joules, measured_j)):
            joules = measured_j
        changed.append(replace(cost, energy_j=joules))
    here = next((cost.peak_w for cost in changed if cost.split == split), None)
    if slowed_down and here is not None:
        lower = [cost for cost in changed if cost.peak_w is not None and cost.peak_w < here]
        return tuple(lower or changed)
    return tuple(changed)
