"""From rows of shift-aware prototypes to cells and pairs: mean and spread over seeds, and paired differences with their
95 % interval. Pure.

A difference is of two methods on the same seed and held-out domain; its interval is Student's, over seeds. Computing
rows is left to `reproduce_prototypes_rows`, files and printing to `reproduce_prototypes`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from server_runtime.report import Results, Table
from tools.reproduce_table import spread, with_spread

Row = dict[str, Any]
AVERAGE, WORST = "average", "worst"
_SETTING = ("distance", "cut", "copies", "case")
# 97.5 % points of Student's t by degrees of freedom
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def summarise(rows: Sequence[Row]) -> list[Row]:
    """One cell for each (setting, method, held-out domain), and with several domains their average and the worst."""
    cells = []
    for setting in _unique(_setting_of(row) for row in rows):
        own = [row for row in rows if _setting_of(row) == setting]
        domains = _unique(row["held_out"] for row in own)
        for method in _unique(row["method"] for row in own):
            places = [*domains, *([AVERAGE, WORST] if len(domains) > 1 else [])]
            for place in places:
                found = {
                    seed: _figures(own, method, place, seed, domains) for seed in _unique(row["seed"] for row in own)
                }
                known = {seed: each for seed, each in found.items() if each is not None}
                if known:
                    named = dict(zip(_SETTING, setting, strict=True))
                    cells.append(_cell({**named, "method": method, "held_out": place}, known))
    return cells


def _cell(head: Row, found: dict[int, Row]) -> Row:
    values = list(found.values())
    return {
        **head, "seeds": sorted(found), "last": spread([each["last"] for each in values]),
        "best": spread([each["best"] for each in values]),
        "bytes_round": statistics.fmean(each["bytes"] for each in values),
        "round_s": statistics.fmean(each["seconds"] for each in values),
    }  # fmt: skip


def _figures(rows: Sequence[Row], method: str, place: str, seed: int, domains: Sequence[str]) -> Row | None:
    """A seed's figures; of the average and the worst domain only where all domains are there."""
    chosen = [row for row in rows if row["method"] == method and row["seed"] == seed]
    if place in (AVERAGE, WORST):
        if {row["held_out"] for row in chosen} != set(domains):
            return None
    else:
        chosen = [row for row in chosen if row["held_out"] == place]
    if not chosen:
        return None
    join = min if place == WORST else statistics.fmean
    curves = [row["curve"] for row in chosen]
    return {
        "last": join(row["accuracy"] for row in chosen),
        "best": join(row["best_accuracy"] for row in chosen),
        "bytes": statistics.fmean(each["bytes_up"] + each["bytes_down"] for curve in curves for each in curve),
        "seconds": statistics.fmean(each["seconds"] for curve in curves for each in curve),
    }


def compare(rows: Sequence[Row]) -> list[Row]:
    """Each pair of methods, the one that is listed later over the earlier, by the last and by the best round."""
    pairs = []
    for setting in _unique(_setting_of(row) for row in rows):
        own = [row for row in rows if _setting_of(row) == setting]
        domains, seeds = _unique(row["held_out"] for row in own), _unique(row["seed"] for row in own)
        places = [*domains, *([AVERAGE, WORST] if len(domains) > 1 else [])]
        for one, other in itertools.combinations(_unique(row["method"] for row in own), 2):
            for place, which in itertools.product(places, ("last", "best")):
                both = [(_figures(own, other, place, seed, domains), _figures(own, one, place, seed, domains))
                        for seed in seeds]  # fmt: skip
                leads = [a[which] - b[which] for a, b in both if a is not None and b is not None]
                if leads:
                    named = dict(zip(_SETTING, setting, strict=True))
                    head = {**named, "method": other, "over": one, "held_out": place, "round": which}
                    pairs.append({**head, **paired(leads)})
    return pairs


def paired(leads: Sequence[float]) -> Row:
    """Mean difference of pairs, half the width of its 95 % interval (None for one pair), whether 0 is outside."""
    half = None
    if len(leads) > 1:
        quantile = _T[min(len(leads) - 1, len(_T)) - 1]
        half = quantile * statistics.stdev(leads) / math.sqrt(len(leads))
    mean = statistics.fmean(leads)
    exceeds = None if half is None else abs(mean) > half
    return {
        "lead": mean, "half_width": half, "pairs": len(leads), "ahead": sum(lead > 0 for lead in leads),
        "exceeds_noise": exceeds,
    }  # fmt: skip


def verdict(pair: Row) -> str:
    """In words whether a difference is more than seeds make."""
    if pair["exceeds_noise"] is None:
        return "one seed: nothing can be said"
    return "more than seed noise" if pair["exceeds_noise"] else "within seed noise"


def _setting_of(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in _SETTING)


def _unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def results_of(document: Row) -> Results:
    """The page of a reproduction."""
    cells = tuple(
        (
            f"{cell['method']}, {cell['held_out']}", _shown(cell), len(cell["seeds"]), with_spread(cell["last"]),
            with_spread(cell["best"]), f"{cell['bytes_round'] / 1e6:.2f}", f"{cell['round_s']:.2f}",
        )
        for cell in document["cells"]
    )  # fmt: skip
    pairs = tuple(
        (
            f"{pair['method']} over {pair['over']}, {pair['held_out']}, {pair['round']} round", _shown(pair),
            _points(pair),
            f"{pair['ahead']} of {pair['pairs']}", verdict(pair),
        )
        for pair in document["pairs"]
    )  # fmt: skip
    rows = tuple(
        (
            row["method"], row["setting"], row["seed"], f"{100 * row['accuracy']:.2f}",
            f"{100 * row['best_accuracy']:.2f}", f"{row['bytes'] / 1e6:.1f}", f"{row['seconds']:.1f}", row["energy_j"],
            row["energy_quality"],
        )
        for row in document["rows"]
    )  # fmt: skip
    curves = tuple(
        (
            f"{row['method']}, {row['setting']}, seed {row['seed']}",
            " ".join(f"{100 * each['test_accuracy']:.1f}" for each in row["curve"]),
            " ".join(f"{each['loss']:.3f}" for each in row["curve"]),
            " ".join("-" if each["strength"] is None else f"{each['strength']:.2f}" for each in row["curve"]),
        )
        for row in document["rows"]
    )  # fmt: skip
    facts = ("data", "rounds", "batch", "learning_rate", "engine", "label_mode", "rows_missing")
    return Results(
        title="Shift-aware prototypes and what they are made of, on a domain that no device has",
        facts=tuple((name.replace("_", " "), document[name]) for name in facts),
        tables=(
            Table(
                "Test accuracy in %, mean and standard deviation over seeds; MB and seconds of a round",
                ("method, held out", "setting", "seeds", "last round", "best round", "MB", "seconds"),
                cells,
                note="The best round was chosen on the test images, as the paper does; the last was not.",
            ),
            Table(
                "Paired differences in points, with the 95 % interval over seeds",
                ("pair", "setting", "lead", "seeds ahead", "verdict"),
                pairs,
            ),
            Table(
                "Rows",
                ("method", "setting", "seed", "last", "best", "MB", "seconds", "energy in J", "quality"),
                rows,
            ),
            Table("Rounds", ("row", "test accuracy in %", "training loss", "mean lambda"), curves),
        ),
    )


def _points(pair: Row) -> str:
    half = pair["half_width"]
    return f"{100 * pair['lead']:+.2f}" + ("" if half is None else f" +- {100 * half:.2f}")


def _shown(of: Row) -> str:
    return ", ".join(of[name] for name in _SETTING)
