"""P3SL's lower level against its invariants (algorithms.md 3.4), and the rules of the adaptive baselines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from contract.errors import ConfigError
from contract.privacy_table import PrivacyTable
from edge_runtime.choose_split import (
    InfeasibleError,
    Offer,
    Preferences,
    SigmaFloor,
    SplitCost,
    choose_by_delay,
    choose_by_sum,
    choose_split,
    corrected,
    has_drifted,
    read_floor,
)

SPLITS = (1, 2, 3, 4)
PRIVACY = PrivacyTable(SPLITS, (0.0, 2.5), ((0.53, 0.37), (0.53, 0.36), (0.43, 0.35), (0.37, 0.33)))
OFFER = Offer(PRIVACY, {1: 2.0, 2: 1.5, 3: 1.0, 4: 0.5})
RISING = tuple(SplitCost(split, 0.5 + 0.25 * split, 4.0 + split, 0.1 * split) for split in SPLITS)  # deeper costs more
FALLING = tuple(SplitCost(s, joules, 5.0, 0.1) for s, joules in zip(SPLITS, (0.9, 0.95, 0.6, 0.63), strict=True))


def fsim(split: int) -> float:
    return PRIVACY.at(split, OFFER.sigma[split])


def test_invariant_5_privacy_alone_chooses_the_least_fsim_and_energy_alone_the_least_energy() -> None:
    assert choose_split(OFFER, RISING, Preferences(1.0)) == min(SPLITS, key=fsim)
    assert choose_split(OFFER, RISING, Preferences(0.0)) == 1
    assert choose_split(OFFER, FALLING, Preferences(0.0)) == 3


def test_invariant_5_the_unit_of_energy_does_not_matter() -> None:
    for alpha in (0.0, 0.2, 0.4, 0.5, 0.7, 0.9, 1.0):
        in_kilojoules = [replace(cost, energy_j=(cost.energy_j or 0.0) / 1000) for cost in RISING]
        assert choose_split(OFFER, in_kilojoules, Preferences(alpha)) == choose_split(OFFER, RISING, Preferences(alpha))


def test_invariant_5_the_power_cap_is_obeyed_and_what_cannot_be_is_said() -> None:
    for cap_w in (5.0, 6.0, 7.5, 9.0):
        for alpha in (0.0, 0.5, 1.0):
            chosen = choose_split(OFFER, RISING, Preferences(alpha, cap_w))
            assert (RISING[chosen - 1].peak_w or 0.0) <= cap_w
    with pytest.raises(InfeasibleError, match="power cap of 4.5 W"):
        choose_split(OFFER, RISING, Preferences(0.5, 4.5))
    with pytest.raises(InfeasibleError, match="power cap"):  # a peak that nobody measured is under no cap
        choose_split(OFFER, [SplitCost(1, 1.0)], Preferences(0.5, 9.0))


def test_the_more_privacy_weighs_the_deeper_the_split() -> None:
    chosen = [choose_split(OFFER, RISING, Preferences(alpha / 20)) for alpha in range(21)]
    assert chosen == sorted(chosen) and chosen[0] < chosen[-1]


def test_where_energy_falls_with_depth_splits_in_front_of_the_cheapest_are_dropped() -> None:
    shallow_hides = Offer(PRIVACY, {1: 2.5, 2: 2.5, 3: 0.0, 4: 0.0})
    assert choose_split(shallow_hides, FALLING, Preferences(1.0)) == 4
    assert choose_split(shallow_hides, RISING, Preferences(1.0)) == 2


def test_ties_go_to_less_energy_and_then_to_fewer_layers() -> None:
    flat = PrivacyTable(SPLITS, (0.0,), ((0.4,),) * 4)
    even = Offer(flat, dict.fromkeys(SPLITS, 0.0))
    assert choose_split(even, RISING, Preferences(1.0)) == 1
    assert choose_split(even, [SplitCost(split, 2.0) for split in (3, 2, 4)], Preferences(0.5)) == 2


def test_a_split_with_less_noise_than_the_devices_floor_is_never_chosen() -> None:
    wishes = Preferences(1.0, sigma_floor=read_floor("0.8"))
    assert choose_split(OFFER, RISING, wishes) == 3
    with pytest.raises(InfeasibleError, match="sigma_floor"):
        choose_split(OFFER, RISING, Preferences(1.0, sigma_floor=SigmaFloor(3.0)))
    with pytest.raises(InfeasibleError, match="sigma_floor"):  # not by hand either
        choose_split(OFFER, (), Preferences(split=4, sigma_floor=SigmaFloor(0.0, {4: 0.6})))


def test_a_choice_by_hand_needs_no_table_but_an_offer() -> None:
    assert choose_split(OFFER, (), Preferences(split=2)) == 2
    with pytest.raises(InfeasibleError, match="splits of this device: 9; offered: 1, 2, 3, 4"):
        choose_split(OFFER, (), Preferences(split=9))


def test_unknown_energy_is_not_zero() -> None:
    costs = [SplitCost(1, None), SplitCost(2, 5.0)]
    assert choose_split(OFFER, costs, Preferences(0.0)) == 2
    with pytest.raises(InfeasibleError, match="the energy of no split"):
        choose_split(OFFER, [SplitCost(1, None)], Preferences(0.5))


@pytest.mark.parametrize("text", ["x", "-1", "1=", "a=1", "nan", "inf"])
def test_a_floor_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="sigma_floor"):
        read_floor(text)


def test_a_floor_may_differ_by_split() -> None:
    floor = read_floor("0.5, 1=1.5")
    assert (floor.of(1), floor.of(2)) == (1.5, 0.5)


# -- the baselines


def test_asl_is_fast_first_and_saves_once_it_is_over_its_budget() -> None:
    """The fastest split costs most: the queue drives it to the cheap one and back, and the mean stays at the budget."""
    costs = [SplitCost(1, 3.0, None, 1.0), SplitCost(2, 1.0, None, 3.0)]
    chosen: list[int] = []
    for _ in range(40):
        chosen.append(choose_by_delay(OFFER, costs, Preferences(), chosen))
    assert chosen[0] == 1 and set(chosen) == {1, 2}
    mean_j = sum(costs[split - 1].energy_j or 0.0 for split in chosen) / len(chosen)
    assert mean_j == pytest.approx(2.0, abs=0.2)


def test_ares_takes_the_least_sum_of_time_and_energy() -> None:
    costs = [SplitCost(1, 3.0, None, 3.0), SplitCost(2, 2.0, None, 2.0), SplitCost(3, 1.0, None, 6.0)]
    assert choose_by_sum(OFFER, costs, Preferences()) == 2


def test_the_baselines_obey_the_power_cap_too() -> None:
    wishes = Preferences(power_cap_w=5.0)
    assert choose_by_sum(OFFER, RISING, wishes) == choose_by_delay(OFFER, RISING, wishes, ()) == 1
    with pytest.raises(InfeasibleError, match="time"):
        choose_by_sum(OFFER, [SplitCost(1, 1.0)], Preferences())


# -- a table that is no longer true


def test_energy_that_left_the_table_by_a_tenth_takes_its_place() -> None:
    assert not has_drifted(1.0, 1.09) and has_drifted(1.0, 1.11) and has_drifted(1.0, 0.89)
    assert corrected(RISING, 2, 1.05, False) == RISING
    assert corrected(RISING, 2, 1.2, False)[1] == replace(RISING[1], energy_j=1.2)
    assert corrected(RISING, 2, None, False) == RISING  # no meter


def test_a_device_that_slowed_down_leaves_out_splits_with_no_lower_peak() -> None:
    assert [cost.split for cost in corrected(RISING, 3, None, True)] == [1, 2]
    assert corrected(RISING[:1], 1, None, True) == RISING[:1]  # with nothing lower, it stays
