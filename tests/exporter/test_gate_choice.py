"""The decision of a gated export on drawn points: limits, the front, the choice; and texts that are no limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import UsageError
from contract.leakage import Figures
from exporter.gate_choice import Energy, Limit, Point, beats, choose, judge, nearest, read_limits

UNKNOWN = Energy(None, "unknown", "no table")
FEW = st.sampled_from([0.1, 0.2, 0.3, 0.4])  # few values, so that equal ones meet
ENERGIES = st.just(UNKNOWN) | st.builds(Energy, FEW, st.just("measured"), st.just("meter"))
POINTS = st.builds(
    Point, split=st.integers(1, 3), precision=st.sampled_from(["int8", "float32"]),
    sent=st.sampled_from(["all", "checkerboard"]), kappa=FEW, accuracy=st.none() | FEW,
    leakage=st.builds(Figures, st.sampled_from([12.0, 15.0, 18.0]), FEW, FEW, st.none()), unprotected=st.none(),
    energy=ENERGIES, sent_bytes=st.sampled_from([100, 200]), ms=st.sampled_from([1.0, 2.0]),
    refused=st.none() | st.just("too few right answers"),
)  # fmt: skip
LIMITS = st.lists(
    st.builds(Limit, st.sampled_from(["ssim", "fsim"]), FEW), min_size=1, max_size=2, unique_by=lambda each: each.metric
)
MAX_ENERGY = st.none() | FEW

PLAIN = Point(2, "int8", "all", 0.5, 0.4, Figures(16.0, 0.3, 0.6, None), None, UNKNOWN, 100, 1.0)


@given(st.lists(POINTS, max_size=8), LIMITS, MAX_ENERGY)
def test_what_is_chosen_is_within_every_limit_and_no_other_within_is_more_accurate(
    points: list[Point], limits: list[Limit], max_energy_j: float | None
) -> None:
    judged = judge(points, limits, max_energy_j)
    within = [
        point
        for point in points
        if all(limit.of(point.leakage) < limit.below for limit in limits)
        and (max_energy_j is None or (point.energy.joules is not None and point.energy.joules <= max_energy_j))
        and point.accuracy is not None
        and point.refused is None
    ]
    assert [each.point for each in judged if not each.faults] == within
    chosen = choose(judged)
    assert (chosen is None) == (not within)
    if chosen is not None:
        assert chosen in within and all(other.accuracy <= chosen.accuracy for other in within)


@given(st.lists(POINTS, min_size=1, max_size=8), LIMITS)
def test_the_front_is_beaten_by_nothing_and_beats_all_others(points: list[Point], limits: list[Limit]) -> None:
    judged = judge(points, limits, None)
    front = [each.point for each in judged if each.on_front]
    assert front
    for each in judged:
        beaten = any(beats(other, each.point, limits) for other in front)
        assert beaten != each.on_front


@given(POINTS, POINTS, LIMITS)
def test_no_two_points_beat_each_other(one: Point, other: Point, limits: list[Limit]) -> None:
    assert not (beats(one, other, limits) and beats(other, one, limits))
    assert not beats(one, one, limits)


@given(st.lists(POINTS, min_size=1, max_size=8), LIMITS, MAX_ENERGY)
def test_the_choice_does_not_hang_on_the_order(
    points: list[Point], limits: list[Limit], max_energy_j: float | None
) -> None:
    first, second = (choose(judge(each, limits, max_energy_j)) for each in (points, points[::-1]))
    assert (first is None) == (second is None)
    if first is not None and second is not None:
        assert (first.accuracy, first.leakage.ssim) == (second.accuracy, second.leakage.ssim)


def test_unknown_energy_is_outside_every_limit_of_energy() -> None:
    judged = judge([PLAIN], read_limits(["ssim<0.9"]), 100.0)
    assert choose(judged) is None and judged[0].faults == ("energy unknown, limit 100 J: no table",)
    known = replace(PLAIN, energy=Energy(0.2, "modelled", "watts"))
    assert choose(judge([PLAIN, known], read_limits(["ssim<0.9"]), 0.2)) == known


def test_a_limit_itself_is_too_much() -> None:
    assert choose(judge([PLAIN], read_limits(["ssim<0.3"]), None)) is None
    assert choose(judge([PLAIN], read_limits(["ssim<0.31", "psnr < 16.1"]), None)) == PLAIN


def test_nothing_beats_what_it_cannot_be_compared_with() -> None:
    known = replace(PLAIN, energy=Energy(0.2, "measured", "meter"), accuracy=0.9)
    assert not beats(known, PLAIN, ()) and not beats(PLAIN, known, ())
    assert beats(replace(PLAIN, accuracy=0.9), PLAIN, ())


def test_of_what_was_refused_the_nearest_has_the_fewest_faults() -> None:
    worse = replace(PLAIN, leakage=Figures(20.0, 0.2, 0.6, None))
    judged = judge([worse, PLAIN], read_limits(["ssim<0.1", "psnr<17"]), None)
    found = nearest(judged)
    assert found is not None and found.point == PLAIN and found.faults == ("ssim 0.300, limit ssim<0.1",)
    assert nearest(()) is None


@pytest.mark.parametrize(
    ("texts", "limits"),
    [
        (["ssim<0.35"], [("ssim", 0.35)]),
        ([" PSNR < 18 "], [("psnr", 18.0)]),
        (["fsim<.4", "ssim<1"], [("fsim", 0.4), ("ssim", 1.0)]),
        ([], []),
    ],
)
def test_limits_are_read(texts: list[str], limits: list[tuple[str, float]]) -> None:
    assert [(each.metric, each.below) for each in read_limits(texts)] == limits


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["ssim"], "a metric, < and a number, found 'ssim'"),
        (["ssim>0.3"], "found 'ssim>0.3'"),
        (["ssim<=0.3"], "found 'ssim<=0.3'"),
        (["ssim<nan"], "found 'ssim<nan'"),
        (["ssim<-1"], "found 'ssim<-1'"),
        (["sssim<0.3"], "did you mean 'ssim'"),
        (["lpips<0.3"], "no metric 'lpips'"),
        (["ssim<35"], "more than 0 and at most 1"),
        (["psnr<0"], "more than 0 dB"),
        (["ssim<0.3", "ssim<0.4"], "ssim more than once"),
        ([""], "found ''"),
    ],
)
def test_what_is_no_limit_is_explained(texts: list[str], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_limits(texts)
    assert said in refused.value.cause and refused.value.cure
