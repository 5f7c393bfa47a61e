"""Measures this device's energy table anew in the middle of a run, where the old one is no longer true.

A short form of `edge-profile --train`: the same phases, blocks and idle baselines on drawn images, in so many seconds
for all splits together. Nothing leaves the device, and the part in training stays as it is. What the link takes is not
measured here: it stays what the old table said. When it is done, and what follows, is `own_choice`'s part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from edge_runtime.choose_split import SplitCost
from edge_runtime.meters import Meter, recording
from edge_runtime.profiling.measuring import Bench, Candidate, Plan, in_drawn_order, measure
from edge_runtime.profiling.rows import BLOCKS_LEAST, Link, Row, make_row

BASELINE, WARM_UP = 0.1, 0.1  # of a split's seconds: each baseline, and the warm-up; the rest are its blocks
SLICE_S = 0.1  # of waiting, after which it is asked whether to stop
SLOW_SENSOR_S = 1.0  # of window and doubt: blocks of less than a second tell nothing then


def is_quick(meter: Meter) -> bool:
    """Whether short blocks tell anything by this meter."""
    return meter.quality in ("measured", "derived") and meter.timing.window_s + meter.timing.doubt_s <= SLOW_SENSOR_S


def plan_of(seconds: float, candidates: Sequence[Candidate]) -> Plan:
    """How so many seconds are spent on all candidates together."""
    each_s = seconds / len(candidates)
    blocks = BLOCKS_LEAST * len(candidates[0].phase_names)
    block_s = each_s * (1.0 - 2 * BASELINE - WARM_UP) / blocks
    return Plan(BLOCKS_LEAST, block_s, BASELINE * each_s, WARM_UP * each_s, 0.0, 0)


def remeasure(
    candidates: Sequence[Candidate],
    seconds: float,
    bench: Bench,
    meter: Meter,
    old: Sequence[SplitCost],
) -> tuple[SplitCost, ...]:
    """The costs of all splits of the `old` table that have a candidate. A split of which the meter told no energy keeps
    its old cost. Raises: whatever the work raises."""
    known = {cost.split: cost for cost in old}
    wanted = [candidate for candidate in candidates if candidate.point.split in known]
    if not wanted:
        return tuple(old)
    plan = plan_of(seconds, wanted)
    for candidate in in_drawn_order(wanted, plan.seed):
        with recording(meter) as trace:
            measured = measure(candidate, plan, bench)
            bench.wait(meter.settle_s)
        row = make_row(candidate.point, candidate.phase_names, measured, trace, "no meter", Link())
        known[row.point.split] = _renewed(known[row.point.split], row)
    return tuple(known[cost.split] for cost in old)


def _renewed(old: SplitCost, row: Row) -> SplitCost:
    if row.energy is None:
        return old
    peak_w = None if row.energy.power is None else row.energy.power.peak_w
    return SplitCost(
        old.split, row.energy.measured_j.mean + old.link_j, old.peak_w if peak_w is None else peak_w,
        row.seconds_per_image.mean + old.link_s, old.link_j, old.link_s,
    )  # fmt: skip


def bench_of(tick: Callable[[], None]) -> Bench:
    """This device, in a run: `tick` is called often, and may stop. Heat is watched by the run itself."""

    def wait(seconds: float) -> None:
        ends_s = time.monotonic() + seconds
        while (left_s := ends_s - time.monotonic()) > 0.0:
            tick()
            time.sleep(min(SLICE_S, left_s))
        tick()

    return Bench(time.monotonic, wait, lambda: None, lambda: tuple, lambda seconds: None, tick)
