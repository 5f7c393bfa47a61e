"""From rows of EEFT's reproduction to tables and pictures: mean and spread over seeds, leads, groups, alpha. Pure.

Computing rows is left to `reproduce_eeft_rows`, files and printing to `reproduce_eeft`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from server_runtime.pictures import line_chart, matrix_picture
from server_runtime.report import Drawing, Results, Table
from server_runtime.similarity import distances
from tools.reproduce_table import spread, with_spread

Row = dict[str, Any]


def with_result(row: Row) -> Row:
    """A row with its setting in words, and bytes both ways of all rounds and devices."""
    both = 0
    for each in row["curve"]:
        masked = each["masked_bytes_up"]
        both += (each["bytes_up"] if masked is None else masked) + each["bytes_down"]
    rounds, epochs, rate = len(row["curve"]), row["local_epochs"], row["learning_rate"]
    setting = f"{row['scenario']}, rounds {rounds}, epochs of each {epochs}, rate {rate:g}"
    return {**row, "setting": setting, "bytes": both}


def summarise(rows: Sequence[Row]) -> list[Row]:
    """One cell for each (scenario, method), in the order of coming."""
    settings = dict.fromkeys((row["scenario"], row["method"]) for row in rows)
    return [cell_of([row for row in rows if (row["scenario"], row["method"]) == each]) for each in settings]


def cell_of(rows: Sequence[Row]) -> Row:
    """The figures of rows that differ in their seeds alone."""
    first = rows[0]
    agreed = [value for row in rows if (value := agreement(row)) is not None]
    return {
        "scenario": first["scenario"],
        "method": first["method"],
        "seeds": sorted(row["seed"] for row in rows),
        "accuracy": spread([row["accuracy"] for row in rows]),
        "trained": spread([row["trained_accuracy"] for row in rows]),
        "by_group": {
            name: statistics.fmean(row["accuracy_by_group"][name] for row in rows)
            for name in first["accuracy_by_group"]
        },
        "groups": statistics.fmean(agreed) if agreed else None,
        "bytes_up": statistics.fmean(row["bytes_up_device_round"] for row in rows),
        "bytes_down": statistics.fmean(row["bytes_down_device_round"] for row in rows),
        "parameters": first["parameters"],
        "seconds": statistics.fmean(row["seconds"] for row in rows),
    }


def agreement(row: Row) -> float | None:
    """Of all pairs of devices, the share that the last round's groups and the tasks put alike (Rand index)."""
    found = row["curve"][-1]["groups"]
    if not found:
        return None
    names = sorted(found)
    pairs = [(a, b) for place, a in enumerate(names) for b in names[:place]]
    alike = [(found[a] == found[b]) == (row["devices"][a] == row["devices"][b]) for a, b in pairs]
    return sum(alike) / len(alike) if alike else None


def compare(rows: Sequence[Row], method: str = "eeft") -> list[Row]:
    """What a method is ahead of each other by, in its scenario, on the seeds that both have."""
    known = {(row["scenario"], row["method"], row["seed"]): row["accuracy"] for row in rows}
    pairs = []
    for scenario, other in dict.fromkeys((row["scenario"], row["method"]) for row in rows):
        seeds = [s for (where, m, s) in known if (where, m) == (scenario, other) and (scenario, method, s) in known]
        if other == method or not seeds:
            continue
        leads = [known[scenario, method, seed] - known[scenario, other, seed] for seed in seeds]
        pairs.append({"scenario": scenario, "method": method, "other": other, "lead": spread(leads),
                      "ahead": sum(lead > 0 for lead in leads), "seeds": len(leads)})  # fmt: skip
    return pairs


def results_of(document: Row) -> Results:
    """The page of a reproduction."""
    cells = tuple(
        (
            f"{cell['scenario']}, {cell['method']}", len(cell["seeds"]), with_spread(cell["accuracy"]),
            with_spread(cell["trained"]),
            " ".join(f"{name} {100 * value:.1f}" for name, value in cell["by_group"].items()),
            None if cell["groups"] is None else f"{cell['groups']:.2f}", f"{cell['bytes_up'] / 1e6:.3f}",
            f"{cell['bytes_down'] / 1e6:.3f}", f"{cell['parameters'] / 1e6:.3f}", f"{cell['seconds']:.0f}",
        )
        for cell in document["cells"]
    )  # fmt: skip
    pairs = tuple(
        (f"{pair['scenario']}: {pair['method']} over {pair['other']}", with_spread(pair["lead"]),
         f"{pair['ahead']} of {pair['seeds']}")
        for pair in document["pairs"]
    )  # fmt: skip
    curves = tuple(
        (
            f"{row['scenario']}, {row['method']}, seed {row['seed']}",
            " ".join(f"{each['loss']:.3f}" for each in row["curve"]),
            " ".join(f"{100 * statistics.fmean(each['accuracy'].values()):.1f}" for each in row["curve"]),
        )
        for row in document["rows"]
    )
    facts = ("data", "rounds", "local_epochs", "batch", "learning_rate", "body_learning_rate", "alone", "engine")
    return Results(
        title="EEFT and what it is compared to",
        facts=tuple((name.replace("_", " "), document[name]) for name in facts),
        tables=(
            Table(
                "Accuracy in %, mean and standard deviation over seeds; MB of a device and round; M parameters",
                ("scenario, method", "seeds", "accuracy", "before averaging", "by group", "groups found", "MB up",
                 "MB down", "parameters", "seconds"),
                cells,
                note="groups found: share of device pairs that the last round's groups and the tasks put alike",
            ),
            Table("EEFT ahead by, in points", ("pair", "lead", "ahead"), pairs),
            Table("Every round: mean training loss, accuracy in %", ("row", "loss", "accuracy"), curves),
        ),
        drawings=drawings_of(document["rows"]),
    )  # fmt: skip


def drawings_of(rows: Sequence[Row]) -> tuple[Drawing, ...]:
    """For EEFT's first seed of each scenario: distances of alpha, and mean alpha of each block and group."""
    made, seen = [], set()
    for row in rows:
        if row["alphas"] is None or (row["scenario"], row["method"]) in seen:
            continue
        seen.add((row["scenario"], row["method"]))
        title = f"{row['scenario']}, {row['method']}, seed {row['seed']}"
        names = sorted(row["alphas"])
        alphas = [np.array(row["alphas"][name]) for name in names]
        made.append(Drawing(f"Distances of alpha: {title}", matrix_picture(names, distances(alphas))))
        lines = {
            group: np.mean([row["alphas"][name] for name in names if row["devices"][name] == group], axis=0).tolist()
            for group in dict.fromkeys(row["devices"][name] for name in names)
        }
        made.append(Drawing(f"Mean alpha by block: {title}", line_chart(lines, "block")))
    return tuple(made)
