"""From rows of EFTViT and its baselines to cells: mean and spread over seeds, and what a common accuracy costs. Pure.

Computing rows is left to `reproduce_eft_rows`, files and printing to `reproduce_eft`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from contract.asks import EVERY_IMAGE
from server_runtime.report import Results, Table
from tools.reproduce_table import spread, with_spread

Row = dict[str, Any]
SETTING = ("method", "beta", "ratio", "local", "threshold", "rate", "server_rate")


def key_of(row: Row) -> tuple[Any, ...]:
    """What rows of one cell have in common."""
    return tuple(row[name] for name in SETTING)


def judged(row: Row) -> list[Row]:
    """The rounds in which test images were judged."""
    return [each for each in row["curve"] if each["accuracy"] is not None]


def with_result(row: Row) -> Row:
    """A row with its setting in words, the last round's accuracy, and bytes both ways of all rounds and devices."""
    both = sum(each["bytes_up"] + each["bytes_down"] for each in row["curve"])
    return {**row, "setting": named(row), "accuracy": judged(row)[-1]["accuracy"], "bytes": both}


def summarise(rows: Sequence[Row], target: float | None) -> list[Row]:
    """One cell for each setting, in the order of coming. Without a target, the accuracy to reach is, for each beta, the
    lowest among methods of what each reaches at its best setting, seeds averaged."""
    settings = list(dict.fromkeys(map(key_of, rows)))
    grouped = {each: [row for row in rows if key_of(row) == each] for each in settings}
    targets = {}
    for beta in dict.fromkeys(each[1] for each in settings):
        best: dict[str, float] = {}
        for setting, own in grouped.items():
            if setting[1] == beta:
                reached = statistics.fmean(max(each["accuracy"] for each in judged(row)) for row in own)
                best[setting[0]] = max(reached, best.get(setting[0], 0.0))
        targets[beta] = min(best.values()) if target is None else target
    return [cell_of(own, targets[setting[1]]) for setting, own in grouped.items()]


def cell_of(rows: Sequence[Row], target: float) -> Row:
    """The figures of rows that differ in their seeds alone; bytes and MACs of all devices together."""
    last = [judged(row)[-1] for row in rows]
    reached = [reach(row, target) for row in rows]
    whole = [each for each in reached if each is not None]
    macs = [sum(each["macs_devices"] for each in row["curve"]) for row in rows if row["curve"][0]["macs_devices"]]
    cell: Row = {name: rows[0][name] for name in SETTING}
    return cell | {
        "seeds": sorted(row["seed"] for row in rows),
        "last": spread([each["accuracy"] for each in last]),
        "best": spread([max(each["accuracy"] for each in judged(row)) for row in rows]),
        "own": spread([each["own_accuracy"] for each in last]),
        "bytes_up": statistics.fmean(sum(each["bytes_up"] for each in row["curve"]) for row in rows),
        "bytes_down": statistics.fmean(sum(each["bytes_down"] for each in row["curve"]) for row in rows),
        "macs_devices": statistics.fmean(macs) if macs else None,
        "seconds": statistics.fmean(row["seconds"] for row in rows),
        "target": target,
        "reached": len(whole),
        "rounds_to_target": statistics.fmean(each["round"] for each in whole) if whole else None,
        "bytes_to_target": statistics.fmean(each["bytes"] for each in whole) if whole else None,
        "local_s_to_target": statistics.fmean(each["longest_total_s"] for each in whole) if whole else None,
    }


def reach(row: Row, target: float) -> Row | None:
    """The first judged round at the target, bytes both ways until then, and how long the busiest device has worked."""
    bytes_both = 0
    for each in row["curve"]:
        bytes_both += each["bytes_up"] + each["bytes_down"]
        if each["accuracy"] is not None and each["accuracy"] >= target:
            return {"round": each["round"], "bytes": bytes_both, "longest_total_s": each["longest_total_s"]}
    return None


def named(cell: Row) -> str:
    """A setting in words."""
    text = f"{cell['method']}, beta {cell['beta']:g}, lr {cell['rate']:g}"
    if cell["method"] != "eft_vit":
        return f"{text}, r {cell['ratio']:g}" if cell["ratio"] else text
    others = {0.0: "largest", EVERY_IMAGE: "every image"}
    threshold = others.get(cell["threshold"], f"{cell['threshold']:g} x median")
    text += f" / {cell['server_rate']:g}"
    return f"{text}, r {cell['ratio']:g}, M_l {cell['local']}, {threshold}"


def results_of(document: Row) -> Results:
    """The page of a reproduction."""
    cells = tuple(
        (
            named(cell), len(cell["seeds"]), with_spread(cell["last"]), with_spread(cell["best"]),
            with_spread(cell["own"]), f"{cell['bytes_up'] / 1e6:.1f}", f"{cell['bytes_down'] / 1e6:.1f}",
            None if cell["macs_devices"] is None else f"{cell['macs_devices'] / 1e12:.2f}", f"{cell['seconds']:.0f}",
        )
        for cell in document["cells"]
    )  # fmt: skip
    targets = tuple(
        (
            named(cell), f"{100 * cell['target']:.1f}", f"{cell['reached']} of {len(cell['seeds'])}",
            *(None if cell[name] is None else f"{cell[name] / unit:.1f}" for name, unit in
              (("rounds_to_target", 1), ("bytes_to_target", 1e6), ("local_s_to_target", 1))),
        )
        for cell in document["cells"]
    )  # fmt: skip
    curves = tuple(
        (
            f"{named(row)}, seed {row['seed']}",
            " ".join(f"{each['round']}:{100 * each['accuracy']:.1f}" for each in judged(row)),
            f"{row['seconds']:.0f}",
        )
        for row in document["rows"]
    )
    facts = ("data", "rounds", "local_epochs", "fraction", "batch", "schedule", "engine", "label_mode")
    return Results(
        title="EFTViT beside federated tuning",
        facts=tuple((name.replace("_", " "), document[name]) for name in facts),
        tables=(
            Table(
                "Test accuracy in %, mean and standard deviation over seeds; MB and T MACs of all rounds and devices",
                ("setting", "seeds", "last round", "best round", "own classes", "MB up", "MB down", "TMAC", "seconds"),
                cells,
                note="EFTViT: the mean over devices, each by its own local module. Own classes: weighed by the classes "
                "that a device has. The best round was chosen on the test images, the last was not. TMAC: training on "
                "devices by the counter, where the strategy counts.",
            ),
            Table(
                "What a common accuracy costs",
                ("setting", "accuracy in %", "reached", "rounds", "MB both ways", "busiest device s"),
                targets,
                note="Judged rounds only. Busiest device: the largest local time of any device until then, on the "
                "machine that played all devices.",
            ),
            Table("Rounds", ("row", "round: test accuracy in %", "seconds"), curves),
        ),
    )
