"""From rows of split training to cells: mean and spread over seeds, and which strategy beats which. Pure.

Computing rows is left to `reproduce_split_rows`, files and printing to `reproduce_split`.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from server_runtime.report import Results, Table
from tools.reproduce_table import spread, with_spread

Row = dict[str, Any]


def summarise(rows: Sequence[Row]) -> list[Row]:
    """One cell for each (model, strategy), in the order of coming."""
    settings = list(dict.fromkeys((row["model"], row["strategy"]) for row in rows))
    return [
        cell_of(sorted((row for row in rows if (row["model"], row["strategy"]) == each), key=lambda row: row["seed"]))
        for each in settings
    ]


def cell_of(rows: Sequence[Row]) -> Row:
    """The figures of rows that differ in their seeds alone; bytes of an epoch, of all devices together."""
    known = [row["device_accuracy"] for row in rows if row["device_accuracy"] is not None]
    epochs = [epoch for row in rows for epoch in row["curve"]]
    return {
        "model": rows[0]["model"],
        "strategy": rows[0]["strategy"],
        "seeds": [row["seed"] for row in rows],
        "last": spread([row["curve"][-1]["test_accuracy"] for row in rows]),
        "best": spread([max(epoch["test_accuracy"] for epoch in row["curve"]) for row in rows]),
        "last_loss": spread([row["curve"][-1]["loss"] for row in rows]),
        "device": spread(known) if len(known) == len(rows) else None,
        "bytes_up": statistics.fmean(epoch["bytes_up"] for epoch in epochs),
        "bytes_down": statistics.fmean(epoch["bytes_down"] for epoch in epochs),
        "epoch_s": statistics.fmean(epoch["seconds"] for epoch in epochs),
    }


def compare(rows: Sequence[Row]) -> list[Row]:
    """Each pair of strategies of a model, the better one first, by the last epoch on the seeds that both have."""
    last = {(row["model"], row["strategy"], row["seed"]): row["curve"][-1]["test_accuracy"] for row in rows}
    compared = []
    for model in dict.fromkeys(row["model"] for row in rows):
        strategies = dict.fromkeys(row["strategy"] for row in rows if row["model"] == model)
        for one, other in itertools.combinations(strategies, 2):
            seeds = sorted(seed for m, s, seed in last if (m, s) == (model, one) and (model, other, seed) in last)
            if not seeds:
                continue
            leads = [last[model, one, seed] - last[model, other, seed] for seed in seeds]
            if statistics.fmean(leads) < 0:
                one, other, leads = other, one, [-lead for lead in leads]
            ahead = sum(lead > 0 for lead in leads)
            pair = {"model": model, "better": one, "worse": other, "lead": spread(leads)}
            compared.append({**pair, "ahead": ahead, "seeds": len(seeds)})
    return compared


def results_of(document: Row) -> Results:
    """The page of a reproduction."""
    cells = tuple(
        (
            f"{cell['model']}, {cell['strategy']}", len(cell["seeds"]), with_spread(cell["last"]),
            with_spread(cell["best"]), None if cell["device"] is None else with_spread(cell["device"]),
            f"{cell['bytes_up'] / 1e6:.2f}", f"{cell['bytes_down'] / 1e6:.2f}", f"{cell['epoch_s']:.1f}",
        )
        for cell in document["cells"]
    )  # fmt: skip
    pairs = tuple(
        (
            f"{pair['model']}: {pair['better']} over {pair['worse']}", with_spread(pair["lead"]),
            f"{pair['ahead']} of {pair['seeds']}",
        )
        for pair in document["pairs"]
    )  # fmt: skip
    curves = tuple(
        (
            f"{row['model']}, {row['strategy']}, seed {row['seed']}",
            *(" ".join(f"{each[name] * factor:.{digits}f}" for each in row["curve"])
              for name, factor, digits in (("loss", 1, 3), ("test_accuracy", 100, 1))),
            f"{row['seconds']:.0f}",
        )
        for row in document["rows"]
    )  # fmt: skip
    facts = ("data", "epochs", "batch", "learning_rate", "cut", "engine", "label_mode", "initial_weights")
    return Results(
        title="Split training, its strategies side by side",
        facts=tuple((name.replace("_", " "), document[name]) for name in facts),
        tables=(
            Table(
                "Test accuracy in %, mean and standard deviation over seeds; MB and seconds of an epoch",
                ("setting", "seeds", "last epoch", "best epoch", "at a device", "MB up", "MB down", "seconds"),
                cells,
                note="At a device: the last device's own part with the server's rest, at the end; the other columns "
                "are of the whole model W. The best epoch was chosen on the test images, the last was not.",
            ),
            Table("Who is ahead, in points of the last epoch", ("pair", "lead", "seeds ahead"), pairs),
            Table("Epochs", ("row", "training loss", "test accuracy in %", "seconds"), curves),
        ),
    )
